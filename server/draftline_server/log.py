"""Structured logs: a constant message and key/value fields, one line each, as JSON or as text.

Must not hold prompts or outputs. Nothing that a client sends can forge a line: every value is
quoted and its control characters are escaped.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import secrets
import sys
from collections.abc import Mapping
from typing import Literal, TextIO

_FIELDS = "draftline_fields"
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:/[]+@")

LogFormat = Literal["json", "text"]


def log_event(
    logger: logging.Logger,
    level: int,
    message: str,
    *,
    exc_info: BaseException | None = None,
    **fields: object,
) -> None:
    """Logs `message`, a constant in the past tense, with `fields`; fields that are None are left out."""
    if logger.isEnabledFor(level):
        present = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, "%s", message, exc_info=exc_info, extra={_FIELDS: present})


def log_failure(logger: logging.Logger, message: str, error: BaseException) -> str:
    """Logs a fault of ours with its traceback; returns the id under which the log has it."""
    error_id = secrets.token_hex(8)
    log_event(
        logger, logging.CRITICAL, message, error_id=error_id, error=type(error).__name__, exc_info=error
    )
    return error_id


def configure_logging(*, level: str, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Sends the log of the whole process to `stream` (stderr by default); replaces what was there."""
    output = logging.StreamHandler(stream if stream is not None else sys.stderr)
    output.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[output], force=True)
    logging.captureWarnings(True)
    logging.getLogger("grpc").setLevel(logging.WARNING)  # its debug lines come with every call


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: _json_value(value) for key, value in _fields(record).items()},
        }
        if record.exc_info and record.exc_info[1] is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, allow_nan=False)


class TextFormatter(logging.Formatter):
    """``time level logger: message key=value ...``; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if not message.isprintable():
            message = json.dumps(message)
        head = f"{_timestamp(record)} {record.levelname.lower()} {record.name}: {message}"
        pairs = [f"{key}={_text_value(value)}" for key, value in _fields(record).items()]
        line = " ".join([head, *pairs])
        if record.exc_info and record.exc_info[1] is not None:
            line = f"{line}\n{self.formatException(record.exc_info)}"
        return line


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, _FIELDS, {})
    return fields


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json_value(value: object) -> object:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return value


def _text_value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and _PLAIN.issuperset(text) else json.dumps(text)
