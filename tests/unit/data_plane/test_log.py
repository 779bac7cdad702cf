"""Log lines: one each, machine-readable, not to be forged."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from draftline_server.log import LogFormat, configure_logging, log_event, log_failure

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


def fail_with(text: str) -> Exception:
    """An exception with a cause, both of which quote `text`."""
    try:
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError(f"cannot read {text}") from error
    except ValueError as error:
        error.add_note(f"while it read {text}")
        return error


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_an_exception_is_logged_as_types_and_frames_and_not_in_its_words(log_format: LogFormat) -> None:
    text = log_to_text(log_format, "step failed", exc_info=fail_with("a prompt"))
    exception = json.loads(text)["exception"] if log_format == "json" else text
    assert exception.count("Traceback (most recent call last):\n") == 2
    assert exception.count("in fail_with\n") == 2
    assert exception.index("builtins.KeyError") < exception.index("builtins.ValueError")
    assert "a prompt" not in text


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_so_is_one_that_a_library_logs(log_format: LogFormat) -> None:
    stream = io.StringIO()
    configure_logging(level="info", log_format=log_format, stream=stream)
    logging.getLogger("a.library").error("it failed", exc_info=fail_with("a prompt"))
    assert "builtins.ValueError" in stream.getvalue()
    assert "a prompt" not in stream.getvalue()


def test_an_exception_that_is_its_own_cause_is_logged_once() -> None:
    first, second = ValueError(), KeyError()
    first.__context__, second.__context__ = second, first
    exception = json.loads(log_to_text("json", "step failed", exc_info=first))["exception"]
    assert exception.count("Traceback") == 2


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_failure_without_a_client_is_logged_with_all_its_words(log_format: LogFormat) -> None:
    stream = io.StringIO()
    configure_logging(level="info", log_format=log_format, stream=stream)
    error_id = log_failure(_logger, "server failed", fail_with("config.json"))
    text = stream.getvalue()
    assert error_id in text
    exception = json.loads(text)["exception"] if log_format == "json" else text
    assert "KeyError: 'config.json'" in exception
    assert "ValueError: cannot read config.json" in exception


def test_levels_below_the_configured_one_are_dropped() -> None:
    assert log_to_text("json", "request finished", level="warning") == ""
