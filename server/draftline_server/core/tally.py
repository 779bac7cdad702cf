"""Counts what the engine did since its start. `EngineStatistics` is its frozen picture."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from draftline_server.core.generation import SpeculationStats


@dataclass(slots=True)
class Tally:
    """Cumulative counts, and the sizes of the last step."""

    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    last_batch_size: int = 0
    last_batch_tokens: int = 0
    last_draft_length: float = 0.0
    by_proposer: defaultdict[str, SpeculationStats] = field(
        default_factory=lambda: defaultdict(SpeculationStats)
    )
