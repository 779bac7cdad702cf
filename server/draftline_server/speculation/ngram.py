"""Drafts by prompt lookup: what followed the last time these tokens occurred in the request.

Each request has an index from n-gram to the position after its latest occurrence, kept up to date as
tokens are committed: constant work per token and per lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from draftline_server.core.request import Request
from draftline_server.speculation.proposer import Draft, DraftTask


class Match(NamedTuple):
    """An earlier occurrence of the last tokens."""

    position: int
    """Where it goes on."""
    length: int
    """Tokens that match."""


class NgramIndex:
    """Latest earlier occurrence of every n-gram of one token sequence, for n in [min, max]."""

    def __init__(self, *, min_length: int, max_length: int) -> None:
        self._lengths = range(max_length, min_length - 1, -1)
        self._num_indexed = 0
        self._latest: dict[tuple[int, ...], int] = {}
        self._searched: tuple[int, Match | None] = (0, None)

    def find(self, token_ids: Sequence[int]) -> Match | None:
        """The longest, then most recent match of the last tokens; None without a match.

        `token_ids` may only have grown since the last call.
        """
        num_tokens, match = self._searched
        if num_tokens != len(token_ids):
            match = self._search(token_ids)
            self._searched = (len(token_ids), match)
        return match

    def _search(self, token_ids: Sequence[int]) -> Match | None:
        # n-grams that end with the newest token would match themselves, so they wait.
        for end in range(self._num_indexed + 1, len(token_ids)):
            for length in self._lengths:
                if length <= end:
                    self._latest[tuple(token_ids[end - length : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)
        for length in self._lengths:
            position = self._latest.get(tuple(token_ids[-length:])) if length < len(token_ids) else None
            if position is not None:
                return Match(position, length)
        return None


class NgramProposer:
    """Proposes the continuation of the match that `NgramIndex` finds."""

    name = "ngram"
    reads_hidden_states = False

    def __init__(self, *, min_length: int, max_length: int) -> None:
        self._min_length = min_length
        self._max_length = max_length
        self._indexes: dict[str, NgramIndex] = {}

    def max_length(self, request: Request, limit: int) -> int:
        return len(self._continuation(request, limit))

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [Draft(self.name, self._continuation(task.request, task.length)) for task in tasks]

    def kind(self, request: Request) -> str:
        """By the length of the match: longer ones are right far more often."""
        match = self._find(request)
        return f"{self.name}/{match.length}" if match is not None else self.name

    def observe(self, request: Request, start: int, hidden_states: Tensor) -> None:
        """Reads tokens alone."""

    def follow(self, requests: Sequence[Request]) -> None:
        """Nothing to do: the index is brought up to date by each lookup."""

    def lags(self, request: Request) -> bool:
        return False

    def release(self, request: Request) -> None:
        self._indexes.pop(request.request_id, None)

    def _find(self, request: Request) -> Match | None:
        index = self._indexes.get(request.request_id)
        if index is None:
            index = NgramIndex(min_length=self._min_length, max_length=self._max_length)
            self._indexes[request.request_id] = index
        return index.find(request.token_ids)

    def _continuation(self, request: Request, limit: int) -> tuple[int, ...]:
        tokens, match = request.token_ids, self._find(request)
        if match is None:
            return ()
        # A match that overlaps the end repeats with a period; go on round it.
        period = len(tokens) - match.position
        return tuple(tokens[match.position + i % period] for i in range(limit))
