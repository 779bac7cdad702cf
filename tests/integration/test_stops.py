"""Generation ends at the same token and character, wherever in a draft the end lies.

Models are functions that dictate the text, so each end can be put on every slot of a draft block: with k
drafts, prefill gives output token 0, and the first block holds tokens 1 to k and the bonus token k + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from draftline_server.core.generation import FinishReason
from draftline_server.core.sampling_params import (
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    SpeculationParams,
)
from draftline_server.engine import Engine
from draftline_server.model.tokenizer import Tokenizer
from support.engines import Completion, generate, make_engine
from support.function_models import dictated, ids_of_letters, letters, make_function_engine, wrong_at
from support.guarantees import acceptance, assert_idle, assert_same_output, assert_whole, guarded, refused
from support.prompts import mixed_prompts
from support.zoo import ModelZoo

OFF = SpeculationParams(enabled=False)
PROMPT = (1, 2, 3)
SCRIPT = list(range(100, 130))
"""Every token is another one, so that each can be the end of sequence."""


def scripted_engine(
    script: Sequence[int], *, k: int, eos: Sequence[int] = (), wrong: Sequence[int] = (), **options: Any
) -> Engine:
    """The draft says what the target says, but for the output tokens in `wrong`."""
    target = dictated(script, prompt_length=len(PROMPT))
    return make_function_engine(
        target,
        wrong_at(wrong, target, prompt_length=len(PROMPT)),
        eos_token_ids=eos,
        speculation={"methods": ("draft_model",), "num_speculative_tokens": k},
        **({"decode": letters} | options),
    )


def repeating_prompt(script: Sequence[int], *, wrong: Sequence[int] = ()) -> list[int]:
    """After it n-gram drafts are `script`, which it has had before, but for the tokens in `wrong`."""
    said = [token_id + 100 if index in wrong else token_id for index, token_id in enumerate(script)]
    return [*PROMPT, *said, *PROMPT]


def complete(
    engine: Engine, *, prompt: Sequence[int] = PROMPT, **options: Any
) -> tuple[Completion, Completion]:
    """The same request with speculation and without."""
    with guarded(engine, prompt=PROMPT):
        drafted = generate(engine, [prompt], **({"max_tokens": 24} | options))[0]
        plain = generate(engine, [prompt], **({"max_tokens": 24, "speculation": OFF} | options))[0]
    assert_same_output(drafted, plain)
    return drafted, plain


# ------------------------------------------------------------------------------------------ end of sequence


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("wrong", [(), (2,), (1, 3, 6)], ids=["all stand", "one falls", "some fall"])
def test_nothing_follows_the_end_of_sequence_on_any_slot_of_a_draft(k: int, wrong: tuple[int, ...]) -> None:
    for slot in range(2 * k + 4):
        engine = scripted_engine(SCRIPT, k=k, eos=[99, SCRIPT[slot]], wrong=wrong)
        drafted, _ = complete(engine)
        assert drafted.token_ids == SCRIPT[: slot + 1]
        assert drafted.text == letters(SCRIPT[:slot])
        assert drafted.summary is not None
        assert drafted.summary.finish_reason is FinishReason.STOP
        assert drafted.summary.matched_stop == SCRIPT[slot]
        # What the end cut off counts as neither accepted nor rejected.
        stats = drafted.summary.speculation
        assert stats.accepted_tokens + stats.decode_steps >= slot + 1
        if stats.drafts and not wrong:
            assert acceptance(drafted) == 1.0


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("wrong", [(), (2,), (1, 3, 6)], ids=["all stand", "one falls", "some fall"])
def test_nothing_follows_the_end_of_sequence_on_any_slot_of_an_ngram_draft(
    k: int, wrong: tuple[int, ...]
) -> None:
    prompt = repeating_prompt(SCRIPT, wrong=wrong)
    for slot in range(2 * k + 4):
        engine = make_function_engine(
            dictated(SCRIPT, prompt_length=len(prompt)),
            decode=letters,
            eos_token_ids=[99, SCRIPT[slot]],
            speculation={"methods": ("ngram",), "num_speculative_tokens": k},
        )
        drafted, _ = complete(engine, prompt=prompt)
        assert drafted.token_ids == SCRIPT[: slot + 1]
        assert drafted.text == letters(SCRIPT[:slot])
        assert drafted.summary is not None
        assert drafted.summary.matched_stop == SCRIPT[slot]
        if slot > 0 and not wrong:
            assert acceptance(drafted) == 1.0


@pytest.mark.parametrize("slot", range(7))
def test_a_stop_token_ends_like_the_end_of_sequence_which_alone_ignore_eos_concerns(slot: int) -> None:
    engine = scripted_engine(SCRIPT, k=4, eos=[SCRIPT[slot]])
    drafted, _ = complete(engine, ignore_eos=True, stop_token_ids=[SCRIPT[slot + 2], SCRIPT[20]])
    assert drafted.token_ids == SCRIPT[: slot + 3]
    assert drafted.summary is not None
    assert drafted.summary.matched_stop == SCRIPT[slot + 2]
    assert SCRIPT[slot] in drafted.token_ids

    drafted, _ = complete(engine, ignore_eos=True)
    assert drafted.token_ids == SCRIPT[:24]
    assert drafted.summary is not None
    assert drafted.summary.finish_reason is FinishReason.LENGTH


def test_the_end_of_sequence_on_the_last_token_allowed_counts_as_a_stop() -> None:
    for slot in range(8):
        engine = scripted_engine(SCRIPT, k=4, eos=[SCRIPT[slot]])
        drafted, _ = complete(engine, max_tokens=slot + 1)
        assert drafted.summary is not None
        assert drafted.summary.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("min_tokens", range(9))
def test_no_end_comes_before_min_tokens_on_any_slot(min_tokens: int) -> None:
    """The token that would end is impossible until then; the next most likely one takes its place."""
    ends = SCRIPT[:10]
    engine = scripted_engine(SCRIPT, k=4, eos=ends[:4])
    drafted, _ = complete(engine, min_tokens=min_tokens, stop_token_ids=ends[4:])
    assert len(drafted.token_ids) == min_tokens + 1
    assert not set(drafted.token_ids[:-1]) & set(ends)
    assert drafted.token_ids[-1] == SCRIPT[min_tokens]
    assert acceptance(drafted) == 1.0 if min_tokens > 1 else True


def test_min_tokens_without_any_end_is_no_fault() -> None:
    engine = scripted_engine(SCRIPT, k=4)
    drafted, _ = complete(engine, min_tokens=5, ignore_eos=True)
    assert drafted.token_ids == SCRIPT[:24]


def test_real_models_stop_at_each_token_that_they_produce(zoo: ModelZoo) -> None:
    for draft in ("self", "noised"):
        engine = make_engine(
            zoo.target(),
            zoo.draft(draft),
            speculation={"methods": ("draft_model",), "num_speculative_tokens": 4},
        )
        with guarded(engine):
            for prompt in mixed_prompts(3):
                options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
                free = generate(engine, [prompt], speculation=OFF, **options)[0].token_ids
                for token_id in dict.fromkeys(free):
                    completion = generate(engine, [prompt], stop_token_ids=[token_id], **options)[0]
                    assert completion.token_ids == free[: free.index(token_id) + 1]


# --------------------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize("length", [1, 2, 3, 8])
@pytest.mark.parametrize("wrong", [(), (1, 3, 6)], ids=["all stand", "some fall"])
def test_text_ends_right_before_a_stop_string_at_each_offset(length: int, wrong: tuple[int, ...]) -> None:
    engine = scripted_engine(SCRIPT, k=8, wrong=wrong)
    text = letters(SCRIPT)
    for offset in range(20 - length):
        stop = text[offset : offset + length]
        drafted, _ = complete(engine, stop=("never", stop))
        assert drafted.text == text[:offset]
        assert drafted.token_ids == SCRIPT[: offset + length]
        assert drafted.summary is not None
        assert drafted.summary.matched_stop == stop
        assert drafted.summary.num_output_tokens == offset + length

        kept, _ = complete(engine, stop=(stop,), include_stop_string=True)
        assert kept.text == text[: offset + length]


def test_a_stop_string_over_several_tokens_never_leaks_its_beginning() -> None:
    text = "one STO two STOP three"
    engine = scripted_engine(ids_of_letters(text.replace(" ", "_")), k=8)
    drafted, _ = complete(engine, stop=("STOP",))
    assert drafted.text == "one_STO_two_"
    # The false alarm came out whole and once; of the match not even one letter did.
    for chunk in drafted.chunks:
        assert not chunk.endswith(("S", "ST", "STO"))


@pytest.mark.parametrize("tail", ["S", "ST", "STO"])
def test_a_possible_stop_string_at_the_end_of_generation_is_delivered(tail: str) -> None:
    text = f"some_words_{tail}"
    for k in (1, 4, 8):
        engine = scripted_engine(ids_of_letters(text), k=k)
        drafted, _ = complete(engine, stop=("STOP",), max_tokens=len(text))
        assert drafted.text == text
        assert drafted.summary is not None
        assert drafted.summary.finish_reason is FinishReason.LENGTH
        # Ended by a token instead, which is no part of the text.
        engine = scripted_engine([*ids_of_letters(text), 200], k=k, eos=[200])
        drafted, _ = complete(engine, stop=("STOP",))
        assert drafted.text == text
        assert drafted.summary is not None
        assert drafted.summary.matched_stop == 200


def test_the_stop_string_that_ends_first_wins_and_of_those_that_end_together_the_longest() -> None:
    engine = scripted_engine(ids_of_letters("abcdefghij"), k=8)
    for stops, text, matched in [
        (("ef", "cdefg"), "abcd", "ef"),  # "ef" ends before "cdefg" does
        (("cdefg", "fg", "g"), "ab", "cdefg"),  # they end together: the longest
        (("de", "def"), "abc", "de"),
        (("def", "e"), "abcd", "e"),
    ]:
        drafted, _ = complete(engine, stop=stops, max_tokens=10)
        assert (drafted.text, drafted.summary and drafted.summary.matched_stop) == (text, matched)


def test_before_min_tokens_a_stop_string_is_text_like_any_other() -> None:
    engine = scripted_engine(ids_of_letters("abcabcabc"), k=4)
    for min_tokens, end in [(0, 3), (3, 3), (4, 6), (6, 6), (7, 9)]:
        drafted, _ = complete(engine, stop=("c",), min_tokens=min_tokens, max_tokens=9)
        assert len(drafted.token_ids) == end
        assert drafted.text == "abcabcabc"[: end - 1]


def test_stop_strings_inside_long_tokens_cut_the_text_and_not_the_token(zoo: ModelZoo) -> None:
    tokenizer = Tokenizer.load(zoo.tokenizer("bytes"))
    text = "The draft proposes a few tokens and the target verifies them 日本語🙂 at once."
    script = tokenizer.encode_plain(text)
    assert len(script) < len(text), "no token has several characters"
    engine = scripted_engine(script, k=8, decode=tokenizer.decode)
    for offset in range(0, len(text) - 6):
        stop = text[offset : offset + 1 + offset % 5]
        drafted, _ = complete(engine, stop=(stop,), max_tokens=len(script))
        assert drafted.text == text[: text.index(stop)]
        whole = tokenizer.decode(drafted.token_ids)
        assert stop in whole
        assert stop not in tokenizer.decode(drafted.token_ids[:-1])


@pytest.mark.parametrize("logprobs", [0, 2])
def test_token_ids_logprobs_and_usage_describe_the_same_tokens_at_a_stop(logprobs: int) -> None:
    text = "so_ha_ha_ha_and_on"
    for source in (("draft_model",), ("ngram",)):
        target = dictated(ids_of_letters(text), prompt_length=len(PROMPT))
        engine = make_function_engine(
            target, target, decode=letters, speculation={"methods": source, "num_speculative_tokens": 8}
        )
        drafted, plain = complete(engine, stop=("_ha_ha_ha",), logprobs=logprobs)
        assert drafted.text == "so"
        assert drafted.token_ids == ids_of_letters("so_ha_ha_ha")
        assert [entry.token_id for entry in drafted.logprobs] == drafted.token_ids
        assert drafted.logprobs == plain.logprobs
        assert {len(entry.top) for entry in drafted.logprobs} == {logprobs}
        assert drafted.summary is not None
        assert drafted.summary.num_output_tokens == len(drafted.token_ids)


def test_stop_strings_that_make_no_sense_are_refused() -> None:
    engine = scripted_engine(SCRIPT, k=4)
    with guarded(engine, prompt=PROMPT):
        for stops, field in [
            (("",), "sampling.stop[0]"),
            (("x", ""), "sampling.stop[1]"),
            (("x",) * (MAX_STOP_STRINGS + 1), "sampling.stop"),
            (("x",) * 1000, "sampling.stop"),
            (("x" * (MAX_STOP_STRING_LENGTH + 1),), "sampling.stop[0]"),
            (("x" * 100_000,), "sampling.stop[0]"),
        ]:
            with refused(field):
                generate(engine, [PROMPT], stop=stops)


def test_no_stop_strings_and_the_most_and_longest_allowed_are_fine() -> None:
    engine = scripted_engine(SCRIPT, k=4)
    none, _ = complete(engine, stop=())
    most, _ = complete(engine, stop=("\U0001f642" * MAX_STOP_STRING_LENGTH,) * MAX_STOP_STRINGS)
    assert_same_output(most, none)
    assert_whole(none, letters)
    assert_idle(engine)
