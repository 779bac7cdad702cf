"""How the memory is shared out: weights, working memory and, with what is left, the KV cache pool.

Pure arithmetic over facts, configuration and what `device` measured, so that preflight can plan for a GPU
that it does not have. The pool is sized once, at start-up; running out of it later preempts.

On CUDA the pool is what `inference.memory_fraction` of the GPU's memory leaves after both models' weights
and the reserves. On a CPU, where the memory is the container's and nothing else may touch it, the pool is
a tenth of the limit, at most 4 GiB, and at most what the running requests could fill twice over; but never
less than one request of the longest context takes.
`inference.kv_cache_memory` fixes it on both.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from draftline_server.config import Config
from draftline_server.core.byte_size import format_bytes
from draftline_server.errors import MemoryShortageError
from draftline_server.model.architecture import ModelFacts
from draftline_server.model.attention import MAX_CAPPED_QUERIES
from draftline_server.model.hidden_states import MAX_KEPT_TOKENS
from draftline_server.model.sampling import MAX_NOISE

_CPU_POOL_SHARE = 10
_CPU_POOL_BYTES = 4 * 2**30
_CPU_POOL_REUSE = 2
"""How many times over the running requests could fill the default pool of a CPU: the rest is prefix cache."""
_CPU_PROCESS_BYTES = 512 * 2**20
"""The interpreter and the libraries."""
_LOGITS_COPIES = 5
"""Of a row, in float32 and at once: logits, the same before penalties, what filters look at, and the
probabilities of target and draft."""
_NOISE_BYTES = 20
"""Of each of the `MAX_NOISE` numbers, while they are made."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model and the size of its numbers in memory; on a CPU they may be wider than configured."""

    facts: ModelFacts
    weight_dtype_bytes: int
    compute_dtype_bytes: int
    """Of activations and cache."""
    captured_size: int = 0
    """Numbers that a draft head reads of each of the target's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """One model's share."""

    weight_bytes: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The memory that a plan may use. `source` is for messages."""

    is_cpu: bool
    total_bytes: int
    available_bytes: int
    source: str
    is_known: bool = True
    """False for a device whose memory nobody knows: the plan says what is needed and is not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The sizes that the engine allocates. All bytes, except where a name says otherwise."""

    budget: MemoryBudget
    limit_bytes: int
    """What this process may use of the budget."""
    target: ModelMemory
    draft: ModelMemory | None
    """None where no draft model is run."""
    extra_weight_bytes: int
    """Copies of weights, such as repacked ones."""
    logits_bytes: int
    activation_bytes: int
    process_bytes: int
    block_size: int
    num_blocks: int
    """Of the pool; each has room in the caches of both models."""
    configured_pool_bytes: int | None
    """The pool's size where `inference.kv_cache_memory` fixes it."""
    max_context_length: int
    captured_bytes: int = 0
    """The target's hidden states that wait for a draft head."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Of both models: a block has room in both caches."""
        return self.target.kv_bytes_per_token + (self.draft.kv_bytes_per_token if self.draft else 0)

    @property
    def block_bytes(self) -> int:
        return self.kv_bytes_per_token * self.block_size

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def capacity_tokens(self) -> int:
        """Tokens that requests can keep in the pool at once."""
        return self.num_blocks * self.block_size

    @property
    def fixed_bytes(self) -> int:
        """All but the pool."""
        weights = self.target.weight_bytes + (self.draft.weight_bytes if self.draft else 0)
        working = self.logits_bytes + self.activation_bytes + self.captured_bytes + self.process_bytes
        return weights + self.extra_weight_bytes + working

    @property
    def request_bytes(self) -> int:
        """What one request of the longest context takes in the pool."""
        return self.request_blocks * self.block_bytes

    @property
    def request_blocks(self) -> int:
        return math.ceil(self.max_context_length / self.block_size)

    @property
    def required_bytes(self) -> int:
        """The least that serves one request of the longest context, with a pool of the configured size."""
        return self.fixed_bytes + max(self.request_bytes, self.configured_pool_bytes or 0)

    @property
    def headroom_bytes(self) -> int:
        """What nothing uses; negative by as much as the plan is too large."""
        return self.limit_bytes - self.fixed_bytes - self.pool_bytes


def compute_memory_plan(
    config: Config,
    *,
    budget: MemoryBudget,
    max_context_length: int,
    target: PlannedModel,
    draft: PlannedModel | None = None,
    extra_weight_bytes: int = 0,
) -> MemoryPlan:
    """The plan, whether or not it fits: `check_memory_plan` judges that.

    `draft` is None where none is run. The pool is empty where nothing is left for it.
    """
    models = [target] if draft is None else [target, draft]
    limit_bytes = budget.available_bytes
    if not budget.is_cpu:
        share = int(config.inference.memory_fraction * budget.total_bytes)
        limit_bytes = min(share, budget.available_bytes)
    empty = MemoryPlan(
        budget=budget,
        limit_bytes=limit_bytes,
        target=_model_memory(target, config.inference.block_size),
        draft=_model_memory(draft, config.inference.block_size) if draft else None,
        extra_weight_bytes=extra_weight_bytes,
        logits_bytes=_logits_bytes(config, vocab_size=max(model.facts.vocab_size for model in models)),
        activation_bytes=max(_activation_bytes(config, model.facts, max_context_length) for model in models),
        captured_bytes=_captured_bytes(config, draft) if draft else 0,
        process_bytes=_CPU_PROCESS_BYTES if budget.is_cpu else 0,
        block_size=config.inference.block_size,
        num_blocks=0,
        configured_pool_bytes=config.inference.kv_cache_memory,
        max_context_length=max_context_length,
    )
    return dataclasses.replace(empty, num_blocks=_choose_pool_bytes(config, empty) // empty.block_bytes)


def check_memory_plan(plan: MemoryPlan) -> None:
    """Raises `MemoryShortageError` where the models do not fit or the pool cannot hold one request."""
    if not plan.budget.is_known:
        return
    limit = f"{format_bytes(plan.limit_bytes)} ({plan.budget.source})"
    left = plan.limit_bytes - plan.fixed_bytes
    if left <= 0:
        raise MemoryShortageError(
            f"models: weights and working memory need {format_bytes(plan.fixed_bytes)}, there are {limit}"
        )
    pool_bytes = plan.configured_pool_bytes
    if pool_bytes is not None and pool_bytes > left:
        raise MemoryShortageError(
            f"inference.kv_cache_memory: {format_bytes(pool_bytes)} do not fit; weights and working memory "
            f"leave {format_bytes(left)} of {limit}"
        )
    if plan.num_blocks >= plan.request_blocks:
        return
    request = f"one request of {plan.max_context_length} tokens needs {format_bytes(plan.request_bytes)}"
    if pool_bytes is None:
        raise MemoryShortageError(
            f"inference.max_context_length: {request} of KV cache; weights and working memory leave "
            f"{format_bytes(left)} of {limit}"
        )
    raise MemoryShortageError(
        f"inference.kv_cache_memory: the pool of {format_bytes(pool_bytes)} is too small, {request}; raise "
        "it or lower inference.max_context_length"
    )


def _model_memory(model: PlannedModel, block_size: int) -> ModelMemory:
    # A head keeps with each block what it needs to go on behind it.
    kept_bytes = math.ceil(model.captured_size * model.compute_dtype_bytes / block_size)
    return ModelMemory(
        weight_bytes=model.facts.num_parameters * model.weight_dtype_bytes,
        kv_bytes_per_token=model.facts.kv_bytes_per_token(model.compute_dtype_bytes) + kept_bytes,
    )


def _captured_bytes(config: Config, draft: PlannedModel) -> int:
    """Hidden states of a step, twice while they are sorted by request, and those kept of each request."""
    num_tokens = 2 * config.inference.max_batched_tokens + config.max_running * MAX_KEPT_TOKENS
    return num_tokens * draft.captured_size * draft.compute_dtype_bytes


def _logits_bytes(config: Config, *, vocab_size: int) -> int:
    """Of the step with most rows: as many as may speculate verify k + 1 each, others end their prefill."""
    batch = config.max_batch_size
    speculating = min(config.speculative_decoding.max_batch_size, batch)
    rows = min(batch + speculating * config.num_speculative_tokens, config.inference.max_batched_tokens)
    return rows * vocab_size * 4 * _LOGITS_COPIES + MAX_NOISE * _NOISE_BYTES


def _activation_bytes(config: Config, facts: ModelFacts, max_context_length: int) -> int:
    """The peak inside one layer at a full token budget: residual, attention and MLP, each with copies.

    Counted in float32, which norms and softmax compute in whatever the dtype.
    """
    attention_width = (2 * facts.num_attention_heads + 2 * facts.num_kv_heads) * facts.head_dim
    width = 6 * facts.hidden_size + 2 * attention_width + 3 * facts.intermediate_size
    layer_bytes = config.inference.max_batched_tokens * width * 4
    return layer_bytes + _score_bytes(config, facts, max_context_length)


def _score_bytes(config: Config, facts: ModelFacts, max_context_length: int) -> int:
    """Capped scores and their softmax; others are never held as a whole."""
    if not facts.has_capped_scores:
        return 0
    num_queries = max(MAX_CAPPED_QUERIES, config.max_running)
    return 2 * num_queries * facts.num_attention_heads * max_context_length * 4


def _choose_pool_bytes(config: Config, plan: MemoryPlan) -> int:
    left = max(plan.limit_bytes - plan.fixed_bytes, 0)
    if plan.configured_pool_bytes is not None:
        return plan.configured_pool_bytes
    if not plan.budget.is_cpu:
        return left
    useful = config.server.max_concurrent_requests * plan.request_blocks * _CPU_POOL_REUSE
    share = min(plan.limit_bytes // _CPU_POOL_SHARE, _CPU_POOL_BYTES)
    return min(max(share, plan.request_bytes), left, useful * plan.block_bytes)
