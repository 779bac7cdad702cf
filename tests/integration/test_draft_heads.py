"""What a draft head proposes inside the engine is what it would propose if all were computed anew.

Every draft is compared with `ReferenceHead`, which has neither caches nor batches: whatever is wrong with
positions, with features after a rejection, with prefix hits or with preemption shows as another draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftline_server.core.sampling_params import SpeculationParams
from draftline_server.engine import Engine
from draftline_server.model.hidden_states import MAX_KEPT_TOKENS
from draftline_server.speculation.draft_head import DraftHeadProposer
from draftline_server.speculation.proposer import Draft, DraftTask
from support.draft_heads import FLAGS, ReferenceHead
from support.engines import add, drain, generate, make_engine
from support.guarantees import assert_idle
from support.prompts import mixed_prompts, random_prompt
from support.zoo import ModelZoo

LENGTH = 4
OFF = SpeculationParams(enabled=False)


@dataclass(frozen=True, slots=True)
class Seen:
    """A draft, and what it was made from."""

    token_ids: tuple[int, ...]
    start: int
    drafted: tuple[int, ...]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Every draft of a head, as it is made."""
    made: list[Seen] = []
    propose = DraftHeadProposer.propose

    def spy(proposer: DraftHeadProposer, tasks: Sequence[DraftTask]) -> list[Draft]:
        drafts = propose(proposer, tasks)
        for task, draft in zip(tasks, drafts, strict=True):
            request = task.request
            made.append(Seen(tuple(request.token_ids), max(1, request.draft_start), draft.token_ids))
        return drafts

    monkeypatch.setattr(DraftHeadProposer, "propose", spy)
    return made


def engine_of(target: Path, head: Path, **options: Any) -> Engine:
    speculation = {"methods": ("draft_model",), "num_speculative_tokens": LENGTH} | options.pop(
        "speculation", {}
    )
    return make_engine(target, head, speculation=speculation, **options)


def assert_as_computed_anew(seen: Sequence[Seen], reference: ReferenceHead) -> None:
    assert seen, "nothing was drafted"
    for one in seen:
        expected = reference.draft(one.token_ids, len(one.drafted), start=one.start)
        assert list(one.drafted) == expected, f"after {len(one.token_ids)} tokens"


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{flag: {flag: True} for flag in FLAGS},
    "all that go together": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "qwen3 layer": {"layer_type": "qwen3"},
    "two layers": {"layers": 2, "norm_before_residual": True},
    "two qwen3 layers": {"layers": 2, "layer_type": "qwen3", "norm_output": True},
    "one layer read": {"layer_ids": (2,)},
    "small vocabulary": {"draft_vocab_size": 100},
    "own embedding": {"has_embedding": True},
    "the target's output rows": {"has_output": False, "draft_vocab_size": 100},
    "older layout": {"older": True, "draft_vocab_size": 100},
}


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_head_computed_anew(zoo: ModelZoo, seen: list[Seen], name: str) -> None:
    target = zoo.target()
    head = zoo.head(target, name.replace(" ", "-"), **HEADS[name])
    for pack in (True, False):
        engine = engine_of(target, head, pack=pack)
        generate(engine, mixed_prompts(5), max_tokens=20, ignore_eos=True)
        assert_idle(engine)
    assert_as_computed_anew(seen, ReferenceHead(head, target))
    assert all(one.start == 1 for one in seen)


def test_layers_that_an_older_head_does_not_name_are_an_early_a_middle_and_a_late_one(
    zoo: ModelZoo, seen: list[Seen]
) -> None:
    target = zoo.deep()
    head = zoo.head(target, "unnamed", older=True, layer_ids=None)
    generate(engine_of(target, head), mixed_prompts(3), max_tokens=12, ignore_eos=True)
    reference = ReferenceHead(head, target)
    assert reference.layer_ids == [2, 3, 4]
    assert_as_computed_anew(seen, reference)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_targets_of_other_families_are_read_alike(zoo: ModelZoo, seen: list[Seen], family: Any) -> None:
    target, head = zoo.target(family), zoo.draft("head", family)
    generate(engine_of(target, head), mixed_prompts(6), max_tokens=20, ignore_eos=True)
    assert_as_computed_anew(seen, ReferenceHead(head, target))


def test_accepted_and_rejected_drafts_are_replaced_by_what_the_target_computed(
    zoo: ModelZoo, seen: list[Seen]
) -> None:
    """Of 16 tokens, a head that only its output layer was fitted of gets some right."""
    target, head = zoo.letters(), zoo.letters("head")
    engine = engine_of(target, head)
    generate(engine, mixed_prompts(12, vocab_size=16), max_tokens=40, ignore_eos=True)
    statistics = engine.statistics()
    assert 0.02 < statistics.accepted_tokens["draft_model"] / statistics.draft_tokens["draft_model"] < 0.98
    assert_as_computed_anew(seen, ReferenceHead(head, target))


@pytest.mark.parametrize("max_batched_tokens", [16, 40])
def test_prompts_read_in_chunks_are_read_whole(
    zoo: ModelZoo, seen: list[Seen], max_batched_tokens: int
) -> None:
    target, head = zoo.target(), zoo.draft("head")
    engine = engine_of(target, head, inference={"max_batched_tokens": max_batched_tokens}, max_running=6)
    prompts = [random_prompt(length, seed=length) for length in (1, 2, 15, 16, 17, 60, 200)]
    generate(engine, prompts, max_tokens=12, ignore_eos=True)
    assert_as_computed_anew(seen, ReferenceHead(head, target))
    assert all(one.start == 1 for one in seen)


@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 64])
def test_drafts_after_a_prefix_hit_are_those_without(zoo: ModelZoo, seen: list[Seen], length: int) -> None:
    target, head = zoo.target(), zoo.draft("head")
    engine = engine_of(target, head)
    prompt = random_prompt(length, seed=length)
    for other in ([], [9], [10, 11]):  # three that go on differently behind the same blocks
        generate(engine, [[*prompt, *other]], max_tokens=20, ignore_eos=True)
    assert engine.statistics().prefix_cache_hits > 0
    assert_as_computed_anew(seen, ReferenceHead(head, target))
    assert all(one.start == 1 for one in seen)


def test_behind_blocks_that_the_head_has_not_read_its_context_begins_later(
    zoo: ModelZoo, seen: list[Seen]
) -> None:
    target, head = zoo.target(), zoo.draft("head")
    engine = engine_of(target, head)
    prompt = random_prompt(70, seed=4)
    generate(engine, [prompt], max_tokens=20, ignore_eos=True, speculation=OFF)
    answer = generate(engine, [[*prompt, 9]], max_tokens=30, ignore_eos=True)[0].token_ids
    assert {one.start for one in seen} == {65}
    # What it has read since is found again: the blocks that it lacks stay out of its context.
    generate(engine, [[*prompt, 9, *answer, 8]], max_tokens=30, ignore_eos=True)
    assert {one.start for one in seen} == {65, 80}
    assert_as_computed_anew(seen, ReferenceHead(head, target))


def test_a_prefix_whose_request_ended_with_a_draft_is_gone_on_from(zoo: ModelZoo, seen: list[Seen]) -> None:
    """At every place in a block: its last hidden states are kept with it, also of a last step."""
    target, head = zoo.letters(), zoo.letters("head")
    engine = engine_of(target, head, num_blocks=64)
    for length in range(1, 36):
        prompt = random_prompt(12, seed=length, vocab_size=16)
        answer = generate(engine, [prompt], max_tokens=length, ignore_eos=True)[0].token_ids
        generate(engine, [[*prompt, *answer, 5]], max_tokens=6, ignore_eos=True)
    assert_as_computed_anew(seen, ReferenceHead(head, target))
    assert all(one.start == 1 for one in seen)


def test_while_other_drafts_stand_the_head_reads_on(zoo: ModelZoo, seen: list[Seen]) -> None:
    """N-grams that repeat for long take its turn, and its context is whole when they end."""
    target, head = zoo.target(), zoo.draft("head")
    engine = engine_of(target, head, speculation={"methods": ("ngram", "draft_model"), "ngram_min": 1})
    bias: dict[str, Any] = {"logit_bias": {7: 100.0, 8: 99.0}, "frequency_penalty": 0.0}
    add(engine, "0", random_prompt(30, seed=1), max_tokens=3 * MAX_KEPT_TOKENS, ignore_eos=True, **bias)
    add(engine, "1", random_prompt(40, seed=2), max_tokens=3 * MAX_KEPT_TOKENS, ignore_eos=True)
    drain(engine)
    assert engine.statistics().accepted_tokens["ngram"] > 2 * MAX_KEPT_TOKENS
    assert all(one.start == 1 for one in seen)


def test_drafts_after_a_preemption_are_those_without(zoo: ModelZoo, seen: list[Seen]) -> None:
    target, head = zoo.target(), zoo.draft("head")
    engine = engine_of(target, head, num_blocks=20, max_context_length=256)
    generate(engine, mixed_prompts(8, longest=60, seed=2), max_tokens=50, ignore_eos=True)
    assert engine.statistics().num_preemptions > 0
    assert_as_computed_anew(seen, ReferenceHead(head, target))


def test_after_steps_without_drafts_the_context_begins_with_what_was_kept(
    zoo: ModelZoo, seen: list[Seen]
) -> None:
    """Three sequences are one too many for drafting, for longer than hidden states are kept."""
    target, head = zoo.target(), zoo.draft("head")
    engine = engine_of(target, head, speculation={"max_batch_size": 2})
    num_tokens = MAX_KEPT_TOKENS + 40
    for index, prompt in enumerate(mixed_prompts(3, seed=3)):
        max_tokens = num_tokens if index else 2 * num_tokens
        add(engine, str(index), prompt, max_tokens=max_tokens, ignore_eos=True)
    drain(engine)
    assert_as_computed_anew(seen, ReferenceHead(head, target))
    first = seen[0]
    # Kept are the newest ones, and those of the last step.
    assert MAX_KEPT_TOKENS <= len(first.token_ids) - first.start <= MAX_KEPT_TOKENS + 1
    assert len({one.start for one in seen if one.token_ids[0] == first.token_ids[0]}) == 1


def test_nothing_is_kept_of_requests_that_are_not_drafted_for(
    zoo: ModelZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[str] = []
    observe = DraftHeadProposer.observe

    def spy(proposer: DraftHeadProposer, request: Any, start: int, hidden_states: Any) -> None:
        observed.append(request.request_id)
        observe(proposer, request, start, hidden_states)

    monkeypatch.setattr(DraftHeadProposer, "observe", spy)
    engine = engine_of(zoo.target(), zoo.draft("head"), speculation={"methods": ("ngram", "draft_model")})
    add(engine, "off", [5, 6, 7], max_tokens=10, speculation=OFF)
    add(engine, "other", [5, 6, 7], max_tokens=10, speculation=SpeculationParams(methods=("ngram",)))
    add(engine, "drafted", [5, 6, 7], max_tokens=10, ignore_eos=True)
    drain(engine)
    assert set(observed) == {"drafted"}
