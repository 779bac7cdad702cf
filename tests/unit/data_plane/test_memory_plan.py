"""The arithmetic of the memory plan, for machines from a small container to a large GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from draftline_server.config import Config, parse_config
from draftline_server.errors import MemoryShortageError
from draftline_server.model.architecture import ModelFacts
from draftline_server.model.memory_plan import (
    MemoryBudget,
    MemoryPlan,
    PlannedModel,
    check_memory_plan,
    compute_memory_plan,
)

GIB = 2**30
NOISE = 20 * 2**21
CONTEXT = 4096

# Llama 3.1 8B and a draft of its shape; the numbers are worked out by hand below.
TARGET = ModelFacts(
    model_type="llama",
    architecture="LlamaForCausalLM",
    num_layers=32,
    num_attention_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=131072,
    sliding_windows=(None,) * 32,
    num_parameters=8_000_000_000,
    has_tied_head=False,
    checkpoint_dtype="bfloat16",
    eos_token_ids=(1,),
)
DRAFT = dataclasses.replace(TARGET, num_layers=16, head_dim=64, num_parameters=1_000_000_000)
TARGET_KV = 2 * 32 * 8 * 128 * 2
DRAFT_KV = 2 * 16 * 8 * 64 * 2


def make_config(**sections: dict[str, Any]) -> Config:
    models = {"target_model": {"path": "/t"}, "draft_model": {"path": "/d"}}
    return parse_config({"models": models, **sections})


def make_budget(total: int, *, is_cpu: bool = False, available: int | None = None) -> MemoryBudget:
    return MemoryBudget(
        is_cpu=is_cpu,
        total_bytes=total,
        available_bytes=total if available is None else available,
        source="test",
    )


def make_plan(config: Config, budget: MemoryBudget, **overrides: Any) -> MemoryPlan:
    arguments: dict[str, Any] = {
        "max_context_length": CONTEXT,
        "target": PlannedModel(TARGET, weight_dtype_bytes=2, compute_dtype_bytes=2),
        "draft": PlannedModel(DRAFT, weight_dtype_bytes=2, compute_dtype_bytes=2),
    }
    return compute_memory_plan(config, budget=budget, **(arguments | overrides))


def test_a_gpu_gives_the_pool_what_weights_and_reserves_leave_of_its_share() -> None:
    plan = make_plan(make_config(), make_budget(80 * GIB))
    assert plan.kv_bytes_per_token == TARGET_KV + DRAFT_KV
    # 8 sequences verify 5 + 1 rows each, 24 end their prefill with one.
    assert plan.logits_bytes == 72 * 128256 * 4 * 5 + NOISE
    left = int(0.9 * 80 * GIB) - 18_000_000_000 - plan.logits_bytes - plan.activation_bytes
    assert plan.num_blocks == left // (16 * plan.kv_bytes_per_token)
    assert plan.capacity_tokens == plan.num_blocks * 16
    assert 0 < plan.activation_bytes < GIB


def test_without_a_draft_model_all_of_the_pool_is_the_targets() -> None:
    alone = make_plan(make_config(), make_budget(80 * GIB), draft=None)
    pair = make_plan(make_config(), make_budget(80 * GIB))
    assert alone.draft is None
    assert alone.kv_bytes_per_token == TARGET_KV
    assert alone.num_blocks > pair.num_blocks


def test_memory_that_others_hold_is_not_planned_with() -> None:
    plan = make_plan(make_config(), make_budget(80 * GIB, available=40 * GIB))
    assert plan.limit_bytes == 40 * GIB


def test_a_cpu_may_compute_in_a_wider_dtype_than_its_weights_have() -> None:
    wide = PlannedModel(TARGET, weight_dtype_bytes=2, compute_dtype_bytes=4)
    plan = make_plan(make_config(), make_budget(80 * GIB, is_cpu=True), target=wide, draft=None)
    assert plan.target.weight_bytes == 2 * TARGET.num_parameters
    assert plan.kv_bytes_per_token == 2 * TARGET_KV


def test_repacked_weights_come_off_the_pool() -> None:
    without = make_plan(make_config(), make_budget(80 * GIB))
    copies = make_plan(make_config(), make_budget(80 * GIB), extra_weight_bytes=GIB)
    assert 0 <= without.pool_bytes - copies.pool_bytes - GIB < without.block_bytes


@pytest.mark.parametrize("is_cpu", [False, True])
def test_the_configured_size_fixes_the_pool(is_cpu: bool) -> None:
    config = make_config(inference={"kv_cache_memory": "2GiB"})
    plan = make_plan(config, make_budget(80 * GIB, is_cpu=is_cpu))
    assert plan.num_blocks == 2 * GIB // plan.block_bytes


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        pytest.param(30 * GIB, 3 * GIB, id="a-tenth"),
        pytest.param(500 * GIB, 4 * GIB, id="at-most-4-GiB"),
    ],
)
def test_a_cpu_gives_the_pool_a_modest_share(total: int, expected: int) -> None:
    plan = make_plan(make_config(), make_budget(total, is_cpu=True))
    assert 0 <= expected - plan.pool_bytes < plan.block_bytes


def test_a_cpu_has_room_for_one_request_of_the_longest_context_where_that_fits() -> None:
    plan = make_plan(make_config(), make_budget(30 * GIB, is_cpu=True), max_context_length=32768)
    assert plan.request_bytes == 5 * GIB > 3 * GIB
    assert plan.pool_bytes == plan.request_bytes
    check_memory_plan(plan)


def test_a_small_model_on_a_cpu_gets_no_more_than_its_requests_can_fill_twice() -> None:
    tiny = dataclasses.replace(TARGET, num_layers=1, num_kv_heads=1, head_dim=8, num_parameters=1000)
    planned = PlannedModel(tiny, weight_dtype_bytes=4, compute_dtype_bytes=4)
    config = make_config(server={"max_concurrent_requests": 3})
    plan = make_plan(
        config, make_budget(500 * GIB, is_cpu=True), target=planned, draft=None, max_context_length=100
    )
    assert plan.num_blocks == 2 * 3 * 7


def test_capped_scores_are_counted_for_a_slice_of_queries_over_the_whole_context() -> None:
    capped = dataclasses.replace(TARGET, has_capped_scores=True)
    planned = PlannedModel(capped, weight_dtype_bytes=2, compute_dtype_bytes=2)
    plain = make_plan(make_config(), make_budget(80 * GIB))
    plan = make_plan(make_config(), make_budget(80 * GIB), target=planned)
    # Scores and their softmax, of 128 queries with 32 heads.
    assert plan.activation_bytes - plain.activation_bytes == 2 * 128 * 32 * CONTEXT * 4


def test_logits_rows_never_exceed_the_token_budget() -> None:
    config = make_config(
        inference={"max_batched_tokens": 64, "max_batch_size": 32},
        speculative_decoding={"max_batch_size": 32, "num_speculative_tokens": 8},
    )
    assert make_plan(config, make_budget(80 * GIB)).logits_bytes == 64 * 128256 * 4 * 5 + NOISE


@pytest.mark.parametrize(
    ("config", "budget", "overrides", "message"),
    [
        pytest.param(
            make_config(),
            make_budget(16 * GIB),
            {},
            "models: weights and working memory need 17.65 GiB, there are 14.40 GiB",
            id="weights-do-not-fit",
        ),
        pytest.param(
            make_config(inference={"kv_cache_memory": "70GiB"}),
            make_budget(80 * GIB),
            {},
            "inference.kv_cache_memory: 70.00 GiB do not fit; weights and working memory leave 5",
            id="fixed-pool-does-not-fit",
        ),
        pytest.param(
            make_config(inference={"kv_cache_memory": "512MiB"}),
            make_budget(80 * GIB),
            {},
            "inference.kv_cache_memory: the pool of 512.00 MiB is too small, one request of 4096 tokens "
            "needs 640.00 MiB; raise it or lower inference.max_context_length",
            id="fixed-pool-too-small-for-one-request",
        ),
        pytest.param(
            make_config(),
            make_budget(30 * GIB, is_cpu=True),
            {"max_context_length": 131072},
            "inference.max_context_length: one request of 131072 tokens needs 20.00 GiB of KV cache; weights "
            "and working memory leave 11.85 GiB of 30.00 GiB (test)",
            id="one-request-does-not-fit",
        ),
    ],
)
def test_a_plan_that_cannot_work_says_both_numbers_and_the_key(
    config: Config, budget: MemoryBudget, overrides: dict[str, Any], message: str
) -> None:
    plan = make_plan(config, budget, **overrides)
    with pytest.raises(MemoryShortageError) as caught:
        check_memory_plan(plan)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
