"""What a preflight Job found out: the JSON of its termination message, at most 4 096 bytes.

Written by `draftline-server preflight`; unknown fields are ignored, so that a newer image may say more.
"""

from __future__ import annotations

import json
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel, validate_by_name=True)


class PreflightModel(_Part):
    """One model of the pair."""

    architecture: str
    digest: str
    revision: str | None = None
    """What an hf:// revision was resolved to."""
    weights_bytes: int
    kv_bytes_per_token: int
    max_context_length: int


class MemoryPlan(_Part):
    """Bytes of one pod, on one accelerator or in the container."""

    weights_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    kv_pool_bytes: int
    required_bytes: int
    """The least that serves one request of the longest context."""
    available_bytes: int | None = None
    """None where nobody knows; then nothing is judged."""
    fits: bool | None = None


class PreflightFault(_Part):
    """Why the pair cannot be served."""

    reason: str
    """CamelCase, for conditions: FetchFailed, FilesInvalid, PairMismatch, ConfigInvalid, MemoryDoesNotFit."""
    message: str


class PreflightResult(_Part):
    """`error` is None where the pair may be rolled out."""

    pair_digest: str | None = None
    target: PreflightModel | None = None
    draft: PreflightModel | None = None
    memory: MemoryPlan | None = None
    error: PreflightFault | None = None


def parse_result(message: str) -> PreflightResult:
    """The result in a termination message; raises ValueError for anything else."""
    try:
        document: Any = json.loads(message)
        result = PreflightResult.model_validate(document)
    except (json.JSONDecodeError, pydantic.ValidationError) as error:
        raise ValueError(f"not the result of a preflight: {error}") from error
    if result.pair_digest is None and result.error is None:
        raise ValueError("not the result of a preflight: it has neither a pair digest nor an error")
    return result
