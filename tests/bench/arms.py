"""The one interface behind which everything that is measured stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workload import Workload


@dataclass(frozen=True)
class Run:
    """One workload, carried out once."""

    seconds: float
    """From the submission of all prompts to the last token of the last one; prefill included."""
    outputs: tuple[tuple[int, ...], ...]
    step_seconds: float | None = None
    """The median over steps, so a decode step's; None where the arm does not tell."""
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Dtype:
    """What an arm other than ours computes in."""

    name: str
    is_native: bool = True
    """Else libraries emulate it, for batches slower by an order of magnitude: only one stream is run."""

    def limit_streams(self, max_streams: int) -> int:
        return max_streams if self.is_native else 1


class Arm(Protocol):
    """One way to decode."""

    @property
    def name(self) -> str: ...

    def supports(self, workload: Workload) -> bool:
        """Whether this arm has a cell in that column."""

    def run(self, workload: Workload) -> Run:
        """Carries out the workload once."""

    def close(self) -> None:
        """Frees what the arm holds."""


def check_lengths(arm: Arm, workload: Workload, run: Run) -> None:
    """Raises where an arm did less or more than it was asked to: its time would mean nothing."""
    lengths = [len(output) for output in run.outputs]
    if lengths != [workload.new_tokens] * workload.num_streams:
        raise RuntimeError(f"{arm.name}, {workload.name}: {lengths} new tokens, {workload.new_tokens} wanted")
