"""Sampling parameters hold at every position of an accepted run, as they do one token at a time.

The oracle is independent: greedy decoding over transformers' logits, one full forward per token, with the
parameters applied as their definitions say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline_server.core.sampling_params import SpeculationParams
from draftline_server.engine import Engine
from support.engines import Completion, add, drain, generate, make_engine
from support.guarantees import acceptance, assert_same_output, guarded
from support.prompts import mixed_prompts, random_prompt
from support.reference import Reference
from support.tiny_tokenizers import EOS_IDS, LETTERS_VOCAB_SIZE
from support.zoo import DraftKind, ModelZoo

pytestmark = pytest.mark.usefixtures("fixed_randomness")

OFF = SpeculationParams(enabled=False)
NUM_TOKENS = 16


def engine_of(
    zoo: ModelZoo, draft: DraftKind, *, k: int = 4, methods: Sequence[str] = ("draft_model",)
) -> Engine:
    return make_engine(
        zoo.target(),
        zoo.draft(draft),
        speculation={"methods": tuple(methods), "num_speculative_tokens": k},
    )


def expected_tokens(reference: Reference, prompt: Sequence[int], **parameters: Any) -> list[int]:
    """Greedy decoding with penalties, bias and min_tokens, written down from their definitions."""
    output: list[int] = []
    for _ in range(NUM_TOKENS):
        logits = reference.logits([*prompt, *output])[-1]
        output.append(int(adjusted(logits, prompt, output, **parameters).argmax()))
    return output


def adjusted(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    logit_bias: dict[int, float] | None = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    min_tokens: int = 0,
    stop_token_ids: Sequence[int] = (),
    **_: Any,
) -> Tensor:
    values = logits.tolist()
    counts = Counter(output)
    for token_id, bias in (logit_bias or {}).items():
        values[token_id] += bias
    for token_id in {*prompt, *output}:
        value = values[token_id]
        values[token_id] = value / repetition_penalty if value > 0 else value * repetition_penalty
    for token_id, count in counts.items():
        values[token_id] -= count * frequency_penalty + presence_penalty
    if len(output) < min_tokens:
        for token_id in stop_token_ids:
            values[token_id] = float("-inf")
    return torch.tensor(values)


PARAMETERS: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.5},
    "negative frequency": {"frequency_penalty": -1.5},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.6},
    "little repetition": {"repetition_penalty": 0.8},
    "bias": {"logit_bias": {50: 6.0, 51: 6.5, 52: -100.0, 60: 5.0}},
    "all": {
        "frequency_penalty": 0.7,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {50: 4.0, 51: 4.5},
    },
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_penalties_and_bias_count_the_tokens_of_the_draft_before_each_position(
    zoo: ModelZoo, name: str
) -> None:
    parameters = PARAMETERS[name]
    reference = Reference(zoo.target())
    # A prompt with repetitions makes the penalties bite, one without leaves the output to itself.
    prompts = [random_prompt(3, seed=1) * 5, random_prompt(20, seed=2)]
    expected = [expected_tokens(reference, prompt, **parameters) for prompt in prompts]
    free = [expected_tokens(reference, prompt) for prompt in prompts]
    assert expected != free, "the parameters change nothing here"
    for draft, methods in (
        ("self", ["draft_model"]),
        ("noised", ["ngram", "draft_model"]),
    ):
        engine = engine_of(zoo, draft, methods=methods)  # type: ignore[arg-type]
        with guarded(engine):
            completions = generate(engine, prompts, max_tokens=NUM_TOKENS, ignore_eos=True, **parameters)
        assert [c.token_ids for c in completions] == expected
        if draft == "self":
            # The draft samples with the same parameters, so it is the target to the last token.
            assert all(acceptance(c) == 1.0 for c in completions)


@pytest.mark.parametrize("min_tokens", [1, 4, 5, 6, 11])
def test_min_tokens_masks_the_ends_at_each_position_of_a_draft(zoo: ModelZoo, min_tokens: int) -> None:
    reference = Reference(zoo.target())
    prompt = random_prompt(20, seed=2)
    free = expected_tokens(reference, prompt)
    ends = tuple(dict.fromkeys(free))[:8]
    wanted = expected_tokens(reference, prompt, min_tokens=min_tokens, stop_token_ids=(*ends, *EOS_IDS))
    end = next(
        (i for i, t in enumerate(wanted) if i >= min_tokens and t in (*ends, *EOS_IDS)), NUM_TOKENS - 1
    )
    for draft in ("self", "noised"):
        engine = engine_of(zoo, draft)
        completion = generate(
            engine, [prompt], max_tokens=NUM_TOKENS, min_tokens=min_tokens, stop_token_ids=ends
        )[0]
        assert completion.token_ids == wanted[: end + 1]


@pytest.mark.parametrize("methods", [("draft_model",), ("ngram",), ("ngram", "draft_model")], ids="+".join)
def test_seeded_output_with_every_parameter_at_once_is_the_same_at_any_draft_length(
    zoo: ModelZoo, methods: tuple[str, ...]
) -> None:
    options: dict[str, Any] = {
        "temperature": 1.3,
        "top_k": 10,
        "top_p": 0.95,
        "min_p": 0.01,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {5: 2.0},
        "min_tokens": 5,
        "logprobs": 3,
        "max_tokens": 24,
        "seed": 11,
    }
    # A vocabulary so small that the text sometimes repeats itself.
    prompts = mixed_prompts(4, vocab_size=LETTERS_VOCAB_SIZE)
    engine = make_engine(
        zoo.letters(),
        zoo.letters("near"),
        speculation={"methods": methods, "num_speculative_tokens": 8, "ngram_min": 1},
    )
    with guarded(engine):
        plain = generate(engine, prompts, speculation=OFF, **options)
        for k in (1, 3, 8):
            drafted = generate(engine, prompts, speculation=SpeculationParams(max_draft_tokens=k), **options)
            for one, other in zip(drafted, plain, strict=True):
                assert_same_output(one, other)
                assert_same_logprobs(one, other)
    assert sum(engine.statistics().accepted_tokens.values()) > 0


# ------------------------------------------------------------------------------------------------- logprobs


def assert_same_logprobs(one: Completion, other: Completion) -> None:
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        assert mine.token_id == theirs.token_id
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [t for t, _ in mine.top] == [t for t, _ in theirs.top]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_target_alone(zoo: ModelZoo, temperature: float, count: int) -> None:
    """Of its raw logits, whatever the temperature and the penalties, and for every kind of token kept."""
    reference = Reference(zoo.target())
    prompts = mixed_prompts(4)
    for draft, methods in (("self", ["draft_model"]), ("noised", ["ngram", "draft_model"])):
        engine = engine_of(zoo, draft, methods=methods)  # type: ignore[arg-type]
        with guarded(engine):
            drafted = generate(
                engine, prompts, max_tokens=16, temperature=temperature, logprobs=count, frequency_penalty=0.5
            )
            # Others in the batch that want none, or want another number.
            mixed = generate(engine, prompts[:2], max_tokens=4)
        assert all(not completion.logprobs for completion in mixed)
        for prompt, completion in zip(prompts, drafted, strict=True):
            assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
            logits = reference.logits([*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, dim=-1)
            for row, entry in zip(expected, completion.logprobs, strict=True):
                assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
                values, ids = row.topk(count)
                assert [token_id for token_id, _ in entry.top] == ids.tolist()
                assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_logprobs_of_one_request_do_not_change_with_what_others_in_the_batch_ask_for(zoo: ModelZoo) -> None:
    engine = engine_of(zoo, "noised")
    prompts = mixed_prompts(6)
    for index, prompt in enumerate(prompts):
        add(
            engine,
            str(index),
            prompt,
            max_tokens=12,
            logprobs=(None, 2, 5)[index % 3],
            repetition_penalty=1.5 if index % 2 else 1.0,
            temperature=0.9 if index % 2 else 0.0,
            seed=index,
        )
    together = drain(engine)
    for index, prompt in enumerate(prompts):
        alone = generate(
            engine,
            [prompt],
            max_tokens=12,
            logprobs=(None, 2, 5)[index % 3],
            repetition_penalty=1.5 if index % 2 else 1.0,
            temperature=0.9 if index % 2 else 0.0,
            seed=index,
            speculation=OFF,
        )[0]
        assert_same_output(together[str(index)], alone)
        assert_same_logprobs(together[str(index)], alone)
