"""What every source of drafts offers to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from draftline_server.core.request import Request


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuation of one request's committed tokens."""

    proposer: str
    token_ids: tuple[int, ...]
    probs: Tensor | None = None
    """The distributions q that the tokens were drawn from, ``[tokens, vocab]``. None where the tokens
    are to be matched with the target's own choice: one-hot drafts and those drawn with its noise."""


@dataclass(frozen=True, slots=True)
class DraftTask:
    """A request and how many tokens to draft for it."""

    request: Request
    length: int


class Proposer(Protocol):
    """A source of drafts.

    `max_length` and `kind` go by committed tokens alone, never by what would be drafted: a length that
    depends on the drawn tokens would change the output's distribution.
    """

    @property
    def name(self) -> str: ...

    @property
    def reads_hidden_states(self) -> bool:
        """Whether it drafts from what the target computes, and so must `observe` it."""

    def observe(self, request: Request, start: int, hidden_states: Tensor) -> None:
        """Shows it the target's hidden states ``[tokens, size]`` of the committed tokens from `start` on."""

    def max_length(self, request: Request, limit: int) -> int:
        """How many tokens it could propose now, at most `limit`; 0 where it has nothing to offer."""

    def kind(self, request: Request) -> str:
        """What sort of draft it has to offer now: acceptance is learned for each sort by itself."""

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """One draft for each task, in order, each of at most the task's length and possibly empty."""

    def follow(self, requests: Sequence[Request]) -> None:
        """Called after prefill: reads committed tokens ahead of the first proposal."""

    def lags(self, request: Request) -> bool:
        """Whether it must `follow` before it can offer anything for a request that decodes."""

    def release(self, request: Request) -> None:
        """Forgets a request that has ended."""
