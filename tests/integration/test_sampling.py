"""Sampled output has the target's distribution, through the whole engine: tokens, pairs and triples.

A model with 16 tokens, and all its continuations enumerated with transformers. Prefill gives token 1; the
first draft proposes tokens 2 and 3, and token 4 is its bonus. So pairs and triples see what drafts do to
the tokens after them, which the distributions of single tokens would not show.

Unseeded requests verify by rejection, seeded ones and n-gram drafts by matching. The engine's random seeds
come from a fixed source here, so every test passes or fails for good.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pytest

from draftline_server.core.clock import Clock
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams
from draftline_server.engine import Engine
from draftline_server.speculation.step_costs import StepCosts
from support.engines import add, drain, make_engine
from support.function_models import FakeClock
from support.guarantees import assert_idle
from support.reference import Reference
from support.statistics import assert_distributed, counts_at, joint_distribution, marginal
from support.workloads import ADAPTIVE
from support.zoo import ModelZoo

pytestmark = pytest.mark.usefixtures("fixed_randomness")

PROMPT = (4, 9, 6, 4, 9)
NUM_TOKENS = 4
WAVE = 64

Source = Literal["near", "far", "ngram", "chain", "head"]
Filters = dict[str, dict[str, Any]]

FILTERS: Filters = {
    "none": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.5},
    "min-p": {"min_p": 0.2},
    "all": {"temperature": 1.7, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
}


def engine_of(
    zoo: ModelZoo, source: Source, *, clock: Clock = time.monotonic, **speculation: object
) -> Engine:
    methods = {"ngram": ("ngram",), "chain": ("ngram", "draft_model")}.get(source, ("draft_model",))
    return make_engine(
        zoo.letters(),
        zoo.letters(source if source in ("far", "head") else "near"),
        num_blocks=WAVE,
        max_running=WAVE,
        max_context_length=16,
        speculation={"methods": methods, "num_speculative_tokens": 3, "ngram_min": 1, **speculation},
        clock=clock,
    )


def expected_joint(zoo: ModelZoo, options: dict[str, Any]) -> dict[tuple[int, ...], float]:
    reference = Reference(zoo.letters())
    return joint_distribution(
        lambda sequences: reference.batch_logits(sequences).tolist(),
        PROMPT,
        SamplingParams(**options),
        NUM_TOKENS,
    )


def draw(
    engine: Engine, count: int, *, seeded: bool, speculation: SpeculationParams | None = None, **options: Any
) -> Counter[tuple[int, ...]]:
    """Outputs of `count` requests."""
    outputs: Counter[tuple[int, ...]] = Counter()
    for start in range(0, count, WAVE):
        for index in range(start, start + WAVE):
            add(
                engine,
                str(index),
                PROMPT,
                seed=index if seeded else None,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                speculation=speculation,
                **({"temperature": 1.0} | options),
            )
        outputs.update(tuple(c.token_ids) for c in drain(engine).values())
    assert_idle(engine)
    return outputs


def assert_all_distributed(
    observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]
) -> None:
    """Each token, the drafted pair, the triple with the bonus, and everything together."""
    parts = [slice(i, i + 1) for i in range(NUM_TOKENS)] + [slice(1, 3), slice(1, 4), slice(0, 4)]
    for part in parts:
        assert_distributed(counts_at(observed, part), marginal(expected, part))
    assert len(observed) > 1, "always the same tokens"


def check(zoo: ModelZoo, source: Source, filters: str, *, seeded: bool, count: int) -> None:
    engine = engine_of(zoo, source)
    options = FILTERS[filters]
    observed = draw(engine, count, seeded=seeded, **options)
    assert_all_distributed(observed, expected_joint(zoo, options))
    assert_some_stood(engine, source)


def assert_some_stood(engine: Engine, source: Source) -> None:
    statistics = engine.statistics()
    accepted = sum(statistics.accepted_tokens.values())
    assert accepted < sum(statistics.draft_tokens.values())
    assert accepted > 0 or source == "far", "no token came from inside an accepted run"


@pytest.mark.parametrize(
    ("source", "filters", "seeded"),
    [
        ("near", "none", False),
        ("near", "none", True),
        ("far", "hot", False),
        ("far", "cold", True),
        ("near", "top-k", False),
        ("near", "top-p", False),
        ("near", "min-p", False),
        ("far", "top-p", False),
        ("ngram", "all", False),
        ("head", "none", False),
        ("head", "top-p", False),
        ("head", "hot", True),
    ],
)
def test_tokens_pairs_and_triples_are_distributed_as_the_targets(
    zoo: ModelZoo, source: Source, filters: str, seeded: bool
) -> None:
    check(zoo, source, filters, seeded=seeded, count=80 * WAVE)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("source", "filters", "seeded"),
    [
        *(("near", filters, False) for filters in FILTERS),
        *(("near", filters, True) for filters in FILTERS),
        *(("far", filters, False) for filters in FILTERS),
        *(("ngram", filters, False) for filters in FILTERS),
        *(("chain", filters, False) for filters in ("none", "top-k", "all")),
        *(("chain", filters, True) for filters in ("none", "all")),
    ],
)
def test_tokens_pairs_and_triples_of_many_draws_are_distributed_as_the_targets(
    zoo: ModelZoo, source: Source, filters: str, seeded: bool
) -> None:
    check(zoo, source, filters, seeded=seeded, count=250 * WAVE)


def test_without_speculation_they_are_too(zoo: ModelZoo) -> None:
    observed = draw(
        engine_of(zoo, "near"), 60 * WAVE, seeded=False, speculation=SpeculationParams(enabled=False)
    )
    assert_all_distributed(observed, expected_joint(zoo, {}))


@pytest.mark.parametrize("source", ["near", "chain"])
def test_they_are_too_where_the_controller_keeps_changing_the_lengths(zoo: ModelZoo, source: Source) -> None:
    # Time stands still, so that no draft is measured to be slow: costs are only what each wave is told.
    engine = engine_of(zoo, source, clock=FakeClock(), **ADAPTIVE)
    machines: list[Callable[[int], float]] = [
        lambda _: 0.01,  # any draft is free
        lambda size: 0.01 + 0.0001 * size,
        lambda size: 0.01 * size,  # none can pay
    ]
    observed: Counter[tuple[int, ...]] = Counter()
    lengths: list[float] = []
    before = engine.statistics()
    for wave in range(81):
        engine._parts.controller.costs = costs_of(machines[wave % len(machines)])
        observed += draw(engine, WAVE, seeded=False)
        now = engine.statistics()
        num_drafts, num_tokens = (
            sum(after.values()) - sum(earlier.values())
            for earlier, after in ((before.drafts, now.drafts), (before.draft_tokens, now.draft_tokens))
        )
        lengths.append(num_tokens / max(num_drafts, 1))
        before = now
    assert_all_distributed(observed, expected_joint(zoo, {}))
    assert_some_stood(engine, source)
    # At most two tokens, and one for a request that has two to go.
    assert min(lengths) < 1.1 < 1.4 < max(lengths)


def costs_of(verify_seconds: Callable[[int], float]) -> StepCosts:
    """Of a machine on which the draft model takes no time."""
    costs = StepCosts()
    for size in (1, WAVE, 4 * WAVE):
        costs.verify.seed(size, verify_seconds(size))
        costs.draft.seed(size, 0.0)
    return costs
