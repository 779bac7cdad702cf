"""Engines whose forwards are charged to a fake clock, and a stream of requests on one of them.

Costs are of a machine on which a draft may pay: 10 ms for a target forward and 0.2 ms for each of its tokens,
a tenth of both for the draft model. So everything that a controller decides here is the same on every
machine, and a rate is a fact and no measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draftline_server.engine import Engine
from draftline_server.model.runner import Runner, SequenceInput
from draftline_server.speculation.step_costs import StepCosts
from support.engines import add
from support.function_models import FakeClock, NextToken, letters, make_function_engine

VOCAB_SIZE = 64
UNPREDICTABLE, PREDICTABLE, REPETITIVE = 1, 2, 3
"""First token of a prompt: what kind of text the request is."""

ADAPTIVE: dict[str, object] = {"adaptive": True, "fallback_to_standard_decoding": True}
"""Speculation as the defaults have it; engines of tests draft by fixed lengths where they are not told so."""

_DRAFT_SHARE = 0.1


def target_seconds(num_tokens: int) -> float:
    return 0.010 + 0.0002 * num_tokens


def draft_seconds(num_tokens: int) -> float:
    return _DRAFT_SHARE * target_seconds(num_tokens)


def seed_costs(costs: StepCosts) -> None:
    """As a warm-up would have measured them."""
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        costs.verify.seed(size, target_seconds(size))
        costs.draft.seed(size, draft_seconds(size))


def charge_forwards(engine: Engine, clock: FakeClock) -> None:
    """Lets the models of an engine, whose clock this is, take the time that they take in a `Workload`."""
    seed_costs(engine.costs)
    parts = engine._parts
    _charge(parts.target, target_seconds, clock)
    if parts.draft is not None:
        _charge(parts.draft, draft_seconds, clock)


def _charge(runner: Runner, seconds: Callable[[int], float], clock: FakeClock) -> None:
    forward = runner.forward

    def charged(inputs: Sequence[SequenceInput]) -> Tensor:
        clock.advance(seconds(sum(len(item.token_ids) for item in inputs)))
        return forward(inputs)

    # Of this runner alone: the engine goes on with the real model.
    runner.forward = charged  # type: ignore[method-assign]


def _scramble(value: int) -> int:
    for multiplier in (0x9E3779B1, 0x85EBCA6B):
        value = (value ^ value >> 15) * multiplier & 0xFFFFFFFF
    return value ^ value >> 13


def target(prefix: tuple[int, ...]) -> int:
    """No n-gram comes back in a useful way, except in repetitive text, which has a period of 12."""
    if prefix[0] == REPETITIVE:
        return 10 + len(prefix) % 12
    return 4 + _scramble(sum(prefix[-3:]) * 131 + len(prefix)) % (VOCAB_SIZE - 4)


def draft(prefix: tuple[int, ...]) -> int:
    """Right about predictable text only."""
    token_id = target(prefix)
    return token_id if prefix[0] == PREDICTABLE else 4 + (token_id - 3) % (VOCAB_SIZE - 4)


@dataclass(slots=True)
class Workload:
    """Keeps a number of requests going. New ones are of the kind of the moment."""

    streams: int
    methods: tuple[str, ...] = ("draft_model",)
    request_length: int = 200
    speculation: dict[str, object] = field(default_factory=dict)
    draft: NextToken = draft
    clock: FakeClock = field(default_factory=FakeClock)
    num_tokens: int = 0
    num_draft_forwards: int = 0
    engine: Engine = field(init=False)
    _live: int = 0
    _num_added: int = 0

    def __post_init__(self) -> None:
        costs = StepCosts()
        seed_costs(costs)
        self.engine = make_function_engine(
            target,
            self.draft if "draft_model" in self.methods else None,
            decode=letters,
            vocab_size=VOCAB_SIZE,
            clock=self.clock,
            charge_target=lambda size: self.clock.advance(target_seconds(size)),
            charge_draft=self._charge_draft,
            costs=costs,
            speculation={"methods": self.methods, "num_speculative_tokens": 5} | ADAPTIVE | self.speculation,
        )

    def _charge_draft(self, size: int) -> None:
        self.num_draft_forwards += 1
        self.clock.advance(draft_seconds(size))

    @property
    def is_on(self) -> bool:
        return self.engine.statistics().speculation_active

    def step(self, kind: int, count: int = 1) -> None:
        for _ in range(count):
            while self._live < self.streams:
                prompt = [kind, 5 + self._num_added % 50]
                add(
                    self.engine, str(self._num_added), prompt, max_tokens=self.request_length, ignore_eos=True
                )
                self._num_added += 1
                self._live += 1
            for delta in self.engine.step():
                self.num_tokens += len(delta.token_ids)
                self._live -= delta.is_final

    def steps_until(self, kind: int, *, is_on: bool, at_most: int) -> int:
        """Steps until speculation is on or off; fails where that takes more than `at_most`."""
        for count in range(at_most + 1):
            if self.is_on == is_on:
                return count
            self.step(kind)
        raise AssertionError(f"speculation is {'off' if is_on else 'on'} after {at_most} steps")

    def rate(self, kind: int, steps: int) -> float:
        """Tokens per second over some steps."""
        started, num_before = self.clock.now, self.num_tokens
        self.step(kind, steps)
        return (self.num_tokens - num_before) / (self.clock.now - started)
