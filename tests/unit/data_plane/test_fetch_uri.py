"""Where a model is: what is understood, and that what is not is named in one line without secrets."""

from __future__ import annotations

import pytest

from draftline_server.errors import FetchError
from draftline_server.fetch.uri import ModelUri, parse_uri


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://org/name", ModelUri("hf", "org/name")),
        ("hf://org/name/", ModelUri("hf", "org/name")),
        ("hf://gpt2", ModelUri("hf", "gpt2")),
        ("s3://bucket/a/b", ModelUri("s3", "bucket", "a/b")),
        ("s3://bucket/a/b/", ModelUri("s3", "bucket", "a/b")),
        ("s3://bucket", ModelUri("s3", "bucket")),
        ("file:///models/a%20b", ModelUri("file", "/models/a b")),
        ("file://localhost/models/a", ModelUri("file", "/models/a")),
        ("/models/a", ModelUri("file", "/models/a")),
        ("models/a@b", ModelUri("file", "models/a@b")),
    ],
)
def test_uri_is_understood(text: str, expected: ModelUri) -> None:
    assert parse_uri(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf://a/b/c", "must be hf://ORG/NAME"),
        ("hf://", "must be hf://ORG/NAME"),
        ("hf://../name", "must be hf://ORG/NAME"),
        ("s3://", "must be s3://BUCKET/PREFIX"),
        ("file://host/models", "names the host host"),
        ("pvc://claim/a", "is mounted, not fetched"),
        ("http://host/model", "http:// is not known"),
        ("", "must be hf://ORG/NAME"),
        ("hf://user:secret@org/name", "HF_TOKEN"),
        ("hf://org/name@main", "--revision"),
        ("s3://key:secret@bucket/a", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_wrong_uri_is_one_line_without_secrets(text: str, message: str) -> None:
    with pytest.raises(FetchError, match=message) as caught:
        parse_uri(text)
    assert str(caught.value).startswith("URI: ")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
