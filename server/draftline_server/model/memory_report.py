"""The memory plan for a person: a table, and where it does not fit, what would make it fit.

Every suggestion has been planned with before it is made; alone, it is enough.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from draftline_server.config import Config
from draftline_server.core.byte_size import format_bytes
from draftline_server.errors import MemoryShortageError
from draftline_server.model.cpu_layers import compute_dtype
from draftline_server.model.memory_plan import MemoryBudget, MemoryPlan, check_memory_plan
from draftline_server.model.startup import InspectedModel, InspectedPair, plan_memory

_MIB = 2**20
_GIB = 2**30
_SMALLER_STEPS = (1024, 512, 256)

Row = tuple[str, int, str]
_Model = TypeVar("_Model", bound=InspectedModel)


def describe_plan(plan: MemoryPlan) -> list[str]:
    """A table, one line for each share and each size of a token."""
    rows = [*_weight_rows(plan), *_working_rows(plan), *_pool_rows(plan), *_token_rows(plan)]
    return [f"{name:<24}{format_bytes(size):>12}  {note}".rstrip() for name, size, note in rows]


def describe_shortage(plan: MemoryPlan) -> str | None:
    """By how much the plan is too large; None where it fits, or where nobody knows."""
    try:
        check_memory_plan(plan)
    except MemoryShortageError as error:
        missing = plan.required_bytes - plan.limit_bytes
        if missing <= 0:  # there is memory, but not in the pool
            missing = plan.request_bytes - plan.pool_bytes
        return f"does not fit by {format_bytes(missing)}: {error}"
    return None


def suggest(config: Config, inspected: InspectedPair, plan: MemoryPlan) -> list[str]:
    """What would make a plan fit that does not: each line alone, the smallest change of each key."""
    found: dict[str, str] = {}
    for text, changed, pair, budget in _changes(config, inspected, plan):
        key = text.partition(":")[0]
        if key not in found and describe_shortage(plan_memory(changed, pair, budget)) is None:
            found[key] = text
    return list(found.values())


def _weight_rows(plan: MemoryPlan) -> Iterator[Row]:
    yield "target weights", plan.target.weight_bytes, ""
    if plan.draft is not None:
        yield "draft weights", plan.draft.weight_bytes, ""
        yield "weights of both", plan.target.weight_bytes + plan.draft.weight_bytes, ""
    if plan.extra_weight_bytes:
        yield "repacked weights", plan.extra_weight_bytes, ""


def _working_rows(plan: MemoryPlan) -> Iterator[Row]:
    yield "logits", plan.logits_bytes, ""
    yield "activations", plan.activation_bytes, ""
    if plan.captured_bytes:
        yield "hidden states for draft", plan.captured_bytes, ""
    if plan.process_bytes:
        yield "process", plan.process_bytes, ""


def _pool_rows(plan: MemoryPlan) -> Iterator[Row]:
    requests = plan.num_blocks // plan.request_blocks
    noun = "request" if requests == 1 else "requests"
    length = f"{plan.max_context_length} tokens"
    if plan.budget.is_known:
        note = f"{plan.capacity_tokens} tokens, or {requests} {noun} of {length} at once"
        yield "KV cache pool", plan.pool_bytes, note
        yield "headroom", plan.headroom_bytes, ""
        used = plan.fixed_bytes + plan.pool_bytes
        yield "in all", used, f"of {format_bytes(plan.limit_bytes)} ({_describe_limit(plan)})"
    else:
        yield "one request", plan.request_bytes, f"of {length} in the KV cache"
        yield "at least", plan.required_bytes, f"the memory of the {plan.budget.source} is not known"


def _token_rows(plan: MemoryPlan) -> Iterator[Row]:
    yield "target KV of a token", plan.target.kv_bytes_per_token, ""
    if plan.draft is not None:
        yield "draft KV of a token", plan.draft.kv_bytes_per_token, ""
        yield "KV of a token in both", plan.kv_bytes_per_token, ""


def _describe_limit(plan: MemoryPlan) -> str:
    if plan.limit_bytes == plan.budget.total_bytes:
        return plan.budget.source
    return f"{plan.budget.source}: {format_bytes(plan.budget.total_bytes)}"


def _changes(
    config: Config, inspected: InspectedPair, plan: MemoryPlan
) -> Iterator[tuple[str, Config, InspectedPair, MemoryBudget]]:
    """What may help, from the smallest change to the largest: text, and what to plan with."""
    budget = plan.budget
    tokens = plan.capacity_tokens
    if plan.block_size <= tokens < inspected.max_context_length:
        shorter = dataclasses.replace(inspected, max_context_length=tokens)
        yield f"inference.max_context_length: {tokens} or less", config, shorter, budget
    pool_mib = _pool_mib(plan)
    if pool_mib > 0:
        other = _with(config, "inference", kv_cache_memory=pool_mib * _MIB)
        yield f"inference.kv_cache_memory: {pool_mib}MiB", other, inspected, budget
    least = max(config.max_batch_size, config.num_speculative_tokens + 1)
    for step in _SMALLER_STEPS:
        if least <= step < config.inference.max_batched_tokens:
            smaller = _with(config, "inference", max_batched_tokens=step)
            yield f"inference.max_batched_tokens: {step}", smaller, inspected, budget
    for role, narrower in _narrower(inspected):
        yield f"models.{role}.dtype: bfloat16", config, narrower, budget
    if config.uses_draft_model and "ngram" in config.speculative_decoding.methods:
        alone = _with(config, "speculative_decoding", methods=("ngram",))
        yield "speculative_decoding.methods: [ngram], without the draft model", alone, inspected, budget
    yield from _more_memory(config, inspected, plan)


def _pool_mib(plan: MemoryPlan) -> int:
    """One that holds a request, where the configured pool is too large or too small; 0 for the default."""
    if plan.configured_pool_bytes is None:
        return 0
    left = (plan.limit_bytes - plan.fixed_bytes) // _MIB
    return max(min(left, plan.configured_pool_bytes // _MIB), math.ceil(plan.request_bytes / _MIB))


def _narrower(inspected: InspectedPair) -> Iterator[tuple[str, InspectedPair]]:
    if inspected.target.dtype == torch.float32:
        yield "target_model", dataclasses.replace(inspected, target=_in_bfloat16(inspected.target))
    if inspected.draft is not None and inspected.draft.dtype == torch.float32:
        yield "draft_model", dataclasses.replace(inspected, draft=_in_bfloat16(inspected.draft))


def _in_bfloat16(model: _Model) -> _Model:
    dtype = torch.bfloat16
    return dataclasses.replace(model, dtype=dtype, compute_dtype=compute_dtype(dtype, model.device))


def _more_memory(
    config: Config, inspected: InspectedPair, plan: MemoryPlan
) -> Iterator[tuple[str, Config, InspectedPair, MemoryBudget]]:
    if plan.budget.is_cpu:
        needed, what = plan.required_bytes, "a memory limit of the container"
    else:
        needed, what = math.ceil(plan.required_bytes / config.inference.memory_fraction), "an accelerator"
    gib = math.ceil(needed / _GIB)
    larger = dataclasses.replace(plan.budget, total_bytes=gib * _GIB, available_bytes=gib * _GIB)
    yield f"{what} of {gib}GiB or more", config, inspected, larger


def _with(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
