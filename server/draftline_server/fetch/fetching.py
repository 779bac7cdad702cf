"""`draftline-server fetch`: from a URI to a verified directory.

    find what is there → lock → list → select → fetch → compare digests → install

Files whose hash nobody states are fetched first; then the model's digest is known, and one that is not
the expected one is refused before the large files are fetched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftline_server.core.digest import (
    MANIFEST_NAME,
    FileEntry,
    ModelDigest,
    Origin,
    compute_model_digest,
    digest_files,
    hash_model,
    parse_manifest,
    write_manifest,
)
from draftline_server.errors import FetchError, ModelError
from draftline_server.fetch.download import Downloader
from draftline_server.fetch.installation import Installation, explain_os_error, is_same_directory
from draftline_server.fetch.lock import locked
from draftline_server.fetch.progress import Progress
from draftline_server.fetch.redaction import redact, silence_libraries
from draftline_server.fetch.retries import Pause, with_retries
from draftline_server.fetch.selection import apply_manifest, select_files
from draftline_server.fetch.source import RemoteFile, Source
from draftline_server.fetch.uri import ModelUri, parse_uri
from draftline_server.log import log_event

_logger = logging.getLogger(__name__)


def fetch_model(
    uri: str,
    directory: Path,
    *,
    revision: str | None = None,
    digest: str | None = None,
    pause: Pause | None = None,
) -> ModelDigest:
    """Brings the model into the directory, unless it is there. Raises `FetchError`, one line.

    `pause` waits between tries; by default it sleeps.
    """
    model_uri = parse_uri(uri)
    try:
        return _fetch(model_uri, directory, revision=revision, digest=digest, pause=pause)
    except (FetchError, ModelError) as error:
        raise FetchError(f"{model_uri}: {redact(str(error))}") from error
    except OSError as error:
        raise FetchError(f"{model_uri}: {explain_os_error(error, directory)}") from error


def _fetch(
    uri: ModelUri, directory: Path, *, revision: str | None, digest: str | None, pause: Pause | None
) -> ModelDigest:
    origin = Origin(uri=str(uri), requested_revision=revision)
    installation = Installation(directory)
    found = installation.find(origin, digest)
    if found is None and uri.scheme == "file" and is_same_directory(Path(uri.location), directory):
        return _verify_in_place(directory, origin, digest)
    if found is None:
        installation.open(origin)
        with locked(directory):
            found = installation.find(origin, digest)  # by whoever held the lock
            if found is None:
                return _Fetch(uri, origin, installation, pause).run(digest)
    log_event(_logger, logging.INFO, "model was there already", uri=str(uri), digest=found.model)
    return found


def _verify_in_place(directory: Path, origin: Origin, digest: str | None) -> ModelDigest:
    """Hashes what is there, and leaves a manifest where there is none and one can be written."""
    hashed = hash_model(directory)
    has_manifest = (directory / MANIFEST_NAME).exists()
    if has_manifest and compute_model_digest(directory).model != hashed.model:
        raise FetchError(f"{directory}: the files do not have the hashes that {MANIFEST_NAME} lists")
    _check_digest(digest, hashed.files)
    if not has_manifest:
        try:
            write_manifest(directory, files=hashed.files, origin=origin)
        except OSError as error:
            log_event(_logger, logging.WARNING, "no manifest could be written", reason=error.strerror)
    log_event(_logger, logging.INFO, "model was verified in place", uri=origin.uri, digest=hashed.model)
    return hashed


class _Fetch:
    """One fetch into a locked directory."""

    def __init__(
        self, uri: ModelUri, origin: Origin, installation: Installation, pause: Pause | None
    ) -> None:
        self._source = _open_source(uri, origin.requested_revision)
        silence_libraries()  # only now, since some set their level when they are imported
        self._origin = origin
        self._installation = installation
        self._pause = pause

    def run(self, digest: str | None) -> ModelDigest:
        started = time.monotonic()
        listing = with_retries("the list of files", self._source.list, self._pause or time.sleep)
        origin = replace(self._origin, revision=listing.revision)
        files = self._select(listing.files)
        self._installation.open(origin)
        self._installation.prepare(files, origin)
        total_bytes = sum(file.size for file in files)
        log_event(
            _logger,
            logging.INFO,
            "fetch began",
            uri=origin.uri,
            revision=origin.revision,
            files=len(files),
            total_bytes=total_bytes,
        )
        entries = self._download(files, Progress(origin.uri, total_bytes=total_bytes), digest)
        installed = self._installation.install(files, entries, origin)
        log_event(
            _logger,
            logging.INFO,
            "model was fetched",
            uri=origin.uri,
            revision=origin.revision,
            digest=installed.model,
            total_bytes=total_bytes,
            duration_seconds=time.monotonic() - started,
        )
        return installed

    def _select(self, files: Sequence[RemoteFile]) -> list[RemoteFile]:
        manifest = next((file for file in files if file.path == MANIFEST_NAME), None)
        if manifest is None:
            return select_files(files)
        content = with_retries(
            MANIFEST_NAME,
            lambda: b"".join(self._source.read(manifest, 0, manifest.size)),
            self._pause or time.sleep,
        )
        return apply_manifest(files, parse_manifest(content, name=MANIFEST_NAME).files)

    def _download(
        self, files: Sequence[RemoteFile], progress: Progress, digest: str | None
    ) -> list[FileEntry]:
        downloader = Downloader(self._source, self._installation.staging, progress, pause=self._pause)
        stated = [FileEntry(file.path, file.size, file.sha256) for file in files if file.sha256 is not None]
        hashed = downloader.fetch([file for file in files if file.sha256 is None])
        _check_digest(digest, [*stated, *hashed])
        downloader.fetch([file for file in files if file.sha256 is not None])
        return [*stated, *hashed]


def _check_digest(expected: str | None, entries: Sequence[FileEntry]) -> None:
    computed = digest_files(entries)
    if expected not in (None, computed):
        raise FetchError(f"--digest: {expected} is expected, the files give {computed}")


def _open_source(uri: ModelUri, revision: str | None) -> Source:
    # Imported late: each brings a library that the others do not need.
    match uri.scheme:
        case "hf":
            from draftline_server.fetch.hub_source import HubSource

            return HubSource(uri.location, revision)
        case "s3":
            from draftline_server.fetch.bucket_source import BucketSource

            return BucketSource(uri.location, uri.prefix)
        case "file":
            from draftline_server.fetch.directory_source import DirectorySource

            return DirectorySource(Path(uri.location))
