"""The plan as a table."""

from __future__ import annotations

import dataclasses

from draftline_server.model.memory_plan import MemoryBudget, MemoryPlan, ModelMemory
from draftline_server.model.memory_report import describe_plan, describe_shortage

GIB = 2**30
KIB = 2**10

PLAN = MemoryPlan(
    budget=MemoryBudget(is_cpu=True, total_bytes=80 * GIB, available_bytes=80 * GIB, source="the machine"),
    limit_bytes=80 * GIB,
    target=ModelMemory(weight_bytes=15 * GIB, kv_bytes_per_token=128 * KIB),
    draft=ModelMemory(weight_bytes=2 * GIB, kv_bytes_per_token=32 * KIB),
    extra_weight_bytes=GIB,
    logits_bytes=GIB // 2,
    activation_bytes=GIB // 4,
    process_bytes=GIB // 4,
    block_size=16,
    num_blocks=2048,
    configured_pool_bytes=None,
    max_context_length=8192,
)


def test_the_table_names_every_share() -> None:
    assert describe_plan(PLAN) == [
        "target weights             15.00 GiB",
        "draft weights               2.00 GiB",
        "weights of both            17.00 GiB",
        "repacked weights            1.00 GiB",
        "logits                    512.00 MiB",
        "activations               256.00 MiB",
        "process                   256.00 MiB",
        "KV cache pool               5.00 GiB  32768 tokens, or 4 requests of 8192 tokens at once",
        "headroom                   56.00 GiB",
        "in all                     24.00 GiB  of 80.00 GiB (the machine)",
        "target KV of a token      128.00 KiB",
        "draft KV of a token        32.00 KiB",
        "KV of a token in both     160.00 KiB",
    ]
    assert describe_shortage(PLAN) is None


def test_what_a_part_of_the_accelerator_is_says_so() -> None:
    budget = dataclasses.replace(PLAN.budget, is_cpu=False, source="the accelerator")
    lines = describe_plan(dataclasses.replace(PLAN, budget=budget, limit_bytes=72 * GIB))
    assert "in all                     24.00 GiB  of 72.00 GiB (the accelerator: 80.00 GiB)" in lines


def test_without_a_known_memory_the_table_says_what_is_needed() -> None:
    budget = MemoryBudget(
        is_cpu=False, total_bytes=0, available_bytes=0, source="accelerator", is_known=False
    )
    plan = dataclasses.replace(PLAN, budget=budget, limit_bytes=0, num_blocks=0)
    lines = describe_plan(plan)
    assert "one request                 1.25 GiB  of 8192 tokens in the KV cache" in lines
    assert "at least                   20.25 GiB  the memory of the accelerator is not known" in lines
    assert not [line for line in lines if line.startswith("headroom")]
    assert describe_shortage(plan) is None


def test_a_shortage_is_counted() -> None:
    plan = dataclasses.replace(PLAN, limit_bytes=20 * GIB, num_blocks=0)
    assert str(describe_shortage(plan)).startswith(
        "does not fit by 256.00 MiB: inference.max_context_length: "
    )
    plan = dataclasses.replace(PLAN, limit_bytes=10 * GIB, num_blocks=0)
    assert str(describe_shortage(plan)).startswith("does not fit by 10.25 GiB: models: ")
