"""Models on a hub that speaks the Hugging Face API; `HF_ENDPOINT` names another one than huggingface.co.

huggingface_hub does what is particular to a hub: addresses, tokens, revisions, listings, redirects and what
its errors mean. Files are read in ranges of ours, since its own downloads begin each file anew after a kill.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import HfApi, constants, get_session, get_token, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling

from draftline_server.errors import FetchError
from draftline_server.fetch.redaction import redact
from draftline_server.fetch.source import Listing, RemoteFile, TemporaryFetchError

_TIMEOUT_SECONDS = 30.0
_PARTIAL_CONTENT = 206
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})


class HubSource:
    """One repository at one revision, which `list` resolves to a commit."""

    def __init__(self, repository: str, revision: str | None) -> None:
        self._repository = repository
        self._revision = revision or constants.DEFAULT_REVISION
        self._endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self._commit = self._revision

    def list(self) -> Listing:
        with self._explaining():
            info = HfApi(endpoint=self._endpoint).model_info(
                self._repository, revision=self._revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
            )
        if info.sha is None or info.siblings is None:
            raise FetchError(f"{self._host} does not answer as a hub does; is HF_ENDPOINT right?")
        self._commit = info.sha
        return Listing([_describe(file) for file in info.siblings], revision=info.sha)

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes]:
        url = hf_hub_url(self._repository, file.path, revision=self._commit, endpoint=self._endpoint)
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        if token := get_token():
            headers["Authorization"] = f"Bearer {token}"
        with (
            self._explaining(),
            get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as response,
        ):
            hf_raise_for_status(response)
            # A server or proxy may ignore ranges and send the whole file.
            skipped = 0 if response.status_code == _PARTIAL_CONTENT else start
            for chunk in response.iter_raw():  # as it comes: a larger chunk is lost with its connection
                yield chunk[skipped:]
                skipped = max(skipped - len(chunk), 0)

    @property
    def _host(self) -> str:
        return httpx2.URL(self._endpoint).netloc.decode()

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """What goes wrong, in our words: theirs have several lines and addresses with signatures."""
        try:
            yield
        except OfflineModeIsEnabled as error:
            raise FetchError("HF_HUB_OFFLINE is set") from error
        except HfHubHTTPError as error:
            raise self._explain_answer(error) from error
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            reason = redact(str(error)) or type(error).__name__
            raise TemporaryFetchError(f"{self._host}: {reason}") from error
        except (HFValidationError, httpx2.InvalidURL) as error:
            raise FetchError(redact(str(error))) from error
        except (ValueError, KeyError, TypeError) as error:
            raise FetchError(f"{self._host} does not answer as a hub does; is HF_ENDPOINT right?") from error

    def _explain_answer(self, error: HfHubHTTPError) -> FetchError:
        status = error.response.status_code
        token = "HF_TOKEN has no access" if get_token() else "HF_TOKEN is not set"
        match error:
            case GatedRepoError():
                return FetchError(f"no access ({status}): the repository is gated, and {token}")
            case RevisionNotFoundError():
                return FetchError(f"--revision {self._revision}: there is no such revision")
            case RepositoryNotFoundError():
                return FetchError(f"not found on {self._host}, or private ({status}; {token})")
        if status in (401, 403):
            return FetchError(f"no access ({status} from {self._host}): {token}")
        if status in _TEMPORARY:
            return TemporaryFetchError(
                f"{self._host} answered {status}", retry_after_seconds=_retry_after(error.response)
            )
        if status == 404:
            return FetchError(f"not found on {self._host}")
        return FetchError(f"{self._host} answered {status}")


def _describe(file: RepoSibling) -> RemoteFile:
    if file.lfs is not None:
        sha256 = file.lfs.sha256
        return RemoteFile(path=file.rfilename, size=file.lfs.size, sha256=sha256, identity=sha256)
    if file.size is None or file.blob_id is None:
        raise FetchError(f"{file.rfilename}: the hub does not say its size")
    return RemoteFile(path=file.rfilename, size=file.size, identity=file.blob_id)


def _retry_after(response: httpx2.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0
