"""Streams hold whole characters only, say what the whole text says, and never show a stop string."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from draftline_server.core.detokenizer import REPLACEMENT, Decode, IncrementalDecoder, StopChecker
from support.tiny_tokenizers import EOS_ID, TokenizerKind, make_tokenizer

TEXTS = [
    pytest.param("Plain words, one after the other.", id="ascii"),
    pytest.param("  two  spaces   everywhere  ", id="spaces"),
    pytest.param("line\n\n\ttab\r\nend", id="white-space"),
    pytest.param("Zwölf Boxkämpfer über den Deich — voilà", id="accents"),
    pytest.param("日本語の文章も、少しだけ。漢字仮名交じり", id="cjk"),
    pytest.param("🙂🙃🙂🙃 🙂", id="emoji"),
    pytest.param("👨‍👩‍👧‍👦👋🏽🏳️‍🌈", id="joined-emoji"),
    pytest.param("e\u0301a\u0300n\u0303", id="combining"),
    pytest.param("שלום مرحبا नमस्ते ไทย", id="other-scripts"),
    pytest.param("a日b🙂c", id="alternating"),
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[TokenizerKind, _Tokens]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: _Tokens(root / kind, kind) for kind in ("bytes", "byte_fallback")}


class _Tokens:
    """A tokenizer's two directions, and its tokens by what they may stand in a text for."""

    def __init__(self, directory: Path, kind: TokenizerKind) -> None:
        backend = make_tokenizer(directory, kind=kind)
        self.encode: Callable[[str], list[int]] = lambda text: backend.encode(text, add_special_tokens=False)
        self.decode: Decode = lambda ids: str(backend.decode(list(ids), skip_special_tokens=True))
        self.decode_all: Decode = lambda ids: str(backend.decode(list(ids), skip_special_tokens=False))
        self.vocabulary = range(len(backend))
        ids = backend.get_vocab()
        self.byte_ids = [ids[f"<0x{byte:02X}>"] for byte in range(256)] if kind != "bytes" else []


KINDS = pytest.mark.parametrize("kind", ["bytes", "byte_fallback"])


def stream(decode: Decode, token_ids: Sequence[int]) -> list[str]:
    decoder = IncrementalDecoder(decode)
    return [*[decoder.push(token_id) for token_id in token_ids], decoder.flush()]


@KINDS
@pytest.mark.parametrize("text", TEXTS)
def test_the_chunks_of_a_text_join_to_that_text(
    tokenizers: dict[TokenizerKind, _Tokens], kind: TokenizerKind, text: str
) -> None:
    tokens = tokenizers[kind]
    chunks = stream(tokens.decode, tokens.encode(text))
    assert "".join(chunks) == text
    assert chunks[-1] == "", "nothing was left to flush"


@KINDS
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_cut_anywhere_streams_whole_characters_and_ends_as_its_whole_decode(
    tokenizers: dict[TokenizerKind, _Tokens], kind: TokenizerKind, text: str
) -> None:
    tokens = tokenizers[kind]
    token_ids = tokens.encode(text)
    for end in range(len(token_ids)):
        *chunks, rest = stream(tokens.decode, token_ids[:end])
        assert REPLACEMENT not in "".join(chunks)
        assert text.startswith("".join(chunks))
        if kind == "bytes":
            assert "".join(chunks) + rest == tokens.decode(token_ids[:end])
        else:
            # Here the whole decode shows even whole characters as U+FFFD where a broken one follows.
            assert set(rest) <= {REPLACEMENT}
            assert len(rest) <= 3


@KINDS
def test_each_character_is_passed_on_with_the_token_that_completes_it(
    tokenizers: dict[TokenizerKind, _Tokens], kind: TokenizerKind
) -> None:
    tokens = tokenizers[kind]
    decoder = IncrementalDecoder(tokens.decode)
    token_ids = tokens.encode("日🙂é漢")
    so_far: list[int] = []
    streamed = ""
    for token_id in token_ids:
        so_far.append(token_id)
        streamed += decoder.push(token_id)
        assert streamed == tokens.decode(so_far).rstrip(REPLACEMENT) or REPLACEMENT in tokens.decode(so_far)
    assert streamed == "日🙂é漢"


@KINDS
def test_a_special_token_that_is_left_out_changes_no_space_around_it(
    tokenizers: dict[TokenizerKind, _Tokens], kind: TokenizerKind
) -> None:
    tokens = tokenizers[kind]
    token_ids = [EOS_ID, *tokens.encode("one two"), EOS_ID, EOS_ID, *tokens.encode(" three"), EOS_ID]
    for decode in (tokens.decode, tokens.decode_all):
        assert "".join(stream(decode, token_ids)) == decode(token_ids)


def _random_ids(rng: random.Random, tokens: _Tokens) -> list[int]:
    """Ids as a model without sense would draw them: anything, often bytes of characters or of none."""
    share = rng.random()
    result: list[int] = []
    for _ in range(rng.randint(1, 40)):
        kind = rng.random()
        if kind < share and tokens.byte_ids:
            text = chr(rng.choice([rng.randrange(0x80, 0x800), rng.randrange(0x3000, 0x9000), 0x1F642]))
            characters = [tokens.byte_ids[byte] for byte in text.encode()]
            # Now and then a byte too few.
            result.extend(characters[: len(characters) - (rng.random() < 0.2)])
        else:
            result.append(rng.choice(tokens.vocabulary))
    return result


@pytest.mark.parametrize("seed", range(4))
def test_random_ids_of_a_byte_level_tokenizer_stream_exactly_their_whole_decode(
    tokenizers: dict[TokenizerKind, _Tokens], seed: int
) -> None:
    tokens, rng = tokenizers["bytes"], random.Random(seed)
    for _ in range(150):
        token_ids = _random_ids(rng, tokens)
        assert "".join(stream(tokens.decode, token_ids)) == tokens.decode(token_ids)


@pytest.mark.parametrize("seed", range(4))
def test_random_ids_of_a_byte_fallback_tokenizer_lose_no_character(
    tokenizers: dict[TokenizerKind, _Tokens], seed: int
) -> None:
    """The exception: of a run of byte tokens that is broken somewhere, the whole decode shows every byte
    as U+FFFD, those of whole characters too; a stream has passed on these characters by then."""
    tokens, rng = tokenizers["byte_fallback"], random.Random(seed)
    num_broken = 0
    for _ in range(150):
        token_ids = _random_ids(rng, tokens)
        whole, streamed = tokens.decode(token_ids), "".join(stream(tokens.decode, token_ids))
        if REPLACEMENT not in whole:
            assert streamed == whole
            continue
        num_broken += 1
        rest = iter(streamed)
        assert all(character in rest for character in whole if character != REPLACEMENT)
        assert REPLACEMENT in streamed
    assert num_broken > 10


@KINDS
def test_work_per_token_does_not_grow_with_text_that_is_never_complete(
    tokenizers: dict[TokenizerKind, _Tokens], kind: TokenizerKind
) -> None:
    tokens = tokenizers[kind]
    broken = tokens.byte_ids[0x80] if kind == "byte_fallback" else tokens.encode("é")[-1]
    for token_id in (broken, EOS_ID):
        longest = 0

        def decode(token_ids: Sequence[int]) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return tokens.decode(token_ids)

        token_ids = [*tokens.encode("Hello"), *[token_id] * 400, *tokens.encode(" world")]
        assert "".join(stream(decode, token_ids)) == tokens.decode(token_ids)
        assert longest <= 64


class TestStopChecker:
    @staticmethod
    def run(
        stops: Sequence[str], chunks: Sequence[str], *, include_stop: bool = False
    ) -> tuple[str, str | None]:
        """The text passed on, and the stop string that ended it."""
        checker = StopChecker(stops, include_stop=include_stop)
        passed = ""
        for chunk in chunks:
            text, match = checker.push(chunk)
            passed += text
            if match is not None:
                return passed, match.stop
        return passed + checker.flush(), None

    @pytest.mark.parametrize(
        ("stops", "text", "expected"),
        [
            pytest.param([], "anything", ("anything", None), id="no-stops"),
            pytest.param(["x"], "abc", ("abc", None), id="absent"),
            pytest.param(["b"], "abc", ("a", "b"), id="one-letter"),
            pytest.param(["abc"], "abc", ("", "abc"), id="the-whole-text"),
            pytest.param(["STOP"], "go STOP go", ("go ", "STOP"), id="inside"),
            pytest.param(["ab", "bc"], "abc", ("", "ab"), id="the-first-to-begin-wins"),
            pytest.param(["bc", "ab"], "abc", ("", "ab"), id="whatever-their-order"),
            pytest.param(["abc", "ab"], "abc", ("", "ab"), id="the-first-to-end-of-those"),
            pytest.param(["aab"], "aaab", ("a", "aab"), id="overlaps-itself"),
            pytest.param(["abab"], "ababab", ("", "abab"), id="periodic"),
            pytest.param(["\n\n"], "a\nb\n\nc", ("a\nb", "\n\n"), id="false-alarm-first"),
            pytest.param(["END"], "the EN", ("the EN", None), id="false-alarm-at-the-end"),
            pytest.param(["日本"], "今日は日本", ("今日は", "日本"), id="not-ascii"),
        ],
    )
    def test_finds_the_same_in_any_chunks(
        self, stops: list[str], text: str, expected: tuple[str, str | None]
    ) -> None:
        assert self.run(stops, [text]) == expected
        assert self.run(stops, list(text)) == expected
        for cut in range(len(text)):
            assert self.run(stops, [text[:cut], text[cut:]]) == expected

    def test_may_include_the_stop_string_but_nothing_behind_it(self) -> None:
        assert self.run(["lo"], ["hel", "lo wor", "ld"], include_stop=True) == ("hello", "lo")

    def test_holds_back_no_more_than_could_become_a_stop_string(self) -> None:
        checker = StopChecker(["</end>"], include_stop=False)
        assert checker.push("text </e") == ("text ", None)
        assert checker.push("m> more") == ("</em> more", None)
        assert checker.push("<") == ("", None)
        assert checker.flush() == "<"
        assert checker.flush() == ""

    @pytest.mark.parametrize(
        ("stop", "text", "allowed_from", "expected"),
        [
            ("ab", "xabyab", 4, ("xaby", "ab")),  # the first one ends too early
            ("ab", "xab", 2, ("x", "ab")),  # begins before, ends where it may
            ("aba", "ababa", 4, ("ab", "aba")),  # begins with the end of one that did not count
            ("ab", "xab", 9, ("xab", None)),
        ],
    )
    def test_a_stop_string_that_ends_where_nothing_may_stop_is_text(
        self, stop: str, text: str, allowed_from: int, expected: tuple[str, str | None]
    ) -> None:
        checker = StopChecker([stop], include_stop=False)
        passed, found = "", None
        for index, character in enumerate(text):
            more, match = checker.push(character, may_stop=index >= allowed_from)
            passed += more
            if match is not None:
                found = match.stop
                break
        assert (passed if found else passed + checker.flush(), found) == expected

    @pytest.mark.parametrize("seed", range(6))
    def test_random_streams_never_leak_a_stop_string_nor_lose_text(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
            text = "".join(rng.choices("abc", weights=[3, 3, 1], k=rng.randint(0, 20)))
            cuts = sorted(rng.choices(range(len(text) + 1), k=3))
            chunks = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            passed, stop = self.run(stops, chunks)
            assert not any(s in passed for s in stops)
            if stop is None:
                assert passed == text
            else:
                assert text.startswith(passed + stop)
                assert not any(s in (passed + stop)[:-1] for s in stops), "an earlier end was missed"

    @pytest.mark.parametrize("seed", range(3))
    def test_what_was_found_does_not_depend_on_the_chunks(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(2)]
            text = "".join(rng.choices("ab", k=12))
            assert self.run(stops, list(text)) == self.run(stops, [text[:5], text[5:]])
