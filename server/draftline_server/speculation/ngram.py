"""Drafts by prompt lookup: what followed the last time these tokens occurred in the request.

Each request has an index from n-gram to the position after its latest occurrence, kept up to date as
tokens are committed: constant work per token and per lookup.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftline_server.core.request import Request
from draftline_server.speculation.proposer import Draft, DraftTask


class NgramIndex:
    """Latest earlier occurrence of every n-gram of one token sequence, for n in [min, max]."""

    def __init__(self, *, min_length: int, max_length: int) -> None:
        self._lengths = range(max_length, min_length - 1, -1)
        self._num_indexed = 0
        self._latest: dict[tuple[int, ...], int] = {}

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Where the longest, then most recent match of the last tokens goes on; None without a match.

        `token_ids` may only have grown since the last call.
        """
        # n-grams that end with the newest token would match themselves, so they wait.
        for end in range(self._num_indexed + 1, len(token_ids)):
            for length in self._lengths:
                if length <= end:
                    self._latest[tuple(token_ids[end - length : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids) - 1)
        for length in self._lengths:
            position = self._latest.get(tuple(token_ids[-length:])) if length < len(token_ids) else None
            if position is not None:
                return position
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

    def observe(self, request: Request, start: int, hidden_states: Tensor) -> None:
        """Reads tokens alone."""

    def follow(self, requests: Sequence[Request]) -> None:
        """Nothing to do: the index is brought up to date by each lookup."""

    def lags(self, request: Request) -> bool:
        return False

    def release(self, request: Request) -> None:
        self._indexes.pop(request.request_id, None)

    def _continuation(self, request: Request, limit: int) -> tuple[int, ...]:
        index = self._indexes.get(request.request_id)
        if index is None:
            index = NgramIndex(min_length=self._min_length, max_length=self._max_length)
            self._indexes[request.request_id] = index
        tokens = request.token_ids
        start = index.find(tokens)
        if start is None:
            return ()
        # A match that overlaps the end repeats with a period; go on round it.
        period = len(tokens) - start
        return tuple(tokens[start + i % period] for i in range(limit))
