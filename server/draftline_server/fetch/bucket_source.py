"""Models in an S3 bucket, or in a store that speaks its API (`AWS_ENDPOINT_URL`).

boto3 finds credentials as it always does: the environment, a service account's web identity, the node's
role. Where there are none, requests are anonymous, which public buckets allow. Retries are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as StoreConnectionError

from draftline_server.errors import FetchError
from draftline_server.fetch.redaction import redact
from draftline_server.fetch.source import Listing, RemoteFile, TemporaryFetchError

_CHUNK_BYTES = 2**20
_CONNECTIONS = 16
_TIMEOUT_SECONDS = 30
_NO_ACCESS = frozenset({"ExpiredToken", "InvalidToken", "AuthorizationHeaderMalformed"})
_TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})


class BucketSource:
    """The objects below one prefix."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        options: dict[str, Any] = {
            "connect_timeout": _TIMEOUT_SECONDS,
            "read_timeout": _TIMEOUT_SECONDS,
            "max_pool_connections": _CONNECTIONS,
            "retries": {"total_max_attempts": 1},
        }
        with self._explaining():
            session = boto3.Session()
            if session.get_credentials() is None:
                options["signature_version"] = UNSIGNED
            self._client = session.client("s3", config=Config(**options))

    def list(self) -> Listing:
        pages = self._client.get_paginator("list_objects_v2")
        with self._explaining():
            objects = [
                entry
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix)
                for entry in page.get("Contents", [])
                if not entry["Key"].endswith("/")  # what consoles make of folders
            ]
        if not objects:
            raise FetchError("not found: there are no objects below it")
        return Listing(
            [
                RemoteFile(
                    path=entry["Key"].removeprefix(self._prefix), size=entry["Size"], identity=entry["ETag"]
                )
                for entry in objects
            ]
        )

    def read(self, file: RemoteFile, start: int, stop: int) -> Iterator[bytes]:
        with self._explaining():
            answer = self._client.get_object(
                Bucket=self._bucket,
                Key=self._prefix + file.path,
                Range=f"bytes={start}-{stop - 1}",
                IfMatch=file.identity,
            )
            yield from answer["Body"].iter_chunks(_CHUNK_BYTES)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """What goes wrong, in our words: theirs may hold a key's id or a signed address."""
        try:
            yield
        except ClientError as error:
            raise _explain_answer(error) from error
        except (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError) as error:
            raise FetchError(f"no access: {redact(str(error))}") from error
        except (StoreConnectionError, HTTPClientError, IncompleteReadError) as error:
            raise TemporaryFetchError(redact(str(error))) from error
        except (BotoCoreError, ValueError) as error:
            raise FetchError(redact(str(error))) from error


def _explain_answer(error: ClientError) -> FetchError:
    code = error.response.get("Error", {}).get("Code", "")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code == "NoSuchBucket":
        return FetchError("not found: there is no such bucket")
    if status in (401, 403) or code in _NO_ACCESS:
        return FetchError(f"no access ({status} {code}): look at AWS_ACCESS_KEY_ID and its rights")
    if status == 404:
        return FetchError("not found: an object has gone while it was being fetched")
    if status == 412:
        return FetchError("an object has changed while it was being fetched; fetch again")
    if status == 301:
        return FetchError("the bucket is in another region; set AWS_DEFAULT_REGION")
    if status in _TEMPORARY:
        return TemporaryFetchError(f"the store answered {status} {code}")
    return FetchError(f"the store answered {status} {code}")
