"""Log lines: one each, machine-readable, not to be forged."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from draftline_server.log import LogFormat, configure_logging, log_event

pytestmark = pytest.mark.usefixtures("root_logger_as_it_was")

_logger = logging.getLogger("draftline_server.test")


def log_to_text(log_format: LogFormat, message: str, *, level: str = "info", **fields: Any) -> str:
    stream = io.StringIO()
    configure_logging(level=level, log_format=log_format, stream=stream)
    log_event(_logger, logging.INFO, message, **fields)
    return stream.getvalue()


def test_json_line_has_the_fields() -> None:
    line = log_to_text("json", "request finished", request_id="a", output_tokens=3, reason=None)
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "info",
        "logger": "draftline_server.test",
        "message": "request finished",
        "request_id": "a",
        "output_tokens": 3,
    }


def test_text_line_has_the_fields() -> None:
    line = log_to_text("text", "request finished", request_id="a", duration_seconds=0.25)
    assert line.endswith(" info draftline_server.test: request finished request_id=a duration_seconds=0.25\n")


@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.parametrize("value", ["two\nlines", "\x1b[2J", "a b", 'say "x"', "\u2028", ""])
def test_value_cannot_forge_a_line(log_format: LogFormat, value: str) -> None:
    line = log_to_text(log_format, "request finished", request_id=value)
    assert len(line.splitlines()) == 1
    assert json.dumps(value) in line
    assert line.rstrip("\n").isprintable()


def test_numbers_that_are_none_stay_valid_json() -> None:
    entry = json.loads(log_to_text("json", "measured", speedup=float("nan"), ratio=float("inf")))
    assert (entry["speedup"], entry["ratio"]) == ("nan", "inf")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_traceback_is_kept(log_format: LogFormat) -> None:
    text = log_to_text(log_format, "step failed", exc_info=ValueError("boom"))
    assert "ValueError: boom" in text
    if log_format == "json":
        assert "ValueError: boom" in json.loads(text)["exception"]


def test_levels_below_the_configured_one_are_dropped() -> None:
    assert log_to_text("json", "request finished", level="warning") == ""
