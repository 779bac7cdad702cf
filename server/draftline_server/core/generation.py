"""The values that cross the engine's border: a request in, deltas and one summary out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from draftline_server.core.sampling_params import SamplingParams, SpeculationParams
from draftline_server.errors import RequestError


class FinishReason(Enum):
    """Why a request's generation ended by itself."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One admitted call. Times are seconds on the engine's monotonic clock."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = 0
    arrival_time: float = 0.0
    deadline: float | None = None
    """When the request ends with `DeadlineError`, wherever it is."""
    queue_deadline: float | None = None
    """When the request ends with `DeadlineError` if it never ran."""
    num_truncated_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one output token, of the target's unprocessed logits."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), best first."""


@dataclass(slots=True)
class SpeculationStats:
    """Counts of one request or of a whole server; see the proto for the identities."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_tokens_per_position: list[int] = field(default_factory=list)
    decode_steps: int = 0

    @classmethod
    def of_positions(cls, number: int) -> Self:
        """Nothing counted yet, with a count for each of so many positions."""
        return cls(accepted_tokens_per_position=[0] * number)

    def record(self, *, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Adds one verified draft."""
        self.drafts += 1
        self.draft_tokens += num_draft_tokens
        self.accepted_tokens += num_accepted_tokens
        missing = num_accepted_tokens - len(self.accepted_tokens_per_position)
        self.accepted_tokens_per_position.extend([0] * missing)
        for position in range(num_accepted_tokens):
            self.accepted_tokens_per_position[position] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSummary:
    """The outcome of a request that ended by itself. Durations are seconds."""

    request_id: str
    finish_reason: FinishReason
    matched_stop: int | str | None
    """The token id or the string that ended generation."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_truncated_prompt_tokens: int
    queue_seconds: float
    time_to_first_token_seconds: float
    end_to_end_seconds: float
    speculation: SpeculationStats


@dataclass(frozen=True, slots=True)
class GenerationDelta:
    """What one step added to one request. The last one has either a summary or an error."""

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    summary: GenerationSummary | None = None
    error: RequestError | None = None

    @property
    def is_final(self) -> bool:
        return self.summary is not None or self.error is not None
