"""Interleaved measurement: arms take turns within a round, so that drift hits all of them alike."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from arms import Arm, Run, check_lengths
from workload import Workload


@dataclass
class Cell:
    """All runs of one arm on one workload, in the order of the rounds."""

    runs: list[Run] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(run.tokens_per_second for run in self.runs)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        return _spread([run.tokens_per_second for run in self.runs])

    @property
    def step_seconds(self) -> float:
        """The median over runs of a step's time, for arms that tell it."""
        return statistics.median(run.step_seconds for run in self.runs if run.step_seconds is not None)

    @property
    def acceptance(self) -> float | None:
        """Accepted of drafted tokens; None where nothing was drafted."""
        drafted = sum(run.draft_tokens for run in self.runs)
        return sum(run.accepted_tokens for run in self.runs) / drafted if drafted else None

    def ratio_to(self, other: Cell) -> float:
        """The median over rounds of this arm's rate over the other's in the same round."""
        return statistics.median(self._ratios_to(other))

    def ratio_spread(self, other: Cell) -> float:
        """Of that ratio, as `spread`."""
        return _spread(self._ratios_to(other))

    def _ratios_to(self, other: Cell) -> list[float]:
        pairs = zip(self.runs, other.runs, strict=True)
        return [a.tokens_per_second / b.tokens_per_second for a, b in pairs]


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / middle


Table = dict[tuple[str, str], Cell]
"""Cells by the names of arm and workload."""


def measure(
    arms: Sequence[Arm], workloads: Iterable[Workload], *, rounds: int, warm_up_rounds: int = 1
) -> Table:
    """Runs everything `rounds` times after a warm-up that is not counted."""
    table: Table = {}
    for workload in workloads:
        able = [arm for arm in arms if arm.supports(workload)]
        for number in range(warm_up_rounds + rounds):
            # Another one begins each round: what follows a heavy arm is not always the same.
            shift = number % len(able) if able else 0
            for arm in able[shift:] + able[:shift]:
                run = arm.run(workload)
                check_lengths(arm, workload, run)
                if number >= warm_up_rounds:
                    table.setdefault((arm.name, workload.name), Cell()).runs.append(run)
        report_progress(workload, able, table)
    return table


def report_progress(workload: Workload, arms: Sequence[Arm], table: Table) -> None:
    rates = ", ".join(f"{arm.name} {table[arm.name, workload.name].tokens_per_second:.1f}" for arm in arms)
    print(f"  {workload.name}: {rates} tokens/s", file=sys.stderr, flush=True)
