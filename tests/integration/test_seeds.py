"""A seed decides the text, and nothing else does: guaranteed in float32, in any batch, with any drafts."""

from __future__ import annotations

from typing import Literal

import pytest

from draftline_server.core.sampling_params import MAX_SEED, SpeculationParams
from draftline_server.engine import Engine
from support.driving import Session
from support.engines import add, drain, generate, make_engine
from support.guarantees import assert_idle, assert_same_output, guarded
from support.prompts import mixed_prompts, random_prompt
from support.tiny_tokenizers import LETTERS_VOCAB_SIZE
from support.zoo import DraftKind, ModelZoo

pytestmark = pytest.mark.usefixtures("fixed_randomness")

OFF = SpeculationParams(enabled=False)


def engine_of(
    zoo: ModelZoo,
    draft: DraftKind = "noised",
    *,
    num_blocks: int = 512,
    max_batched_tokens: int = 2048,
) -> Engine:
    return make_engine(
        zoo.target(),
        zoo.draft(draft),
        num_blocks=num_blocks,
        max_context_length=256,
        inference={"max_batched_tokens": max_batched_tokens},
        speculation={"methods": ("draft_model",), "num_speculative_tokens": 8},
    )


@pytest.mark.parametrize("temperature", [0.8, 2.0])
@pytest.mark.parametrize("draft", ["near", "head"])
@pytest.mark.parametrize("methods", [("draft_model",), ("ngram",), ("ngram", "draft_model")], ids="+".join)
def test_the_same_seed_gives_the_same_text_with_and_without_drafts_of_any_length(
    zoo: ModelZoo, methods: tuple[str, ...], temperature: float, draft: Literal["near", "head"]
) -> None:
    # A vocabulary so small that even at high temperatures the text sometimes repeats itself.
    engine = make_engine(
        zoo.letters(),
        zoo.letters(draft),
        speculation={"methods": methods, "num_speculative_tokens": 8, "ngram_min": 1},
    )
    prompts = mixed_prompts(5, vocab_size=LETTERS_VOCAB_SIZE)
    options = {"temperature": temperature, "seed": 42, "max_tokens": 20, "ignore_eos": True}
    with guarded(engine):
        plain = generate(engine, prompts, speculation=OFF, **options)
        for k in (1, 2, 4, 8):
            drafted = generate(engine, prompts, speculation=SpeculationParams(max_draft_tokens=k), **options)
            for one, other in zip(drafted, plain, strict=True):
                assert_same_output(one, other)
    assert sum(engine.statistics().accepted_tokens.values()) > 0


@pytest.mark.parametrize("draft", ["self", "noised", "unrelated", "head"])
def test_the_draft_model_has_no_say_in_a_seeded_text(zoo: ModelZoo, draft: DraftKind) -> None:
    prompts = mixed_prompts(5)
    plain = generate(engine_of(zoo, "self"), prompts, temperature=1.0, seed=9, max_tokens=20, speculation=OFF)
    drafted = generate(engine_of(zoo, draft), prompts, temperature=1.0, seed=9, max_tokens=20)
    for one, other in zip(drafted, plain, strict=True):
        assert_same_output(one, other)


def test_a_seeded_draft_of_the_target_itself_is_always_accepted(zoo: ModelZoo) -> None:
    engine = engine_of(zoo, "self")
    generate(engine, mixed_prompts(8), temperature=1.5, seed=4, max_tokens=40, top_p=0.9, ignore_eos=True)
    statistics = engine.statistics()
    assert statistics.accepted_tokens == statistics.draft_tokens


def test_a_seed_gives_the_same_text_alone_and_while_others_run(zoo: ModelZoo) -> None:
    engine = engine_of(zoo)
    prompt = random_prompt(12, seed=1)
    options = {"temperature": 2.0, "seed": 42, "max_tokens": 10}
    alone = [generate(engine, [prompt], **options)[0] for _ in range(5)]
    for completion in alone:
        assert_same_output(completion, alone[0])

    for joins_at_step in (0, 1, 3):
        session = Session(engine)
        for index, other in enumerate(mixed_prompts(8, seed=joins_at_step)):
            session.add(
                f"other-{index}", other, temperature=1.0, max_tokens=6 + index, seed=index % 2 or None
            )
        session.step(joins_at_step)
        session.add("mine", prompt, **options)
        assert_same_output(session.drain()["mine"], alone[0])
    assert_idle(engine)


@pytest.mark.parametrize("draft", ["noised", "head"])
def test_a_seed_gives_the_same_text_in_chunks_and_after_preemption(zoo: ModelZoo, draft: DraftKind) -> None:
    prompts = mixed_prompts(6, longest=60, seed=4)
    options = {"temperature": 1.2, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    expected = generate(engine_of(zoo), prompts, speculation=OFF, **options)
    chunked = engine_of(zoo, draft, max_batched_tokens=32)
    tight = engine_of(zoo, draft, num_blocks=16)
    for engine in (chunked, tight):
        for one, other in zip(generate(engine, prompts, **options), expected, strict=True):
            assert_same_output(one, other)
    assert tight.statistics().num_preemptions > 0


def test_different_seeds_give_different_texts_and_so_does_none(zoo: ModelZoo) -> None:
    engine = engine_of(zoo)
    prompt = random_prompt(12, seed=2)
    seeds = [0, 1, 2, 3, 2**32, 2**63, MAX_SEED, None, None]
    for index, seed in enumerate(seeds):
        add(engine, str(index), prompt, temperature=1.0, seed=seed, max_tokens=12, ignore_eos=True)
    texts = {tuple(completion.token_ids) for completion in drain(engine).values()}
    assert len(texts) == len(seeds)


def test_one_seed_for_different_prompts_does_not_make_them_alike(zoo: ModelZoo) -> None:
    engine = engine_of(zoo)
    completions = generate(
        engine, [[5], [6], [7], [8]], temperature=1.0, seed=1, max_tokens=12, ignore_eos=True
    )
    assert len({tuple(completion.token_ids) for completion in completions}) == 4
