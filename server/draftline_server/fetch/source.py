"""What every place that models come from can do: list its files and read a part of one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from draftline_server.errors import FetchError


class TemporaryFetchError(FetchError):
    """Another try may succeed: the network, an overloaded server, a connection cut short."""

    def __init__(self, message: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file of a model; `path` is relative, with forward slashes."""

    path: str
    size: int
    sha256: str | None = None
    """Where the source knows it."""
    identity: str
    """Changes with the content, so that a part that lies here is continued only with its own rest."""

    @property
    def staged_name(self) -> str:
        """The name of its part, equal in every process that fetches the same content."""
        text = f"{self.path}\0{self.size}\0{self.identity}"
        return hashlib.sha256(text.encode(errors="surrogateescape"), usedforsecurity=False).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Listing:
    """All files at one moment."""

    files: Sequence[RemoteFile]
    revision: str | None = None
    """The commit, where the source has such."""


class Source(Protocol):
    """A place of models. Both methods raise `FetchError`, `TemporaryFetchError` for what may pass."""

    def list(self) -> Listing:
        """Everything that is there."""

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` to before `stop`; fewer where the connection was cut."""
