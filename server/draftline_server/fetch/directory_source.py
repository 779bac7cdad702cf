"""Models in a folder of this machine, such as a mounted volume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from draftline_server.core.digest import MANIFEST_NAME, list_files
from draftline_server.errors import FetchError
from draftline_server.fetch.source import Listing, RemoteFile

_CHUNK_BYTES = 4 * 2**20


class DirectorySource:
    """Links are followed, as download caches lay their files out."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def list(self) -> Listing:
        if not self._directory.is_dir():
            kind = "not a directory" if self._directory.exists() else "no such directory"
            raise FetchError(kind)
        try:
            paths = list_files(self._directory)
            if (self._directory / MANIFEST_NAME).exists():
                paths[MANIFEST_NAME] = (self._directory / MANIFEST_NAME).stat().st_size
            return Listing([self._describe(path) for path in paths])
        except OSError as error:
            raise FetchError(f"{error.filename}: cannot be read: {error.strerror}") from error

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes]:
        try:
            with (self._directory / file.path).open("rb") as content:
                content.seek(start)
                while start < stop and (chunk := content.read(min(_CHUNK_BYTES, stop - start))):
                    start += len(chunk)
                    yield chunk
        except OSError as error:
            raise FetchError(f"{file.path}: cannot be read: {error.strerror}") from error

    def _describe(self, path: str) -> RemoteFile:
        status = (self._directory / path).stat()
        return RemoteFile(path=path, size=status.st_size, identity=f"{status.st_mtime_ns}:{status.st_ino}")
