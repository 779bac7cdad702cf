"""A hub on loopback: the part of the Hugging Face API that fetching a model uses, over real HTTP.

As there, large files (here: all safetensors) are redirected to another host with a signed address, ranges
are served, and private repositories ask for a token. It can be slow, cut connections and fail on demand.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import urllib.parse
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

SIGNATURE = "c2lnbmVkLWFkZHJlc3M"
"""In every redirect's query; it must show up nowhere."""
_CHUNK_BYTES = 64 * 1024


@dataclass
class Repository:
    """One model: its files at each commit, and names for commits."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    token: str | None = None
    """Needed to see it at all."""
    is_gated: bool = False

    def files(self, revision: str) -> dict[str, bytes] | None:
        return self.commits.get(self.branches.get(revision, revision))

    def commit(self, revision: str) -> str:
        return self.branches.get(revision, revision)


@dataclass(frozen=True)
class Request:
    """What a client asked for."""

    path: str
    range: str | None
    authorization: str | None
    is_redirected: bool

    @property
    def start(self) -> int:
        """The first byte that it asks for."""
        return int((self.range or "bytes=0-").removeprefix("bytes=").partition("-")[0])


@dataclass
class HubServer:
    """Set the fields to misbehave; they hold for what is asked for from then on."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    failures: deque[int] = field(default_factory=deque)
    """Status codes of the next answers."""
    retry_after_seconds: int | None = None
    """What those answers ask for."""
    cut_after_bytes: int | None = None
    """Closes each connection for a large file after so many bytes."""
    bytes_per_second: float | None = None
    ignores_ranges: bool = False
    requests: list[Request] = field(default_factory=list)
    sent_bytes: int = 0
    """Of large files."""

    def add(
        self, name: str, files: dict[str, bytes], *, commit: str = "1" * 40, **options: Any
    ) -> Repository:
        """A repository with one commit, which is main."""
        self.repositories[name] = Repository({commit: files}, {"main": commit}, **options)
        return self.repositories[name]

    def __enter__(self) -> Self:
        self._servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), self._handler(name)) for name in ("hub", "cdn")
        ]
        self._threads = [
            threading.Thread(target=server.serve_forever, args=[0.02]) for server in self._servers
        ]
        for server in self._servers:
            server.daemon_threads = True
            server.block_on_close = False
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def large_file_requests(self) -> list[Request]:
        return [request for request in self.requests if request.is_redirected]

    def redirect(self, content: bytes) -> str:
        """The signed address of a large file, on the other host."""
        self._blobs[_sha256(content)] = content
        return f"http://127.0.0.1:{self._servers[1].server_port}/{_sha256(content)}?Signature={SIGNATURE}"

    def __post_init__(self) -> None:
        self._blobs: dict[str, bytes] = {}

    def blob(self, sha256: str) -> bytes:
        return self._blobs[sha256]

    def _handler(self, name: str) -> type[BaseHTTPRequestHandler]:
        return type("Handler", (_HubHandler if name == "hub" else _CdnHandler,), {"hub": self})


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Nothing: the tests' output is theirs."""

    def note(self, *, is_redirected: bool) -> None:
        headers = self.headers
        self.hub.requests.append(
            Request(self.path, headers.get("Range"), headers.get("Authorization"), is_redirected)
        )

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_content(self, content: bytes, *, is_large: bool) -> None:
        start, stop = self._range(len(content))
        partial = not self.hub.ignores_ranges and "Range" in self.headers
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        else:
            start, stop = 0, len(content)
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if is_large and self.hub.cut_after_bytes is not None:
            stop = min(stop, start + self.hub.cut_after_bytes)
            self.close_connection = True
        for position in range(start, stop, _CHUNK_BYTES):
            chunk = content[position : min(position + _CHUNK_BYTES, stop)]
            if not self._write(chunk):
                return
            if is_large:
                self.hub.sent_bytes += len(chunk)
                if self.hub.bytes_per_second:
                    time.sleep(len(chunk) / self.hub.bytes_per_second)

    def _write(self, chunk: bytes) -> bool:
        """False where the client has gone, as killed ones do."""
        try:
            self.wfile.write(chunk)
        except OSError:
            self.close_connection = True
            return False
        return True

    def _range(self, size: int) -> tuple[int, int]:
        stated = self.headers.get("Range")
        if stated is None:
            return 0, size
        first, _, last = stated.removeprefix("bytes=").partition("-")
        return int(first), min(int(last) + 1 if last else size, size)


class _HubHandler(_Handler):
    def do_GET(self) -> None:
        self.note(is_redirected=False)
        if self.hub.failures:
            headers = (
                {"Retry-After": str(self.hub.retry_after_seconds)} if self.hub.retry_after_seconds else {}
            )
            return self.answer(self.hub.failures.popleft(), b'{"error": "trouble"}', **headers)
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")
        name = "/".join(path.removeprefix("api/models/").split("/")[:2])
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.token and not self._has(repository.token)):
            return self.answer(401, b"{}", X_Error_Code="RepoNotFound")
        rest = path.removeprefix("api/models/").removeprefix(name).strip("/")
        if path.startswith("api/models/"):
            return self._describe(name, repository, rest.removeprefix("revision/") or "main")
        if repository.is_gated:
            return self.answer(403, b"{}", X_Error_Code="GatedRepo")
        revision, _, file = rest.removeprefix("resolve/").partition("/")
        return self._send(repository, revision, file)

    def _describe(self, name: str, repository: Repository, revision: str) -> None:
        files = repository.files(revision)
        if files is None:
            return self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
        siblings = [_describe_file(path, content) for path, content in files.items()]
        document = {"id": name, "sha": repository.commit(revision), "siblings": siblings}
        return self.answer(200, json.dumps(document).encode(), Content_Type="application/json")

    def _send(self, repository: Repository, revision: str, path: str) -> None:
        content = (repository.files(revision) or {}).get(path)
        if content is None:
            return self.answer(404, b"{}", X_Error_Code="EntryNotFound")
        if _is_large(path):
            return self.answer(302, Location=self.hub.redirect(content))
        return self.send_content(content, is_large=False)

    def _has(self, token: str) -> bool:
        return self.headers.get("Authorization") == f"Bearer {token}"


class _CdnHandler(_Handler):
    def do_GET(self) -> None:
        self.note(is_redirected=True)
        path, _, query = self.path.partition("?")
        if query != f"Signature={SIGNATURE}":
            return self.answer(403)
        return self.send_content(self.hub.blob(path.lstrip("/")), is_large=True)


def _describe_file(path: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    described: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob}
    if _is_large(path):
        described["lfs"] = {"size": len(content), "sha256": _sha256(content), "pointerSize": 134}
    return described


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
