"""The directory that a model is fetched into: what is in it, and how a model gets there in one go.

Parts are gathered in a hidden folder inside the directory, which is on the same file system even where the
directory is a volume's root. The manifest is moved first and the files follow: in between, the directory
does not match its manifest, and a server refuses it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from draftline_server.core.byte_size import format_bytes
from draftline_server.core.digest import (
    MANIFEST_NAME,
    FileEntry,
    ModelDigest,
    Origin,
    compute_model_digest,
    list_files,
    read_manifest,
    write_manifest,
)
from draftline_server.errors import FetchError, ModelError
from draftline_server.fetch.source import RemoteFile

STAGING_NAME = ".draftline-fetch"

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Installation:
    """One directory. Methods raise `FetchError` and `OSError`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.staging = directory / STAGING_NAME

    def find(self, origin: Origin, digest: str | None) -> ModelDigest | None:
        """The model, if it is there, whole and the one that is asked for.

        With a digest it may be from anywhere; without one, from where it is asked for now.
        """
        found = self._complete_model()
        if found is None:
            return None
        if digest is not None:
            return found if found.model == digest else None
        return found if _is_same_request(found.origin, origin) else None

    def open(self, origin: Origin) -> None:
        """Makes the directory ready to fetch into; refuses one that holds anything else."""
        self.directory.mkdir(parents=True, exist_ok=True)
        manifest = self.directory / MANIFEST_NAME
        holder = read_manifest(manifest).origin if manifest.exists() else None
        if holder is not None and holder.uri != origin.uri:
            raise FetchError(f"{self.directory}: holds {holder.uri}; choose another directory")
        if holder is None and (manifest.exists() or list_files(self.directory)):
            raise FetchError(
                f"{self.directory}: holds files that no fetch put there; choose an empty directory"
            )
        self.staging.mkdir(exist_ok=True)

    def prepare(self, files: Sequence[RemoteFile], origin: Origin) -> None:
        """Drops parts of other contents, and takes back what an interrupted `install` had moved already."""
        wanted = {file.staged_name for file in files}
        for part in self.staging.iterdir():
            if part.name not in wanted:
                part.unlink()
        manifest = self.directory / MANIFEST_NAME
        is_half = manifest.exists() and self._complete_model() is None
        if is_half and read_manifest(manifest).origin == origin:
            for file in files:
                self._take_back(file)
        self._check_space(files)

    def install(
        self, files: Sequence[RemoteFile], entries: Sequence[FileEntry], origin: Origin
    ) -> ModelDigest:
        """Puts the fetched files in place; replaces what an earlier fetch put there."""
        digest = write_manifest(self.directory, files=entries, origin=origin)
        for file in files:
            destination = self.directory / file.path
            destination.parent.mkdir(parents=True, exist_ok=True)
            (self.staging / file.staged_name).replace(destination)
        for path in list_files(self.directory).keys() - {file.path for file in files}:
            (self.directory / path).unlink()
        shutil.rmtree(self.staging)
        return digest

    def _complete_model(self) -> ModelDigest | None:
        if not (self.directory / MANIFEST_NAME).exists():
            return None
        try:
            return compute_model_digest(self.directory)
        except ModelError:  # files are missing, or not those that it lists
            return None

    def _take_back(self, file: RemoteFile) -> None:
        moved, part = self.directory / file.path, self.staging / file.staged_name
        if moved.is_file() and not part.exists():
            moved.replace(part)

    def _check_space(self, files: Sequence[RemoteFile]) -> None:
        there = sum(part.stat().st_size for part in self.staging.iterdir())
        needed = sum(file.size for file in files) - there
        free = shutil.disk_usage(self.directory).free
        if needed > free:
            raise FetchError(
                f"{self.directory}: disk full: {format_bytes(needed)} are needed, "
                f"{format_bytes(free)} are free"
            )


def explain_os_error(error: OSError, directory: Path) -> str:
    """One line for what the file system did."""
    path = error.filename if error.filename is not None else directory
    if error.errno in _DISK_FULL:
        return f"{path}: disk full ({error.strerror}); what has come is kept and continued by the next try"
    return f"{path}: {error.strerror or type(error).__name__}"


def is_same_directory(first: Path, second: Path) -> bool:
    """Whether both paths lead to one directory that exists."""
    return first.is_dir() and second.is_dir() and os.path.samefile(first, second)


def _is_same_request(holder: Origin | None, asked: Origin) -> bool:
    return holder is not None and (holder.uri, holder.requested_revision) == (
        asked.uri,
        asked.requested_revision,
    )
