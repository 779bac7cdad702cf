"""Generation ends at the first reason, and text, tokens and counts all end there together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from draftline_server.core.generation import FinishReason, GenerationDelta, TokenLogprobs
from draftline_server.core.output import RequestOutput, token_logprobs
from draftline_server.core.request import Request
from support.requests import make_request

EOS = 0


def decode(token_ids: Sequence[int]) -> str:
    """Token n is the n-th letter; the end of sequence and what is beyond z is nothing."""
    return "".join(chr(ord("a") + i - 1) if 0 < i <= 26 else "" for i in token_ids)


def decode_utf8(token_ids: Sequence[int]) -> str:
    """Token n is byte n."""
    return bytes(token_ids).decode(errors="replace")


def make_output(**sampling: Any) -> tuple[Request, RequestOutput]:
    request = make_request(prompt=[5, 5], arrival_time=1.0, num_truncated_prompt_tokens=3, **sampling)
    return request, RequestOutput(request, decode=decode, eos_token_ids=frozenset({EOS}))


def commit(output: RequestOutput, token_ids: Sequence[int]) -> int:
    """Commits tokens as a verified run is committed; returns how many were kept."""
    for index, token_id in enumerate(token_ids):
        if output.commit(token_id):
            return index + 1
    return len(token_ids)


def ids(text: str) -> list[int]:
    return [ord(letter) - ord("a") + 1 for letter in text]


@pytest.mark.parametrize(
    ("sampling", "token_ids", "kept", "text", "reason", "matched"),
    [
        pytest.param({}, ids("abc"), 3, "abc", None, None, id="goes-on"),
        pytest.param({}, [1, EOS, 2], 2, "a", FinishReason.STOP, EOS, id="end-of-sequence"),
        pytest.param({}, [EOS], 1, "", FinishReason.STOP, EOS, id="end-of-sequence-at-once"),
        pytest.param({"ignore_eos": True}, [1, EOS, 2], 3, "ab", None, None, id="end-of-sequence-ignored"),
        pytest.param({"stop_token_ids": (3,)}, ids("abcd"), 3, "ab", FinishReason.STOP, 3, id="stop-token"),
        pytest.param(
            {"stop_token_ids": (EOS,), "ignore_eos": True},
            [1, EOS],
            2,
            "a",
            FinishReason.STOP,
            EOS,
            id="end-of-sequence-ignored-but-named",
        ),
        pytest.param({"stop": ("cd",)}, ids("abcde"), 4, "ab", FinishReason.STOP, "cd", id="stop-string"),
        pytest.param(
            {"stop": ("cd",), "include_stop_string": True},
            ids("abcde"),
            4,
            "abcd",
            FinishReason.STOP,
            "cd",
            id="stop-string-included",
        ),
        pytest.param({"max_tokens": 3}, ids("abcd"), 3, "abc", FinishReason.LENGTH, None, id="max-tokens"),
        pytest.param({"max_tokens": 1}, ids("ab"), 1, "a", FinishReason.LENGTH, None, id="one-token"),
        pytest.param(
            {"max_tokens": 3, "stop": ("c",)},
            ids("abc"),
            3,
            "ab",
            FinishReason.STOP,
            "c",
            id="stop-string-with-the-last-token",
        ),
        pytest.param(
            {"max_tokens": 2}, [1, EOS], 2, "a", FinishReason.STOP, EOS, id="end-of-sequence-as-the-last"
        ),
        pytest.param(
            {"max_tokens": 3, "stop": ("bcd",)},
            ids("abc"),
            3,
            "abc",
            FinishReason.LENGTH,
            None,
            id="a-stop-string-begun-is-text",
        ),
        pytest.param(
            {"stop": ("bcd",)},
            [*ids("abc"), EOS],
            4,
            "abc",
            FinishReason.STOP,
            EOS,
            id="a-stop-string-begun-before-the-end-of-sequence-is-text",
        ),
        pytest.param(
            {"min_tokens": 3}, [1, EOS, 2, EOS], 4, "ab", FinishReason.STOP, EOS, id="min-tokens-and-eos"
        ),
        pytest.param(
            {"min_tokens": 3, "stop": ("b",)},
            ids("abcb"),
            4,
            "abc",
            FinishReason.STOP,
            "b",
            id="min-tokens-and-stop-string",
        ),
        pytest.param(
            {"min_tokens": 2, "max_tokens": 2, "stop": ("b",)},
            ids("ab"),
            2,
            "a",
            FinishReason.STOP,
            "b",
            id="min-tokens-reached-with-the-last-token",
        ),
    ],
)
def test_where_generation_ends(
    sampling: dict[str, Any],
    token_ids: list[int],
    kept: int,
    text: str,
    reason: FinishReason | None,
    matched: int | str | None,
) -> None:
    request, output = make_output(**sampling)
    assert commit(output, token_ids) == kept
    delta = output.take_delta()
    assert (output.finish_reason, output.matched_stop) == (reason, matched)
    assert delta.token_ids == tuple(token_ids[:kept])
    assert request.token_ids == [5, 5, *token_ids[:kept]]
    assert delta.text == text


@pytest.mark.parametrize("cut", range(7))
def test_deltas_taken_anywhere_join_to_the_same(cut: int) -> None:
    request, output = make_output(stop=("efg",), max_tokens=7)
    deltas: list[GenerationDelta] = []
    commit(output, ids("abcdefx")[:cut])
    deltas.append(output.take_delta())
    commit(output, ids("abcdefx")[cut:])
    deltas.append(output.take_delta(output.summarize(2.0)))
    assert "".join(d.text for d in deltas) == "abcdefx"
    assert sum((d.token_ids for d in deltas), ()) == tuple(ids("abcdefx"))
    assert [d.is_final for d in deltas] == [False, True]
    assert output.take_delta() == GenerationDelta(request.request_id), "everything was taken"


def test_no_text_of_a_possible_stop_string_is_passed_on_before_it_is_decided() -> None:
    _, output = make_output(stop=("cde",))
    commit(output, ids("abcd"))
    assert output.take_delta().text == "ab"
    commit(output, ids("x"))
    assert output.take_delta().text == "cdx"
    commit(output, ids("cde"))
    assert output.take_delta().text == ""
    assert output.matched_stop == "cde"


@pytest.mark.parametrize(
    ("token_ids", "text"),
    [
        pytest.param(list("é".encode()), "é", id="whole"),
        pytest.param(list("é🙂".encode())[:-1], "é\ufffd", id="cut"),
    ],
)
def test_the_end_releases_an_incomplete_character(token_ids: list[int], text: str) -> None:
    request = make_request(max_tokens=len(token_ids), ignore_eos=True)
    output = RequestOutput(request, decode=decode_utf8, eos_token_ids=frozenset({EOS}))
    assert commit(output, token_ids) == len(token_ids)
    assert output.take_delta().text == text


def test_log_probabilities_go_with_exactly_the_tokens_kept() -> None:
    _, output = make_output(stop=("b",))
    entries = token_logprobs(ids("abc"), [(-0.1, [(1, -0.1)]), (-0.2, []), (-0.3, [])])
    for token_id, entry in zip(ids("abc"), entries, strict=True):
        if output.commit(token_id, entry):
            break
    delta = output.take_delta()
    assert delta.token_ids == (1, 2)
    assert delta.logprobs == (TokenLogprobs(1, -0.1, ((1, -0.1),)), TokenLogprobs(2, -0.2, ()))


def test_the_summary_tells_what_happened_when() -> None:
    request, output = make_output(max_tokens=2)
    request.num_cached_tokens = 1
    request.first_scheduled_time, request.first_token_time = 1.5, 2.5
    commit(output, ids("ab"))
    summary = output.summarize(5.0)
    assert (summary.finish_reason, summary.matched_stop) == (FinishReason.LENGTH, None)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (2, 2)
    assert (summary.num_cached_tokens, summary.num_truncated_prompt_tokens) == (1, 3)
    assert summary.queue_seconds == 0.5
    assert summary.time_to_first_token_seconds == 1.5
    assert summary.end_to_end_seconds == 4.0
    assert summary.speculation is request.stats


def test_a_request_that_has_not_ended_has_no_summary() -> None:
    _, output = make_output()
    with pytest.raises(AssertionError, match="has not ended"):
        output.summarize(1.0)
