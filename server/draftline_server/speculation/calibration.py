"""Measures what forwards cost on this machine, before the first request: the controller's first guess."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from draftline_server.core.clock import Clock
from draftline_server.model.runner import Runner, SequenceInput
from draftline_server.speculation.step_costs import CostCurve, StepCosts

# Cached tokens of the dummy sequences: a short conversation.
CONTEXT_LENGTH = 128
# Rounds over all sizes, so that what disturbs the machine for a moment does not hit one size every time.
NUM_ROUNDS = 3
MAX_SIZE = 256
# A slow or busy machine gets fewer points; real steps fill in the rest.
MAX_SECONDS_PER_CURVE = 5.0


def measure_costs(
    costs: StepCosts, *, target: Runner, draft: Runner | None, clock: Clock, max_tokens: int
) -> None:
    """Fills both cost curves. Overwrites the first blocks of the cache, which must be unused."""
    sizes = list(_sizes(min(max_tokens, MAX_SIZE)))
    _measure(costs.verify, target, sizes, clock)
    if draft is not None:
        _measure(costs.draft, draft, sizes, clock)


def _sizes(largest: int) -> Iterable[int]:
    """Powers of two, and the largest."""
    size = 1
    while size < largest:
        yield size
        size *= 2
    yield largest


def _measure(curve: CostCurve, runner: Runner, sizes: Sequence[int], clock: Clock) -> None:
    """Times forwards of `size` one-token sequences; the fastest of a few is taken."""
    num_cached = min(CONTEXT_LENGTH, runner.cache.num_slots - 1)
    blocks = range(num_cached // runner.cache.block_size + 1)
    sequence = SequenceInput(token_ids=(0,), start=num_cached, block_table=blocks, num_logits=1)
    fastest: dict[int, float] = {}
    deadline = clock() + MAX_SECONDS_PER_CURVE
    for size in (size for _ in range(NUM_ROUNDS) for size in sizes):
        started = clock()
        runner.forward([sequence] * size)
        runner.synchronize()
        now = clock()
        fastest[size] = min(fastest.get(size, math.inf), now - started)
        if now > deadline:
            break
    for size, seconds in fastest.items():
        curve.seed(size, seconds)
    curve.smooth()
