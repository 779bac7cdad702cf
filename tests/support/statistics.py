"""Exact distributions, and whether what was drawn could come from them.

All tests draw from fixed seeds, so they pass or fail for good; `LEVEL` was set before the first run. A cell
that should be hit fewer than five times is joined with others; an impossible outcome fails at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from draftline_server.core.sampling_params import SamplingParams

LEVEL = 1e-3
MIN_EXPECTED = 5.0
_BATCH = 4096

Outcome = TypeVar("Outcome", bound=Hashable)
Probabilities = NDArray[np.float64]


def assert_distributed(observed: Counter[Outcome], expected: Mapping[Outcome, float]) -> None:
    """Pearson's chi-square test at `LEVEL`."""
    impossible = {outcome: n for outcome, n in observed.items() if expected.get(outcome, 0.0) <= 0.0}
    assert not impossible, f"outcomes of probability 0: {impossible}"
    p_value = chi_square_p_value(observed, expected)
    assert p_value > LEVEL, f"p = {p_value:.2g} for {observed.total()} draws"


def chi_square_p_value(observed: Counter[Outcome], expected: Mapping[Outcome, float]) -> float:
    total = observed.total()
    cells = [(observed[outcome], share * total) for outcome, share in expected.items()]
    large = [cell for cell in cells if cell[1] >= MIN_EXPECTED]
    small = [cell for cell in cells if cell[1] < MIN_EXPECTED]
    if small:
        large.append((sum(seen for seen, _ in small), sum(wanted for _, wanted in small)))
        if large[-1][1] < MIN_EXPECTED and len(large) > 1:
            last, other = large.pop(), large.pop()
            large.append((last[0] + other[0], last[1] + other[1]))
    if len(large) == 1:
        return 1.0  # nothing else could have come
    seen, wanted = (np.array(column, dtype=np.float64) for column in zip(*large, strict=True))
    return float(stats.chisquare(seen, wanted * (seen.sum() / wanted.sum())).pvalue)


def filtered(logits: Sequence[float], params: SamplingParams) -> Probabilities:
    """What temperature, top-k, top-p and min-p make of logits, written down from their definitions."""
    scaled = np.array(logits, dtype=np.float64) / params.temperature
    probs = _normalized(np.exp(scaled - scaled.max()))
    order = np.argsort(-probs, kind="stable")
    if params.top_k > 0:
        probs = _keep(probs, order[: params.top_k])
    if params.top_p < 1.0:
        # The smallest set of most probable tokens whose probability reaches top_p.
        reached = np.cumsum(probs[order])
        probs = _keep(probs, order[: int(np.searchsorted(reached, params.top_p)) + 1])
    if params.min_p > 0.0:
        probs = _keep(probs, np.flatnonzero(probs >= params.min_p * probs.max()))
    return probs


def _keep(probs: Probabilities, ids: NDArray[np.int64]) -> Probabilities:
    kept = np.zeros_like(probs)
    kept[ids] = probs[ids]
    return _normalized(kept)


def _normalized(weights: Probabilities) -> Probabilities:
    total: np.float64 = weights.sum()
    return weights / total


def joint_distribution(
    next_logits: Callable[[Sequence[tuple[int, ...]]], Sequence[Sequence[float]]],
    prompt: Sequence[int],
    params: SamplingParams,
    num_tokens: int,
    *,
    end_token_ids: frozenset[int] = frozenset(),
) -> dict[tuple[int, ...], float]:
    """Every continuation of `num_tokens` tokens (or fewer, up to an end) and its probability.

    `next_logits` takes sequences of one length and gives the logits after each.
    """
    open_ends: dict[tuple[int, ...], float] = {(): 1.0}
    closed: dict[tuple[int, ...], float] = {}
    for _ in range(num_tokens):
        outputs = list(open_ends)
        rows: list[Sequence[float]] = []
        for start in range(0, len(outputs), _BATCH):
            rows.extend(next_logits([(*prompt, *output) for output in outputs[start : start + _BATCH]]))
        following: dict[tuple[int, ...], float] = {}
        for output, logits in zip(outputs, rows, strict=True):
            for token_id, probability in enumerate(filtered(logits, params)):
                if probability > 0.0:
                    into = closed if token_id in end_token_ids else following
                    into[(*output, token_id)] = open_ends[output] * float(probability)
        open_ends = following
    return closed | open_ends


def marginal(joint: Mapping[tuple[int, ...], float], positions: slice) -> dict[tuple[int, ...], float]:
    """Of the tokens at some positions."""
    result: dict[tuple[int, ...], float] = {}
    for output, probability in joint.items():
        result[output[positions]] = result.get(output[positions], 0.0) + probability
    return result


def counts_at(observed: Counter[tuple[int, ...]], positions: slice) -> Counter[tuple[int, ...]]:
    """The same of what was drawn."""
    result: Counter[tuple[int, ...]] = Counter()
    for output, count in observed.items():
        result[output[positions]] += count
    return result
