"""What the layers above the engine know of it: its interface and a description of the models.

Protocols, so that serving is tested with a scripted engine and no torch. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from draftline_server.core.admission import RequestLimits
from draftline_server.core.generation import GenerationDelta, GenerationRequest
from draftline_server.core.stats import EngineStatistics
from draftline_server.errors import RequestError


class ServingEngine(Protocol):
    """The engine. Only one thread ever calls it; `limits` is constant and may be read by all."""

    @property
    def limits(self) -> RequestLimits: ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, be it only to report an abort."""
        ...

    def warm_up(self) -> None:
        """One inference through every model; afterwards the first request meets no surprise."""
        ...

    def add_request(self, request: GenerationRequest) -> None:
        """Never raises for an admitted request."""
        ...

    def abort(self, request_id: str, error: RequestError) -> None:
        """Frees the request's blocks at once; the next step reports `error`. Unknown ids are ignored."""
        ...

    def step(self) -> list[GenerationDelta]: ...

    def statistics(self) -> EngineStatistics: ...


class ServingTokenizer(Protocol):
    """The target's tokenizer; `encode` and `encode_chat` may be called from any thread."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: list[tuple[str, str]]) -> list[int]:
        """`messages` are (role, content). Raises `InvalidRequestError`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """One model as clients see it; the proto explains the fields."""

    name: str
    architecture: str
    vocab_size: int
    max_context_length: int
    dtype: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDescription:
    """The models of a server."""

    target: ModelDescription
    draft: ModelDescription | None
    pair_digest: str
    eos_token_ids: Sequence[int]
    device: str
    longest_token_length: int
    """Characters of the vocabulary's longest token: no text has fewer tokens than its length over this."""


@dataclass(frozen=True, slots=True)
class ServedPair:
    """Everything that loading yields."""

    engine: ServingEngine
    tokenizer: ServingTokenizer
    description: PairDescription
