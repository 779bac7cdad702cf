"""The synthetic sweep: what speculation gains or costs at a chosen acceptance, with real draft steps.

Two per cent are looked for, and a machine that is shared drifts by more within a run. So off and adaptive
go abreast here, a step of one after a step of the other: what slows the machine slows both. With a heavy
step between theirs, the very same steps still took five per cent more or less; so nothing stands between
them, and they run oftener than the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from arms import Run, check_lengths
from draftline_server.config import Method
from engine_arms import EngineArm, LoadedPair, make_engine
from measure import Cell, report_progress
from synthetic import SyntheticVerify
from workload import Workload

RATES = (0.0, 0.25, 0.5, 0.75, 1.0)
OFF, FIXED, ADAPTIVE = "off", "fixed", "adaptive"
# An adaptive server has met the workload before; its first steps are what `make test` is about.
WARM_UP_RUNS = 2
# Of off and adaptive, for each one of fixed.
RUNS_ABREAST = 2


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
        return self.fixed.tokens_per_second / self.off.tokens_per_second

    @property
    def adaptive_ratio(self) -> float:
        return self.adaptive.ratio_to(self.off)


def sweep(
    pair: LoadedPair, workloads: Sequence[Workload], *, rates: Sequence[float], rounds: int
) -> list[SweepPoint]:
    """Measures off, fixed and adaptive at each acceptance and number of streams, interleaved."""
    verify = SyntheticVerify()
    methods: tuple[Method, ...] = ("draft_model",)
    abreast = [
        EngineArm(OFF, make_engine(pair, ())),
        EngineArm(ADAPTIVE, make_engine(pair, methods, adaptive=True, verify=verify)),
    ]
    fixed = EngineArm(FIXED, make_engine(pair, methods, verify=verify))
    points = []
    for rate in rates:
        verify.rate = rate
        print(f"acceptance {rate:.2f}", file=sys.stderr)
        for workload in workloads:
            cells = _measure(abreast, fixed, workload, rounds=rounds)
            points.append(SweepPoint(rate, workload, **cells))
    for arm in (*abreast, fixed):
        arm.close()
    return points


def _measure(
    abreast: Sequence[EngineArm], fixed: EngineArm, workload: Workload, *, rounds: int
) -> dict[str, Cell]:
    for _ in range(WARM_UP_RUNS):
        _run_abreast(abreast, workload)
    fixed.run(workload)
    cells = {arm.name: Cell() for arm in (*abreast, fixed)}
    for _ in range(rounds):
        runs = [run for _ in range(RUNS_ABREAST) for run in _run_abreast(abreast, workload)]
        for arm, run in (*runs, (fixed, fixed.run(workload))):
            check_lengths(arm, workload, run)
            cells[arm.name].runs.append(run)
    report_progress(
        workload, (*abreast, fixed), {(name, workload.name): cell for name, cell in cells.items()}
    )
    return cells


def _run_abreast(arms: Sequence[EngineArm], workload: Workload) -> list[tuple[EngineArm, Run]]:
    runs = [arm.begin(workload) for arm in arms]
    turns = list(runs)
    while any(not run.is_done for run in runs):
        for run in turns:
            if not run.is_done:
                run.step()
        turns.reverse()  # what comes after a heavy step is not always the same arm's
    return [(arm, run.result()) for arm, run in zip(arms, runs, strict=True)]
