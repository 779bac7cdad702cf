"""What the demo's draft head gains for one stream: chat prompts that it has not learned from, one by one.

A prompt's times with and without the head (medians of its rounds) are one observation. The gain is that of
all prompts together, its interval what it is when they are drawn anew (percentile bootstrap): as far as
another set of so many prompts may be from this one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftline_server.config import Method, parse_config
from draftline_server.engine_factory import load_draft
from draftline_server.model.startup import inspect_pair
from engine_arms import NUM_LOOKUP_TOKENS, EngineArm, LoadedPair, load_target, make_engine
from measure import Cell, Table, measure
from models import Pair
from workload import Workload

OFF, ADAPTIVE = "off", "adaptive, chained after n-gram"
LENGTHS = (1, 2, 3, 4, 5, 6)
MAX_ROUNDS = 3
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Gain:
    """Of one way to draft, over all prompts."""

    name: str
    tokens_per_second: float
    speedup: float
    """Time of all prompts without drafts over that with them."""
    low: float
    high: float
    """95 % interval of the speed-up."""
    mean_acceptance_length: float | None


def measure_head(pair: Pair, dtype: torch.dtype, workloads: Sequence[Workload], *, rounds: int) -> list[Gain]:
    """Off, the head at each draft length, and adaptive."""
    loaded = _load(pair, dtype)
    head: tuple[Method, ...] = ("draft_model",)
    arms = [EngineArm(OFF, make_engine(loaded, (), max_streams=1))]
    for length in LENGTHS:
        engine = make_engine(loaded, head, num_speculative_tokens=length, max_streams=1)
        arms.append(EngineArm(f"head, {length} tokens", engine))
    chained = make_engine(
        loaded, ("ngram", *head), adaptive=True, num_speculative_tokens=NUM_LOOKUP_TOKENS, max_streams=1
    )
    arms.append(EngineArm(ADAPTIVE, chained))
    table = measure(arms, workloads, rounds=min(rounds, MAX_ROUNDS))
    return [_gain(arm.name, workloads, table) for arm in arms]


def _load(pair: Pair, dtype: torch.dtype) -> LoadedPair:
    config = parse_config(
        {
            "device": "cpu",
            "models": {
                "target_model": {"path": str(pair.target), "dtype": str(dtype).removeprefix("torch.")},
                "draft_model": {"path": str(pair.draft)},
            },
        }
    )
    inspected = inspect_pair(config, torch.device("cpu"))
    return load_target(pair.target, dtype=dtype, load_draft=lambda target: load_draft(inspected, target))


def _gain(name: str, workloads: Sequence[Workload], table: Table) -> Gain:
    seconds = [(_seconds(table[OFF, w.name]), _seconds(table[name, w.name])) for w in workloads]
    runs = [run for w in workloads for run in table[name, w.name].runs]
    drafts = sum(run.drafts for run in runs)
    low, high = _interval(seconds)
    return Gain(
        name,
        sum(w.num_tokens for w in workloads) / sum(on for _, on in seconds),
        _ratio(seconds),
        low,
        high,
        1.0 + sum(run.accepted_tokens for run in runs) / drafts if drafts else None,
    )


def _seconds(cell: Cell) -> float:
    return cell.runs[0].num_tokens / cell.tokens_per_second


def _ratio(seconds: Sequence[tuple[float, float]]) -> float:
    return sum(off for off, _ in seconds) / sum(on for _, on in seconds)


def _interval(seconds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    draw: Callable[..., list[tuple[float, float]]] = random.Random(0).choices
    ratios = sorted(_ratio(draw(seconds, k=len(seconds))) for _ in range(_RESAMPLES))
    outside = _RESAMPLES // 40  # on either side
    return ratios[outside - 1], ratios[-outside]
