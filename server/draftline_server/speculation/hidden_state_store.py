"""Hidden states of the target that a draft head has not read yet.

A head cannot compute them itself, so what is not kept here is lost to it. Kept are those since the head's
last forward, of a request that it may draft for, and while it drafts nothing (switched off, batch too large)
the newest `MAX_KEPT_TOKENS`: it then goes on with a context that begins there. One more is kept for the last
token of each block, beside the block: what the head needs to go on behind a cached prefix.

Slot ``i`` of the head's cache is computed from token ``x[i]`` and the hidden states of token ``i - 1``, so a
block depends on nothing behind it and may be shared. There is no slot 0. (Where a head has more than one
layer, the others' slots also depend on where its context began, which a block does not tell; that costs a
guess now and then.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftline_server.core.request import Request
from draftline_server.model.hidden_states import MAX_KEPT_TOKENS


@dataclass(slots=True)
class _Kept:
    """Hidden states of the tokens ``[start, start + number of rows)``."""

    start: int
    rows: Tensor

    @property
    def stop(self) -> int:
        return self.start + self.rows.shape[0]


class HiddenStateStore:
    """Keeps rows ``[tokens, size]`` by request, and the draft lengths of requests in step with them."""

    def __init__(
        self, *, num_blocks: int, block_size: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._kept: dict[str, _Kept] = {}
        self._block_ends = torch.zeros(num_blocks, size, dtype=dtype, device=device)

    def add(self, request: Request, start: int, rows: Tensor) -> None:
        """Takes in what the target computed for the committed tokens from `start` on, up to `target_len`."""
        self._keep_block_ends(request, start, rows)
        kept = self._kept.get(request.request_id)
        is_next = kept is not None and kept.stop == start and kept.start + 1 == request.draft_len
        if kept is None or not is_next:  # the first ones, or computed again after a preemption
            self._kept[request.request_id] = self._begin(request, start, rows)
            return
        surplus = kept.rows.shape[0] - MAX_KEPT_TOKENS
        if surplus > 0:
            kept = _Kept(kept.start + surplus, kept.rows[surplus:])
            request.draft_start = request.draft_len = kept.start + 1
        self._kept[request.request_id] = _Kept(kept.start, torch.cat([kept.rows, rows]))

    def has(self, request: Request) -> bool:
        """Whether the head could go on up to the newest token."""
        kept = self._kept.get(request.request_id)
        return kept is not None and kept.stop == request.target_len

    def has_many(self, request: Request) -> bool:
        """Whether the head should read some before they are too many to keep."""
        kept = self._kept.get(request.request_id)
        return kept is not None and kept.rows.shape[0] > MAX_KEPT_TOKENS // 2

    def take(self, request: Request, stop: int) -> Tensor:
        """Removes and returns the rows that slots ``[draft_len, stop)`` are computed from."""
        kept = self._kept[request.request_id]
        count = stop - request.draft_len
        self._kept[request.request_id] = _Kept(kept.start + count, kept.rows[count:])
        return kept.rows[:count]

    def forget(self, request: Request) -> None:
        self._kept.pop(request.request_id, None)

    def _begin(self, request: Request, start: int, rows: Tensor) -> _Kept:
        if start == 0:
            request.draft_len = 1
            return _Kept(0, rows.clone())
        if request.draft_start < request.draft_len == start:
            # Behind a prefix whose last block the head has written.
            before = self._block_ends[request.block_table[start // self._block_size - 1]]
            return _Kept(start - 1, torch.cat([before[None], rows]))
        request.draft_start = request.draft_len = start + 1
        return _Kept(start, rows.clone())

    def _keep_block_ends(self, request: Request, start: int, rows: Tensor) -> None:
        stop = start + rows.shape[0]
        ends = range(start + (-start - 1) % self._block_size, stop, self._block_size)
        if ends:
            blocks = [request.block_table[end // self._block_size] for end in ends]
            index = torch.tensor(blocks, device=rows.device)
            self._block_ends[index] = rows[ends.start - start :: self._block_size].to(self._block_ends.dtype)
