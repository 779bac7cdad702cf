"""Structured logs: a constant message and key/value fields, one line each, as JSON or as text.

Must not hold prompts or outputs. An exception's message may quote either, so of exceptions only types and
frames are written, whoever logs them; `log_failure` alone writes messages, too.

Nothing that a client sends can forge a line: every value is quoted and its control characters are escaped.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import secrets
import sys
import traceback
from collections.abc import Mapping
from typing import Literal, TextIO

_FIELDS = "draftline_fields"
_WITH_MESSAGES = "draftline_with_messages"
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
    """Logs `message`, a constant in the past tense, with `fields`; fields that are None are left out.

    Of `exc_info` the types and frames are written, and those of its causes, but no message.
    """
    if logger.isEnabledFor(level):
        present = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, "%s", message, exc_info=exc_info, extra={_FIELDS: present})


def log_failure(logger: logging.Logger, message: str, error: BaseException) -> str:
    """Logs a fault of ours with its whole traceback; returns the id under which the log has it.

    Only for what no client has a part in, such as loading models: messages are written, too.
    """
    error_id = secrets.token_hex(8)
    fields = {"error_id": error_id, "error": type(error).__name__}
    logger.critical("%s", message, exc_info=error, extra={_FIELDS: fields, _WITH_MESSAGES: True})
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
        if (exception := _exception(record)) is not None:
            entry["exception"] = exception
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
        if (exception := _exception(record)) is not None:
            line = f"{line}\n{exception}"
        return line


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, _FIELDS, {})
    return fields


def _exception(record: logging.LogRecord) -> str | None:
    """The traceback of the exception that a record is about, causes first."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return None
    if getattr(record, _WITH_MESSAGES, False):
        return "".join(traceback.format_exception(error)).rstrip()
    return "\n\nwhich led to:\n\n".join(_types_and_frames(link) for link in reversed(_with_causes(error)))


def _with_causes(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ if link.__suppress_context__ else link.__context__
    return links


def _types_and_frames(error: BaseException) -> str:
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"Traceback (most recent call last):\n{frames}{type(error).__module__}.{type(error).__qualname__}"


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
