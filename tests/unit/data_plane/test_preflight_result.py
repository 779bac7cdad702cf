"""The JSON of a preflight: never longer than a termination message, whatever the fault says."""

from __future__ import annotations

import json

import pytest

from draftline_server.errors import ConfigError
from draftline_server.preflight import (
    MAX_RESULT_BYTES,
    Fault,
    Findings,
    parse_accelerator_memory,
    render_result,
)


@pytest.mark.parametrize("length", [0, 100, 300, 10_000, 1_000_000])
@pytest.mark.parametrize("letter", ["x", '"', "ü", "😀", "\0"])
def test_a_long_message_is_cut_in_its_middle(letter: str, length: int) -> None:
    message = f"models.target_model.path: {letter * length}: no such file"
    text = render_result(Findings(fault=Fault("FilesInvalid", message)))
    assert len(text.encode()) <= MAX_RESULT_BYTES
    error = json.loads(text)["error"]
    assert error["reason"] == "FilesInvalid"
    assert error["message"].startswith("models.target_model.path: ")
    assert error["message"].endswith(": no such file")
    assert (error["message"] == message) is (length <= 300)


def test_nothing_known_is_said_to_be_nothing() -> None:
    assert json.loads(render_result(Findings())) == {
        "pairDigest": None,
        "target": None,
        "draft": None,
        "memory": None,
        "error": None,
    }


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (None, None),
        ("85899345920", 80 * 2**30),
        ("80GiB", 80 * 2**30),
        ("80Gi", 80 * 2**30),
        ("1.5KiB", 1536),
    ],
)
def test_memory_is_read_as_in_the_configuration(text: str | None, size: int | None) -> None:
    assert parse_accelerator_memory(text) == size


@pytest.mark.parametrize("text", ["", "much", "80GB", "-1", "0", "nan", "1e999"])
def test_wrong_memory_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--accelerator-memory: must be "):
        parse_accelerator_memory(text)
