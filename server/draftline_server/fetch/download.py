"""Fetches files, several at once, each resumed where an earlier try or process left off.

A file's part lies under a name that its content gives it and is written at its true offsets only, so that
even two processes which both believe to hold the lock write the same bytes to the same places. What lies
there from before is hashed again, never believed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO

from draftline_server.core.digest import FileEntry
from draftline_server.errors import FetchError
from draftline_server.fetch.progress import Progress
from draftline_server.fetch.retries import Pause, Retries
from draftline_server.fetch.source import RemoteFile, Source, TemporaryFetchError
from draftline_server.log import log_event

LOG_SECONDS = 5.0

_PIECE_BYTES = 2**30
"""Of one request: stores limit the size of an answer, signed addresses the time that it may take."""
_MAX_FILES_AT_ONCE = 4
_READ_BYTES = 4 * 2**20

_logger = logging.getLogger(__name__)


class Downloader:
    """Brings files of one source into a folder, under their staged names."""

    def __init__(
        self, source: Source, folder: Path, progress: Progress, *, pause: Pause | None = None
    ) -> None:
        self._source = source
        self._folder = folder
        self._progress = progress
        self._is_stopping = threading.Event()
        self._pause = pause if pause is not None else self._is_stopping.wait

    def fetch(self, files: Sequence[RemoteFile]) -> list[FileEntry]:
        """Raises what the first failing file raises; the others stop soon after."""
        self._is_stopping.clear()
        with ThreadPoolExecutor(max_workers=_MAX_FILES_AT_ONCE) as workers:
            running = [workers.submit(self._fetch_file, file) for file in files]
            try:
                return self._wait(running)
            finally:
                self._is_stopping.set()
                for future in running:
                    future.cancel()

    def _wait(self, running: Sequence[Future[FileEntry]]) -> list[FileEntry]:
        pending = set(running)
        while pending:
            done, pending = wait(pending, timeout=LOG_SECONDS, return_when=FIRST_EXCEPTION)
            self._progress.log()
            for future in done:
                future.result()  # raises what failed first
        return [future.result() for future in running]

    def _fetch_file(self, file: RemoteFile) -> FileEntry:
        path = self._folder / file.staged_name
        for is_last in (False, True):
            sha256 = self._complete(file, path)
            if file.sha256 in (None, sha256):
                return FileEntry(file.path, file.size, sha256)
            path.unlink()
            self._progress.skip(-file.size)
            if not is_last:
                log_event(_logger, logging.WARNING, "file was damaged and is fetched anew", path=file.path)
        raise FetchError(f"{file.path}: sha256:{sha256} has come, sha256:{file.sha256} was promised")

    def _complete(self, file: RemoteFile, path: Path) -> str:
        """Fetches what is missing; returns the hash of all."""
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as part:
            hasher, position = _hash_part(part, file.size)
            self._progress.skip(position)
            retries = Retries(file.path, self._pause)
            while position < file.size:
                try:
                    for chunk in self._read_piece(file, position):
                        part.write(chunk)
                        hasher.update(chunk)
                        position += len(chunk)
                        retries.note_progress()
                except TemporaryFetchError as error:
                    retries.note_failure(error)
            part.flush()
            os.fsync(part.fileno())
        return hasher.hexdigest()

    def _read_piece(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """Some of the bytes from `start` on, and at least one."""
        stop = min(start + _PIECE_BYTES, file.size)
        position = start
        for chunk in self._source.read(file, start, stop):
            if self._is_stopping.is_set():
                raise FetchError("stopped, since another file could not be fetched")
            wanted = chunk[: stop - position]
            position += len(wanted)
            self._progress.add(len(wanted))
            if wanted:
                yield wanted
        if position == start:
            raise TemporaryFetchError("nothing came")


def _hash_part(part: BinaryIO, size: int) -> tuple[hashlib._Hash, int]:
    """The hash state and length of what is there; a part that is too long is none."""
    if os.fstat(part.fileno()).st_size > size:
        part.truncate(0)
    hasher = hashlib.sha256(usedforsecurity=False)
    while chunk := part.read(_READ_BYTES):
        hasher.update(chunk)
    return hasher, part.tell()
