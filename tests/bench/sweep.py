"""The synthetic sweep: what speculation gains or costs at a chosen acceptance, with real draft steps.

Two per cent are looked for, and a machine that is shared drifts by more within a run. So the engines go
abreast here, a step of one after a step of the other: what slows the machine slows them all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from arms import Run, check_lengths
from draftline_server.config import Method
from engine_arms import EngineArm, LoadedPair, make_engine
from measure import Cell, Table, report_progress
from synthetic import SyntheticVerify
from workload import Workload

RATES = (0.0, 0.25, 0.5, 0.75, 1.0)
OFF, FIXED, ADAPTIVE = "off", "fixed", "adaptive"
# An adaptive server has met the workload before; its first steps are what `make test` is about.
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class SweepPoint:
    """One acceptance at one number of streams."""

    rate: float
    workload: Workload
    off: Cell
    fixed: Cell
    adaptive: Cell

    @property
    def adaptive_spread(self) -> float:
        return self.adaptive.ratio_spread(self.off)

    @property
    def fixed_ratio(self) -> float:
        return self.fixed.ratio_to(self.off)

    @property
    def adaptive_ratio(self) -> float:
        return self.adaptive.ratio_to(self.off)


def sweep(
    pair: LoadedPair, workloads: Sequence[Workload], *, rates: Sequence[float], rounds: int
) -> list[SweepPoint]:
    """Measures off, fixed and adaptive at each acceptance and number of streams, interleaved."""
    verify = SyntheticVerify()
    methods: tuple[Method, ...] = ("draft_model",)
    arms = [
        EngineArm(OFF, make_engine(pair, ())),
        EngineArm(FIXED, make_engine(pair, methods, verify=verify)),
        EngineArm(ADAPTIVE, make_engine(pair, methods, adaptive=True, verify=verify)),
    ]
    points = []
    for rate in rates:
        verify.rate = rate
        print(f"acceptance {rate:.2f}", file=sys.stderr)
        table = _measure_abreast(arms, workloads, rounds=rounds)
        points += [
            SweepPoint(rate, workload, *(table[arm.name, workload.name] for arm in arms))
            for workload in workloads
        ]
    for arm in arms:
        arm.close()
    return points


def _measure_abreast(arms: Sequence[EngineArm], workloads: Sequence[Workload], *, rounds: int) -> Table:
    table: Table = {}
    for workload in workloads:
        for number in range(WARM_UP_ROUNDS + rounds):
            for arm, run in _run_abreast(arms, workload):
                check_lengths(arm, workload, run)
                if number >= WARM_UP_ROUNDS:
                    table.setdefault((arm.name, workload.name), Cell()).runs.append(run)
        report_progress(workload, arms, table)
    return table


def _run_abreast(arms: Sequence[EngineArm], workload: Workload) -> list[tuple[EngineArm, Run]]:
    runs = [arm.begin(workload) for arm in arms]
    turns = list(runs)
    while any(not run.is_done for run in runs):
        for run in turns:
            if not run.is_done:
                run.step()
        turns.reverse()  # what comes after a heavy step is not always the same arm's
    return [(arm, run.result()) for arm, run in zip(arms, runs, strict=True)]
