"""Where our kernels cannot be had (no compiler, no AVX2) oneDNN and torch compute the same output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftline_server.engine import Engine
from draftline_server.model import cpu_kernels, cpu_layers
from draftline_server.model.cpu_layers import KernelLinear, KernelRmsNorm, OneDnnLinear
from draftline_server.model.loader import load_model
from support.engines import CPU, generate, make_engine
from support.guarantees import assert_idle
from support.prompts import mixed_prompts, random_prompt
from support.reference import Reference, ReferenceOf
from support.tiny_models import FAMILIES, Family, make_tiny_model, noised_clone
from support.zoo import NOISE_SCALE, ModelZoo

pytestmark = pytest.mark.usefixtures("fixed_randomness")

NEW_TOKENS = 20


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernels, "load", lambda: None)


def assert_output_is_that_of(reference: Reference, engine: Engine) -> None:
    # One of them is long enough for a prefill in chunks.
    prompts = [*mixed_prompts(8), random_prompt(150, seed=150)]
    completions = generate(engine, prompts, max_tokens=NEW_TOKENS)
    assert [c.token_ids for c in completions] == [reference.greedy(p, NEW_TOKENS) for p in prompts]
    statistics = engine.statistics()
    drafted, accepted = (
        sum(counts.values()) for counts in (statistics.draft_tokens, statistics.accepted_tokens)
    )
    assert drafted / 10 < accepted < drafted
    assert_idle(engine)


def chain_engine(target: Path, draft: Path, dtype: torch.dtype) -> Engine:
    return make_engine(
        target,
        draft,
        dtype=dtype,
        inference={"max_batched_tokens": 64},
        speculation={"methods": ("ngram", "draft_model"), "num_speculative_tokens": 4},
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_transformers(
    zoo: ModelZoo, reference_of: ReferenceOf, family: Family
) -> None:
    target = zoo.target(family)
    engine = chain_engine(target, zoo.draft("noised", family), torch.float32)
    assert_output_is_that_of(reference_of(target), engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_weights_are_widened_where_the_cpu_has_no_such_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Family
) -> None:
    monkeypatch.setattr(cpu_layers, "has_native_bfloat16", lambda: False)
    target = make_tiny_model(tmp_path / "target", family, dtype=torch.bfloat16)
    draft = noised_clone(target, tmp_path / "draft", scale=NOISE_SCALE)
    engine = chain_engine(target, draft, torch.bfloat16)
    assert_output_is_that_of(Reference(target), engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_are_those_of_onednn(zoo: ModelZoo, dtype: torch.dtype) -> None:
    kinds = {type(module) for module in load_model(zoo.target(), dtype=dtype, device=CPU).modules()}
    assert OneDnnLinear in kinds
    assert not kinds & {KernelLinear, KernelRmsNorm, torch.nn.Linear}
