"""A curve says what it was told, something sensible in between, and no single slow step bends it."""

from __future__ import annotations

import random

import pytest

from draftline_server.speculation.step_costs import CostCurve, StepCosts


def make_curve(**points: float) -> CostCurve:
    """A curve with these points, such as ``at_8=0.5``."""
    curve = CostCurve()
    for name, seconds in points.items():
        curve.seed(int(name.removeprefix("at_")), seconds)
    return curve


def test_a_curve_without_a_point_is_empty() -> None:
    curve = CostCurve()
    assert curve.is_empty
    assert curve.estimate(8) == 0.0
    curve.observe(8, 0.5)
    assert not curve.is_empty
    assert (StepCosts().verify.is_empty, StepCosts().draft.is_empty) == (True, True)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        pytest.param(4, 1.0, id="at-a-point"),
        pytest.param(1, 1.0, id="below-all-points"),
        pytest.param(6, 1.5, id="between"),
        pytest.param(8, 2.0, id="at-the-last"),
        pytest.param(16, 4.0, id="beyond-in-proportion"),
    ],
)
def test_estimates(size: int, expected: float) -> None:
    assert make_curve(at_8=2.0, at_4=1.0).estimate(size) == pytest.approx(expected)


def test_seeding_a_point_again_replaces_it() -> None:
    curve = make_curve(at_4=1.0)
    curve.seed(4, 3.0)
    assert curve.estimate(4) == 3.0


def test_a_point_follows_what_is_measured() -> None:
    curve = make_curve(at_4=1.0)
    for _ in range(100):
        curve.observe(4, 1.5)
    assert curve.estimate(4) == pytest.approx(1.5, rel=0.01)
    for _ in range(100):
        curve.observe(4, 0.5)
    assert curve.estimate(4) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("seconds", [60.0, 0.0], ids=["stalled", "immeasurably-fast"])
@pytest.mark.parametrize("size", [4, 6], ids=["known-size", "new-size"])
def test_one_strange_step_hardly_bends_the_curve(size: int, seconds: float) -> None:
    curve = make_curve(at_4=1.0, at_8=1.0)
    curve.observe(size, seconds)
    assert 0.5 <= curve.estimate(size) <= 2.0
    assert curve.estimate(8) == pytest.approx(1.0, rel=0.2)


def test_a_step_too_fast_for_the_clock_still_costs_something() -> None:
    curve = CostCurve()
    curve.observe(4, 0.0)
    assert curve.estimate(4) > 0.0
    curve.seed(8, 0.0)
    assert curve.estimate(8) > 0.0
    for _ in range(400):
        curve.observe(4, 0.01)
    assert curve.estimate(4) == pytest.approx(0.01, rel=0.05)


def test_what_was_measured_on_a_busy_machine_comes_down_everywhere_with_the_real_steps() -> None:
    curve = make_curve(at_1=0.3, at_2=0.3, at_4=0.31, at_8=0.32, at_16=0.4)
    for _ in range(60):
        curve.observe(1, 0.03)
    assert curve.estimate(6) == pytest.approx(0.0315, rel=0.1)
    assert curve.estimate(16) == pytest.approx(0.04, rel=0.1)


def test_a_size_that_no_step_has_had_for_long_costs_what_it_would_now() -> None:
    costs = StepCosts()
    for _ in range(100):
        costs.verify.observe(8, 0.1)
        costs.verify.observe(48, 0.15)
        costs.draft.observe(8, 0.02)
    for _ in range(30):
        costs.verify.observe(48, 0.3)
    assert costs.verify.estimate(8) == pytest.approx(0.2, rel=0.1)
    assert costs.draft.estimate(8) == pytest.approx(0.04, rel=0.1), "it runs on the same machine"


def test_in_a_million_steps_nothing_drifts_away() -> None:
    rng = random.Random(0)
    costs = StepCosts()
    costs.verify.seed(48, 0.15)
    costs.verify.observe(32, 0.12)
    costs.draft.observe(8, 0.02)
    for _ in range(1_000_000):
        costs.verify.observe(8, 0.1 * rng.uniform(0.7, 1.3))
    assert costs.verify.estimate(8) == pytest.approx(0.1, rel=0.2)
    assert costs.verify.estimate(48) == pytest.approx(0.15, rel=0.3)
    assert costs.draft.estimate(8) == pytest.approx(0.02, rel=0.3)


def test_steps_too_fast_for_the_clock_never_cost_nothing() -> None:
    curve = make_curve(at_4=0.1, at_8=0.1)
    for _ in range(10_000):
        curve.observe(4, 0.0)
    assert 0.0 < curve.estimate(4) <= 2 * CostCurve.SHORTEST


def test_what_drafting_takes_says_nothing_of_the_pace() -> None:
    """A probe's first forward may read much that was missed."""
    costs = StepCosts()
    costs.verify.observe(8, 0.1)
    costs.draft.observe(8, 0.02)
    for _ in range(10):
        costs.draft.observe(8, 0.03)
    assert costs.verify.estimate(8) == 0.1


def test_a_size_becomes_dearer_than_the_others_by_its_own_steps_alone() -> None:
    curve = CostCurve()
    for _ in range(20):
        curve.observe(8, 0.1)
        curve.observe(48, 0.15)
    for _ in range(200):
        for _ in range(8):
            curve.observe(48, 0.3)
        curve.observe(8, 0.1)
    assert curve.estimate(48) / curve.estimate(8) == pytest.approx(3.0, rel=0.1)


def test_a_size_that_looked_dearer_than_a_larger_one_was_disturbed() -> None:
    curve = make_curve(at_1=0.1, at_2=0.9, at_4=0.2, at_8=0.5, at_16=0.4)
    curve.smooth()
    assert [curve.estimate(size) for size in (1, 2, 4, 8, 16)] == [0.1, 0.2, 0.2, 0.4, 0.4]


@pytest.mark.parametrize("seed", range(4))
def test_noisy_measurements_of_a_straight_line_give_nearly_that_line(seed: int) -> None:
    rng = random.Random(seed)
    curve = CostCurve()
    for _ in range(4_000):
        size = rng.randint(1, 48)
        curve.observe(size, (0.040 + 0.0005 * size) * rng.uniform(0.9, 1.1))
    for size in range(1, 49):
        assert curve.estimate(size) == pytest.approx(0.040 + 0.0005 * size, rel=0.08)
