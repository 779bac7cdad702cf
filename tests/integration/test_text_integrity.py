"""Characters that lie over several tokens arrive whole; bytes that are no text harm nobody."""

from __future__ import annotations

import pytest

from draftline.v1 import inference_pb2
from draftline_server.core.sampling_params import SpeculationParams
from draftline_server.engine import Engine
from draftline_server.model.tokenizer import Tokenizer
from support.engines import Completion, generate, make_engine
from support.function_models import dictated, make_function_engine, wrong_at
from support.guarantees import assert_same_output, assert_whole, guarded
from support.prompts import mixed_prompts
from support.tiny_tokenizers import TokenizerKind
from support.zoo import ModelZoo

pytestmark = pytest.mark.usefixtures("fixed_randomness")

OFF = SpeculationParams(enabled=False)
PROMPT = (7, 11, 13)
REPLACEMENT = "\ufffd"
TEXTS = {
    "emoji": "Smile 🙂🙃 and 😀😀😀!",
    "chinese": "日本語と中文、混在。日本日本",
    "joined": "family 👨‍👩‍👧‍👦, flag 🏳️‍🌈, skin 👋🏽",
    "accents": "Zwölf Boxkämpfer: é, e\u0301, ñ, Ω, ﷽",
    "four bytes each": "𐍈𐌰𐌱𐌲𐌳",
    "spaces": "  two  spaces\n\n\tand a tab  ",
}


def dictating_engine(tokenizer: Tokenizer, script: list[int], k: int) -> Engine:
    """Its draft is wrong now and then, so that drafts end inside characters, too."""
    target = dictated(script, prompt_length=len(PROMPT))
    return make_function_engine(
        target,
        wrong_at(range(3, len(script), 7), target, prompt_length=len(PROMPT)),
        decode=tokenizer.decode,
        speculation={"methods": ("draft_model",), "num_speculative_tokens": k},
    )


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", ["bytes", "byte_fallback"])
def test_every_chunk_is_whole_characters_at_every_draft_length(
    zoo: ModelZoo, kind: TokenizerKind, name: str
) -> None:
    tokenizer = Tokenizer.load(zoo.tokenizer(kind))
    text = TEXTS[name]
    script = tokenizer.encode_plain(text)
    assert tokenizer.decode(script) == text
    for k in range(1, 9):
        engine = dictating_engine(tokenizer, script, k)
        with guarded(engine, prompt=PROMPT):
            completion = generate(engine, [PROMPT], max_tokens=len(script))[0]
        assert_whole(completion, tokenizer.decode)
        assert completion.text == text
        assert not any(REPLACEMENT in chunk for chunk in completion.chunks)


@pytest.mark.parametrize("kind", ["bytes", "byte_fallback"])
def test_a_cut_inside_a_character_looks_the_same_at_every_draft_length(
    zoo: ModelZoo, kind: TokenizerKind
) -> None:
    tokenizer = Tokenizer.load(zoo.tokenizer(kind))
    text = "a日🙂é文"
    script = tokenizer.encode_plain(text)
    for max_tokens in range(1, len(script) + 1):
        for k in (1, 4, 8):
            engine = dictating_engine(tokenizer, script, k)
            with guarded(engine, prompt=PROMPT):
                drafted = generate(engine, [PROMPT], max_tokens=max_tokens)[0]
                plain = generate(engine, [PROMPT], max_tokens=max_tokens, speculation=OFF)[0]
            assert_same_output(drafted, plain)
            assert_survived_cut(drafted, text, tokenizer.decode(drafted.token_ids))


def assert_survived_cut(completion: Completion, text: str, whole: str) -> None:
    """The complete characters, and U+FFFD for the incomplete one: never more than the whole decode has.

    A decoder with byte tokens turns all bytes before an incomplete character into U+FFFD; the stream has
    sent them as characters by then, which is better.
    """
    complete = completion.text.rstrip(REPLACEMENT)
    assert text.startswith(complete)
    assert completion.text.count(REPLACEMENT) <= whole.count(REPLACEMENT)
    assert (REPLACEMENT in completion.text) == (REPLACEMENT in whole)
    for chunk in completion.chunks[:-1]:
        assert REPLACEMENT not in chunk


def test_a_stop_string_is_found_across_the_tokens_of_a_character(zoo: ModelZoo) -> None:
    for kind in ("bytes", "byte_fallback"):
        tokenizer = Tokenizer.load(zoo.tokenizer(kind))
        script = tokenizer.encode_plain("日本語🙂の文章")
        for stop, text in [("語", "日本"), ("🙂", "日本語"), ("語🙂の", "日本"), ("章", "日本語🙂の文")]:
            engine = dictating_engine(tokenizer, script, 8)
            with guarded(engine, prompt=PROMPT):
                completion = generate(engine, [PROMPT], max_tokens=len(script), stop=(stop,))[0]
            assert completion.text.strip(" ") == text


@pytest.mark.parametrize("kind", ["bytes", "byte_fallback"])
def test_random_bytes_never_break_a_stream(zoo: ModelZoo, kind: TokenizerKind) -> None:
    target = zoo.target() if kind == "bytes" else zoo.byte_fallback()
    tokenizer = Tokenizer.load(target)
    engine = make_engine(
        target, target, speculation={"methods": ("ngram", "draft_model"), "num_speculative_tokens": 3}
    )
    with guarded(engine):
        completions = [
            completion
            for wave in range(5)
            for completion in generate(
                engine,
                mixed_prompts(40, longest=12, seed=wave),
                max_tokens=14,
                temperature=2.0,
                ignore_eos=True,
            )
        ]
    assert len(completions) == 200
    assert any(REPLACEMENT in completion.text for completion in completions), "all of it was text"
    for completion in completions:
        for chunk in completion.chunks:
            parsed = inference_pb2.Chunk.FromString(inference_pb2.Chunk(text=chunk).SerializeToString())
            assert parsed.text == chunk
        if kind == "bytes":
            assert_whole(completion, tokenizer.decode)
        else:
            whole = tokenizer.decode(completion.token_ids)
            assert completion.text.count(REPLACEMENT) <= whole.count(REPLACEMENT)
