"""Counts what the engine did since its start. `EngineStatistics` is its frozen picture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from draftline_server.core.generation import SpeculationStats


@dataclass(slots=True)
class Tally:
    """Cumulative counts, and the sizes of the last step."""

    by_proposer: dict[str, SpeculationStats]
    """Of each proposer that there is, from the start on: one that appears later hides its first rise."""
    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    last_batch_size: int = 0
    last_batch_tokens: int = 0
    last_draft_length: float = 0.0

    @classmethod
    def of(cls, proposers: Iterable[str], *, max_draft_tokens: int) -> Self:
        """Nothing counted yet; drafts have at most so many positions."""
        return cls({name: SpeculationStats.of_positions(max_draft_tokens) for name in proposers})
