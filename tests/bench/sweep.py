"""The synthetic sweep: what speculation gains or costs at a chosen acceptance, with real draft steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from draftline_server.config import Method
from engine_arms import EngineArm, LoadedPair, make_engine
from measure import Cell, measure
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
        table = measure(arms, workloads, rounds=rounds, warm_up_rounds=WARM_UP_ROUNDS)
        points += [
            SweepPoint(rate, workload, *(table[arm.name, workload.name] for arm in arms))
            for workload in workloads
        ]
    for arm in arms:
        arm.close()
    return points
