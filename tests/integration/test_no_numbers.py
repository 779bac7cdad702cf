"""A request whose numbers overflow ends with an error of its own, and leaves nothing to the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline_server.engine import Engine
from draftline_server.errors import InternalError
from draftline_server.model.runner import SequenceInput
from support.engines import add, drain, generate, make_engine
from support.guarantees import assert_idle, guarded
from support.prompts import random_prompt
from support.reference import ReferenceOf
from support.tiny_models import FAMILIES, Family, make_tiny_model
from support.zoo import ModelZoo

CURSED = 77
"""A token of a prompt for which the target's logits are no numbers."""


def curse(engine: Engine) -> None:
    runner = engine._parts.target
    forward = runner.forward

    def cursed(inputs: Sequence[SequenceInput]) -> Tensor:
        logits = forward(inputs).clone()
        first = 0
        for item in inputs:
            if item.start == 0 and CURSED in item.token_ids:
                logits[first : first + item.num_logits] = math.nan
            first += item.num_logits
        return logits

    runner.forward = cursed  # type: ignore[method-assign]


def fill(engine: Engine, value: float) -> None:
    """What is in a cache that others have used."""
    for runner in filter(None, (engine._parts.target, engine._parts.draft)):
        runner.cache.keys.fill_(value)
        runner.cache.values.fill_(value)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 3}], ids=str)
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_request_without_numbers_ends_and_the_others_go_on(
    zoo: ModelZoo, sampling: dict[str, Any], logprobs: int | None
) -> None:
    engine = make_engine(
        zoo.target(),
        zoo.draft("self"),
        speculation={"methods": ("draft_model",), "num_speculative_tokens": 3},
    )
    curse(engine)
    good = [5, 6, 7, 8]
    with guarded(engine):
        alone = generate(engine, [good], max_tokens=12, **sampling)[0] if sampling.get("seed") else None
        add(engine, "bad", [5, 6, CURSED], max_tokens=12, logprobs=logprobs, **sampling)
        add(engine, "good", good, max_tokens=12, ignore_eos=True, logprobs=logprobs, **sampling)
        completions = drain(engine)
        assert isinstance(completions["bad"].error, InternalError)
        assert "no numbers" in str(completions["bad"].error)
        assert completions["bad"].token_ids == []
        assert len(completions["good"].token_ids) == 12
        if alone is not None and alone.summary is not None and len(alone.token_ids) == 12:
            assert completions["good"].token_ids == alone.token_ids
    assert_idle(engine)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("has_kernels", [True, False])
def test_what_the_last_owner_of_a_block_left_in_it_changes_nothing(
    zoo: ModelZoo,
    reference_of: ReferenceOf,
    monkeypatch: pytest.MonkeyPatch,
    family: Family,
    has_kernels: bool,
) -> None:
    if not has_kernels:
        monkeypatch.setattr("draftline_server.model.attention.usable_kernels", lambda *_, **__: None)
        monkeypatch.setattr("draftline_server.model.runner.usable_kernels", lambda *_, **__: None)
    engine = make_engine(
        zoo.target(family),
        zoo.draft("noised", family),
        num_blocks=64,
        speculation={"methods": ("draft_model",), "num_speculative_tokens": 4},
    )
    fill(engine, math.nan)
    reference = reference_of(zoo.target(family))
    prompts = [random_prompt(length, seed=length) for length in (3, 17, 40, 90)]  # long ones go by themselves
    for completion, prompt in zip(generate(engine, prompts, max_tokens=20), prompts, strict=True):
        assert completion.token_ids == reference.greedy(prompt, 20)


def test_what_others_hold_at_the_same_time_changes_nothing(
    zoo: ModelZoo, reference_of: ReferenceOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of several lengths attend in one batch, the shorter ones padded."""
    monkeypatch.setattr("draftline_server.model.runner.usable_kernels", lambda *_, **__: None)
    engine = make_engine(zoo.target(), num_blocks=64)
    add(engine, "first", random_prompt(20, seed=1), max_tokens=30, ignore_eos=True)
    engine.step()
    (first,) = engine._scheduler.running
    for block_id in first.block_table:
        engine._parts.target.cache.keys[:, block_id] = math.nan
        engine._parts.target.cache.values[:, block_id] = math.nan
    prompts = {f"other-{length}": random_prompt(length, seed=length) for length in (5, 20, 37)}
    for request_id, prompt in prompts.items():
        add(engine, request_id, prompt, max_tokens=20)
    completions = drain(engine)
    assert isinstance(completions["first"].error, InternalError)
    reference = reference_of(zoo.target())
    for request_id, prompt in prompts.items():
        assert completions[request_id].token_ids == reference.greedy(prompt, 20)


def test_a_draft_without_numbers_costs_its_drafts_and_nothing_else(tmp_path: Path, zoo: ModelZoo) -> None:
    draft = make_tiny_model(tmp_path / "draft", "llama", seed=9)
    engine = make_engine(
        zoo.target(), draft, speculation={"methods": ("draft_model",), "num_speculative_tokens": 4}
    )
    plain = make_engine(zoo.target())
    assert engine._parts.draft is not None
    forward = engine._parts.draft.forward
    engine._parts.draft.forward = lambda inputs: torch.full_like(forward(inputs), math.nan)  # type: ignore[method-assign]
    prompts = [random_prompt(length, seed=length) for length in (4, 9)]
    samplings: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 5})
    for sampling in samplings:
        drafted = generate(engine, prompts, max_tokens=16, **sampling)
        for ours, theirs in zip(drafted, generate(plain, prompts, max_tokens=16, **sampling), strict=True):
            assert ours.token_ids == theirs.token_ids
    for completion in generate(engine, prompts, max_tokens=40, temperature=1.0, ignore_eos=True):
        assert len(completion.token_ids) == 40
        assert len(set(completion.token_ids)) > 5, "not one token again and again"
