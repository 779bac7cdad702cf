"""Keeps credentials out of logs and messages.

Messages of this package are made from status codes, host names and reasons, never from an address with its
query, for signed addresses are credentials. What other libraries say is passed through here, and what they
log by themselves is not shown at all.
"""

from __future__ import annotations

import logging
import os
import re

_SECRETS = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ACCESS_KEY_ID",
)
_SHORTEST_SECRET = 8  # what is shorter is a placeholder, and part of ordinary words
_USER_INFO = re.compile(r"(?<=://)[^/\s@]*@")
_QUERY = re.compile(r"\?[^\s'\")]+")
_TALKATIVE = (
    "boto3",
    "botocore",
    "hf_xet",
    "httpcore2",
    "httpx2",
    "huggingface_hub",
    "s3transfer",
    "urllib3",
)


def redact(text: str) -> str:
    """One line of `text` without user names, queries of addresses, and the values of known secrets."""
    line = _QUERY.sub("?...", _USER_INFO.sub("", " ".join(text.split())))
    for name in _SECRETS:
        value = os.environ.get(name, "").strip()
        if len(value) >= _SHORTEST_SECRET:
            line = line.replace(value, f"${name}")
    return line


def silence_libraries() -> None:
    """Their lines hold addresses with signatures."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
