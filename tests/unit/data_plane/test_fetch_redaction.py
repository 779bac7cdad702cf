"""Messages of other libraries, before they are shown."""

from __future__ import annotations

import pytest

from draftline_server.fetch.redaction import redact


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://user:word@host/path failed", "at https://host/path failed"),
        ("GET 'https://cdn/f?Signature=abc&Expires=1' failed", "GET 'https://cdn/f?...' failed"),
        ("two\nlines", "two lines"),
        ("is it right? yes", "is it right? yes"),
        ("Bearer hf_0123456789abcdef", "Bearer $HF_TOKEN"),
    ],
)
def test_credentials_are_left_out(monkeypatch: pytest.MonkeyPatch, text: str, shown: str) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    assert redact(text) == shown


def test_a_placeholder_does_not_eat_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    assert redact("the latest test") == "the latest test"
