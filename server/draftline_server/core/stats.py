"""A frozen picture of the engine after a step, for metrics and status.

Counters are cumulative since the start; readers divide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatistics:
    """Everything that leaves the engine but text. Durations are seconds."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage_ratio: float = 0.0
    """Share of the pool held by running requests; blocks that only the prefix cache holds are free."""
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Prompt tokens found there."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: Mapping[str, int] = field(default_factory=dict)
    """By proposer, as the three below."""
    draft_tokens: Mapping[str, int] = field(default_factory=dict)
    accepted_tokens: Mapping[str, int] = field(default_factory=dict)
    accepted_tokens_per_position: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    speculation_active: bool = False
    speculation_speedup: float = 1.0
    """Measured output tokens per second with speculation over those without; 1 where unknown."""
    draft_length: float = 0.0
    """Mean over the sequences of the last decode step."""
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    """Times that speculation was switched off, by reason."""
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    last_batch_size: int = 0
    last_batch_tokens: int = 0
