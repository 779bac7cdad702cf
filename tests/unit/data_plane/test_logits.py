"""Each row becomes the distribution that its own request asked for, whatever the rows beside it ask for.

The oracle are the processors and warpers of transformers, applied to one row at a time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftline_server.core.sampling_params import SamplingParams
from draftline_server.model.logits import NUM_CANDIDATES, RowContext, process_logits, top_logprobs

SMALL, LARGE, HUGE = 60, 3 * NUM_CANDIDATES[0], 2 * NUM_CANDIDATES[-1]
"""Vocabularies with fewer tokens than the filters look at first, with more, and with more than they ever do
where they can help it."""

VOCABULARIES = pytest.mark.parametrize("vocab_size", [SMALL, LARGE, HUGE])

PARAMS: dict[str, SamplingParams] = {
    "defaults": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0),
    "greedy-with-filters": SamplingParams(temperature=0.0, top_k=3, top_p=0.2),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=3.0),
    "top-k": SamplingParams(top_k=7),
    "top-k-1": SamplingParams(top_k=1),
    "top-k-of-most": SamplingParams(top_k=SMALL - 1),
    "top-k-of-all": SamplingParams(top_k=LARGE),
    "top-k-of-more-than-all": SamplingParams(top_k=10**9),
    "top-k-off": SamplingParams(top_k=-1),
    "top-p": SamplingParams(top_p=0.8),
    "top-p-hot": SamplingParams(temperature=8.0, top_p=0.95),
    "top-p-tiny": SamplingParams(top_p=1e-4),
    "top-p-nearly-all": SamplingParams(top_p=0.995),
    "min-p": SamplingParams(min_p=0.1),
    "min-p-1": SamplingParams(min_p=1.0),
    "min-p-hot": SamplingParams(temperature=8.0, min_p=0.001),
    "filters": SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05),
    "wide-filters": SamplingParams(temperature=4.0, top_k=NUM_CANDIDATES[0] + 9, top_p=0.97, min_p=0.001),
    "top-k-of-first-look": SamplingParams(top_k=NUM_CANDIDATES[0]),
    "top-k-wide-top-p-narrow": SamplingParams(temperature=8.0, top_k=NUM_CANDIDATES[0] + 400, top_p=0.4),
    "repetition": SamplingParams(repetition_penalty=1.3),
    "repetition-rewarded": SamplingParams(repetition_penalty=0.8),
    "frequency": SamplingParams(frequency_penalty=0.7),
    "presence": SamplingParams(presence_penalty=-1.5),
    "bias": SamplingParams(logit_bias={3: 5.0, 8: -100.0, 0: 100.0}),
    "min-tokens": SamplingParams(min_tokens=50),
    "everything": SamplingParams(
        temperature=1.4,
        top_k=30,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=0.4,
        min_tokens=50,
        logit_bias={5: 4.0, 2: 4.0},
    ),
}
ENDS = frozenset({2, 9})


def random_logits(rows: int, vocab_size: int, *, seed: int = 0) -> Tensor:
    return 4.0 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def context(params: SamplingParams, *, seed: int = 0) -> RowContext:
    rng = random.Random(seed)
    return RowContext(params, rng.choices(range(40), k=12), rng.choices(range(20), k=9), ENDS)


def oracle(logits: Tensor, row: RowContext) -> Tensor:
    """One row ``[vocab]``, processed step by step by others' code, or by its plain definition."""
    params, scores = row.params, logits.clone()
    for token_id, bias in params.logit_bias.items():
        scores[token_id] += bias
    scores = _apply(_penalties(params), [*row.prompt_token_ids, *row.output_token_ids], scores)
    for token_id in row.output_token_ids:
        scores[token_id] -= params.frequency_penalty
    for token_id in set(row.output_token_ids):
        scores[token_id] -= params.presence_penalty
    if len(row.output_token_ids) < params.min_tokens:
        for token_id in row.end_token_ids:
            scores[token_id] = -math.inf
    return scores if params.temperature == 0.0 else _apply(_warpers(params, len(logits)), [], scores)


def _penalties(params: SamplingParams) -> list[LogitsProcessor]:
    if params.repetition_penalty == 1.0:
        return []
    return [RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]


def _warpers(params: SamplingParams, vocab_size: int) -> list[LogitsProcessor]:
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(min(params.top_k, vocab_size)))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers


def _apply(processors: Sequence[LogitsProcessor], token_ids: list[int], scores: Tensor) -> Tensor:
    rows, ids = scores.unsqueeze(0), torch.tensor([token_ids], dtype=torch.long)
    for processor in processors:
        rows = processor(ids, rows)
    return rows[0]


def process(logits: Tensor, rows: Sequence[RowContext]) -> Tensor:
    return process_logits(logits.clone(), rows)


@VOCABULARIES
@pytest.mark.parametrize("name", PARAMS)
def test_a_row_is_processed_as_transformers_would(name: str, vocab_size: int) -> None:
    for seed in range(4):
        logits, row = random_logits(1, vocab_size, seed=seed), context(PARAMS[name], seed=seed)
        torch.testing.assert_close(process(logits, [row])[0], oracle(logits[0], row))


@VOCABULARIES
def test_rows_of_one_batch_do_not_influence_each_other(vocab_size: int) -> None:
    names = list(PARAMS)
    random.Random(5).shuffle(names)
    rows = [context(PARAMS[name], seed=index) for index, name in enumerate(names)]
    logits = random_logits(len(rows), vocab_size)
    processed = process(logits, rows)
    for index, row in enumerate(rows):
        torch.testing.assert_close(processed[index], process(logits[index : index + 1], [row])[0])
        torch.testing.assert_close(processed[index], oracle(logits[index], row))


@VOCABULARIES
@pytest.mark.parametrize("seed", range(6))
def test_random_parameters_are_processed_as_transformers_would(seed: int, vocab_size: int) -> None:
    rng = random.Random(seed)
    rows = []
    for index in range(12):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.2, 1.0, 1.0, 2.5, 9.0]),
            top_k=rng.choice([0, 0, 1, 5, 50, 700]),
            top_p=rng.choice([1.0, 1.0, 0.1, 0.5, 0.95]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.3]),
            repetition_penalty=rng.choice([1.0, 1.0, 0.7, 1.5]),
            frequency_penalty=rng.choice([0.0, 0.0, -1.0, 0.5]),
            presence_penalty=rng.choice([0.0, 0.0, -1.0, 0.5]),
            min_tokens=rng.choice([0, 0, 30]),
            logit_bias=rng.choice([{}, {}, {1: 3.0, 9: 50.0}]),
        )
        rows.append(context(params, seed=100 * seed + index))
    logits = random_logits(len(rows), vocab_size, seed=seed)
    processed = process(logits, rows)
    for index, row in enumerate(rows):
        torch.testing.assert_close(processed[index], oracle(logits[index], row))


def test_the_row_of_a_draft_token_counts_the_draft_tokens_before_it() -> None:
    params = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5, min_tokens=3)
    logits = torch.zeros(3, SMALL)
    rows = [RowContext(params, (1,), output, ENDS) for output in ([7], [7, 7], [7, 7, 4])]
    processed = process(logits, rows)
    assert processed[:, 7].tolist() == [-1.5, -2.5, -2.5]
    assert processed[:, 4].tolist() == [0.0, 0.0, -1.5]
    assert processed[:, 2].tolist() == [-math.inf, -math.inf, 0.0], "the third row may end"
    assert processed[:, 1].tolist() == [0.0, 0.0, 0.0], "the prompt is not output"


def test_before_min_tokens_nothing_ends_even_where_nothing_can_end() -> None:
    logits = random_logits(1, SMALL)
    row = RowContext(SamplingParams(min_tokens=9), (1,), (), frozenset())
    assert torch.equal(process(logits, [row]), logits)


def test_a_bias_cannot_bring_back_the_end_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=9, logit_bias={2: 100.0})
    assert process(torch.zeros(1, SMALL), [RowContext(params, (1,), (), ENDS)])[0, 2] == -math.inf


@VOCABULARIES
@pytest.mark.parametrize(
    "params",
    [
        pytest.param(SamplingParams(top_k=3), id="top-k"),
        pytest.param(SamplingParams(top_p=0.1), id="top-p"),
        pytest.param(SamplingParams(min_p=0.9), id="min-p"),
    ],
)
def test_equal_logits_are_kept_or_dropped_together(params: SamplingParams, vocab_size: int) -> None:
    flat = process(torch.zeros(1, vocab_size), [context(params)])
    assert torch.isfinite(flat).all(), "nothing tells one token from another"
    steps = -torch.arange(vocab_size).div(10, rounding_mode="floor").float().unsqueeze(0)
    kept = torch.isfinite(process(steps, [context(params)]))[0]
    best = steps[0] == steps.max()
    assert torch.equal(kept, best), "the first step alone satisfies each of these"


EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e-5},
    {"temperature": 1e-300},
    {"temperature": 100.0},
    {"top_p": 1e-300},
    {"top_p": 5e-324, "temperature": 1e-5},
    {"repetition_penalty": 1e-300},
    {"repetition_penalty": 1e-300, "temperature": 1e-5},
    {"repetition_penalty": 100.0, "temperature": 1e-5, "min_p": 1.0},
    {"frequency_penalty": -2.0, "temperature": 1e-5, "top_k": 1},
    {"logit_bias": dict.fromkeys(range(SMALL), -100.0), "top_p": 0.5},
    {"logit_bias": {1: 100.0}, "temperature": 1e-5, "top_p": 0.5, "top_k": 2},
]


@VOCABULARIES
@pytest.mark.parametrize("fields", [pytest.param(f, id=str(f)[1:40]) for f in EXTREMES])
def test_the_ends_of_every_range_still_give_a_distribution(fields: dict[str, Any], vocab_size: int) -> None:
    params = SamplingParams(**fields)
    params.validate(vocab_size)
    logits = 20.0 * random_logits(1, vocab_size)
    probs = torch.softmax(process(logits, [context(params)]), dim=-1)
    assert torch.isfinite(probs).all()
    assert probs.sum().item() == pytest.approx(1.0, abs=1e-4)


@VOCABULARIES
def test_tokens_that_are_impossible_from_the_start_stay_so(vocab_size: int) -> None:
    logits = random_logits(3, vocab_size)
    logits[:, 20:] = -math.inf
    params = SamplingParams(temperature=5.0, top_k=25, top_p=0.999999, repetition_penalty=1.5)
    processed = process(logits, [context(params, seed=seed) for seed in range(3)])
    assert not torch.isfinite(processed[:, 20:]).any()
    assert not torch.isnan(processed).any()


@VOCABULARIES
@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_the_raw_logits(count: int, vocab_size: int) -> None:
    logits = random_logits(3, vocab_size)
    expected = torch.log_softmax(logits.double(), dim=-1)
    token_ids = [0, vocab_size - 1, int(logits[2].argmax())]
    result = top_logprobs(logits, token_ids, count)
    for row, (token_id, (logprob, top)) in enumerate(zip(token_ids, result, strict=True)):
        assert logprob == pytest.approx(float(expected[row, token_id]), abs=1e-4)
        best = expected[row].topk(count)
        assert [i for i, _ in top] == best.indices.tolist()
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_logprobs_of_half_precision_logits_are_computed_in_full_precision() -> None:
    logits = random_logits(1, LARGE).bfloat16()
    ((logprob, _),) = top_logprobs(logits, [3], 0)
    assert logprob == pytest.approx(float(torch.log_softmax(logits.double(), dim=-1)[0, 3]), abs=1e-4)
