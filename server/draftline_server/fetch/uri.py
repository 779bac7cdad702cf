"""Where a model is: `hf://ORG/NAME`, `s3://BUCKET/PREFIX`, `file:///PATH` or a plain path."""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass
from typing import Literal

from draftline_server.errors import FetchError

Scheme = Literal["hf", "s3", "file"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class ModelUri:
    """A checked URI; `location` is a repository's name, a bucket or a path."""

    scheme: Scheme
    location: str
    prefix: str = ""
    """Of s3://: the folder in the bucket, without slashes around it."""

    def __str__(self) -> str:
        folder = f"/{self.prefix}" if self.prefix else ""
        return f"{self.scheme}://{self.location}{folder}"


def parse_uri(text: str) -> ModelUri:
    """Raises `FetchError`; a URI that seems to hold credentials is not repeated in it."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _file(text, text)
    if "@" in rest.partition("/")[0] or (scheme == "hf" and "@" in rest):
        raise FetchError(
            f"URI: {scheme}://... with an @; credentials belong into the environment (HF_TOKEN, "
            "AWS_ACCESS_KEY_ID), a revision into --revision"
        )
    match scheme:
        case "hf":
            return _hub(text, rest.rstrip("/"))
        case "s3":
            return _bucket(text, rest)
        case "file":
            host, slash, path = rest.partition("/")
            if host not in ("", "localhost"):
                raise FetchError(
                    f"URI: {text}: names the host {host}; a file has three slashes: file:///PATH"
                )
            return _file(text, urllib.parse.unquote(slash + path))
        case "pvc":
            raise FetchError(f"URI: {text}: a volume claim is mounted, not fetched; give the mounted path")
        case _:
            raise FetchError(f"URI: {scheme}:// is not known; it must be hf://, s3://, file:// or a path")


def _hub(text: str, name: str) -> ModelUri:
    if not _HUB_NAME.fullmatch(name):
        raise FetchError(f"URI: {text}: must be hf://ORG/NAME")
    return ModelUri("hf", name)


def _bucket(text: str, rest: str) -> ModelUri:
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise FetchError(f"URI: {text}: must be s3://BUCKET/PREFIX")
    return ModelUri("s3", bucket, prefix.strip("/"))


def _file(text: str, path: str) -> ModelUri:
    if not path.strip() or "\0" in path:
        raise FetchError(f"URI: {text!r}: must be hf://ORG/NAME, s3://BUCKET/PREFIX, file:///PATH or a path")
    return ModelUri("file", path)
