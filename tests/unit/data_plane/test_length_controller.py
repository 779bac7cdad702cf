"""Lengths that pay, off soon where nothing pays, back on when it does, and never much slower than plain.

Most tests run the controller against a machine with known costs and requests with known acceptance; both
are random only as far as their seed goes.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from draftline_server.core.request import Request
from draftline_server.speculation.chain import Offer
from draftline_server.speculation.length_controller import (
    DRAFT_MODEL,
    MIN_OBSERVED_DRAFTS,
    OFF_BELOW,
    ON_ABOVE,
    PASSED_OVER,
    Choice,
    ControllerSettings,
    LengthController,
)
from draftline_server.speculation.proposer_switch import (
    LONG_STAY,
    MAX_PROBE_INTERVAL,
    MIN_PROBE_INTERVAL,
    STEPS_BEFORE_OFF,
    ProposerSwitch,
)
from draftline_server.speculation.step_costs import StepCosts
from support.requests import make_request

Seconds = Callable[[int], float]
Acceptance = Callable[[int, int], float]
"""Probability that a draft token is accepted where all before it were, by step and index of the request."""

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def cpu(num_tokens: int) -> float:
    """A verification that costs more with its tokens, but much less than in proportion."""
    return 0.040 + 0.0008 * num_tokens


def seeded_costs(verify: Seconds, draft: Seconds) -> StepCosts:
    costs = StepCosts()
    for size in SIZES:
        costs.verify.seed(size, verify(size))
        costs.draft.seed(size, draft(size))
    return costs


def lengths_of(choices: Mapping[str, Choice]) -> dict[str, int]:
    return {name: choice.length for name, choice in choices.items()}


def make_offer(request: Request, proposer: str, max_length: int, kind: str | None = None) -> Offer:
    return Offer(request, proposer, max_length, kind or proposer)


def settings(**changes: Any) -> ControllerSettings:
    return ControllerSettings(**({"num_speculative_tokens": 5, "max_batch_size": 8} | changes))


@dataclass
class Machine:
    """A server whose requests, costs and acceptance are made up."""

    verify: Seconds
    draft: Seconds
    acceptance: Acceptance
    batch_size: int = 8
    proposer: str = DRAFT_MODEL
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds_are_off_by: float = 1.0
    noise: float = 0.05
    catches_up: bool = False
    """Whether a draft costs also what the draft model missed since the last one."""
    mean_life: int | None = 100
    paces: tuple[float, ...] = (1.0,)
    """By how much all takes longer, each for `steps_per_pace` steps, in turn."""
    steps_per_pace: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        costs = seeded_costs(lambda n: self.verify(n) * self.seeds_are_off_by, self.draft)
        self.controller = LengthController(settings(**self.options), costs, proposers=[self.proposer])
        self.num_requests = 0
        self.requests = [self._new_request() for _ in range(self.batch_size)]
        self.last_drafted = dict.fromkeys((r.request_id for r in self.requests), -1)
        self.was_active: list[bool] = []
        self.lengths: list[dict[str, int]] = []
        self.seconds: list[float] = []
        self.output_tokens: list[int] = []

    def run(self, num_steps: int) -> float:
        """Steps; returns the speed-up over decoding the same without drafts."""
        for _ in range(num_steps):
            self._step()
        return self.speedup(num_steps)

    def speedup(self, num_steps: int) -> float:
        """Of the last steps, over plain ones at the same pace."""
        steps = range(len(self.seconds) - num_steps, len(self.seconds))
        plain_seconds = self.verify(self.batch_size) / self.batch_size
        saved = sum(self.output_tokens[step] * plain_seconds * self._pace(step) for step in steps)
        return saved / sum(self.seconds[step] for step in steps)

    def best_fixed_speedup(self, acceptance: float) -> float:
        """Of the best length that is the same for all requests, where all have this acceptance."""
        batch_size = self.batch_size
        return max(
            sum(acceptance**j for j in range(length + 1))
            * self.verify(batch_size)
            / (self.verify(batch_size * (length + 1)) + length * self.draft(batch_size))
            for length in range(6)
        )

    def _new_request(self) -> Request:
        self.num_requests += 1
        return make_request(f"r{self.num_requests}", max_tokens=10**9)

    def _step(self) -> None:
        controller, step = self.controller, len(self.seconds)
        offers: list[Offer] = []
        if self.proposer in controller.usable(self.batch_size):
            offers = [make_offer(r, self.proposer, 5) for r in self.requests]
        lengths = lengths_of(controller.choose(offers, self.batch_size))
        num_output_tokens = 0
        for index, request in enumerate(self.requests):
            num_output_tokens += 1 + self._verify(request, index, lengths.get(request.request_id, 0))
        self._time(lengths, num_output_tokens)
        self.was_active.append(controller.is_active)
        self.lengths.append(lengths)
        self._renew(step)

    def _verify(self, request: Request, index: int, length: int) -> int:
        accepted = 0
        while accepted < length and self.rng.random() < self.acceptance(len(self.seconds), index):
            accepted += 1
        if length > 0:
            self.controller.observe_draft(
                request.request_id, self.proposer, num_draft_tokens=length, num_accepted_tokens=accepted
            )
        return accepted

    def _time(self, lengths: Mapping[str, int], num_output_tokens: int) -> None:
        draft_seconds = 0.0
        if lengths and self.proposer == DRAFT_MODEL:
            draft_seconds = max(lengths.values()) * self.draft(len(lengths)) * self._jitter()
            if self.catches_up:
                missed = (len(self.seconds) - self.last_drafted[name] - 1 for name in lengths)
                draft_seconds += self.draft(1) * 0.1 * sum(missed)
        self.last_drafted.update(dict.fromkeys(lengths, len(self.seconds)))
        verify_seconds = self.verify(self.batch_size + sum(lengths.values())) * self._jitter()
        self.controller.observe_step(
            batch_size=self.batch_size,
            draft_lengths=[(self.proposer, length) for length in lengths.values()],
            num_output_tokens=num_output_tokens,
            draft_seconds=draft_seconds,
            verify_seconds=verify_seconds,
        )
        self.seconds.append(draft_seconds + verify_seconds)
        self.output_tokens.append(num_output_tokens)

    def _renew(self, step: int) -> None:
        for index, request in enumerate(self.requests):
            if self.mean_life is not None and self.rng.random() < 1.0 / self.mean_life:
                self.controller.acceptance.forget(request.request_id)
                self.requests[index] = self._new_request()
                self.last_drafted[self.requests[index].request_id] = step

    def _jitter(self) -> float:
        return self.rng.uniform(1.0 - self.noise, 1.0 + self.noise) * self._pace(len(self.seconds))

    def _pace(self, step: int) -> float:
        return self.paces[step // self.steps_per_pace % len(self.paces)]


def constant(acceptance: float) -> Acceptance:
    return lambda _step, _index: acceptance


def draft_of(share: float) -> Seconds:
    """A draft forward that costs this share of a plain step, whatever its size."""
    return lambda _size: share * cpu(8)


# ---------------------------------------------------------------------------------------- one choice


def goodput(
    controller: LengthController, offers: list[Offer], lengths: Mapping[str, int], batch_size: int
) -> float:
    """Expected tokens per second, straight from the definition."""
    expected = float(batch_size)
    depth = 0
    for offer in offers:
        length = lengths.get(offer.request.request_id, 0)
        expected += sum(controller.acceptance.survivals(offer.request.request_id, offer.proposer, length))
        if offer.proposer == DRAFT_MODEL:
            depth = max(depth, length)
    costs = controller.costs
    num_tokens = batch_size + sum(lengths.values())
    return expected / (costs.verify.estimate(num_tokens) + depth * costs.draft.estimate(batch_size))


def random_situation(rng: random.Random) -> tuple[LengthController, list[Offer]]:
    """A controller with a history, and up to three offers."""
    level, slope, share = rng.uniform(0.01, 0.05), rng.uniform(0.0, 0.005), rng.uniform(0.0, 0.5)
    costs = seeded_costs(
        lambda n: (level + slope * n) * rng.uniform(0.95, 1.05), lambda n: share * (level + slope * n)
    )
    controller = LengthController(settings(), costs)
    offers = [
        make_offer(make_request(f"r{i}"), rng.choice(["ngram", DRAFT_MODEL]), rng.randint(1, 3))
        for i in range(rng.randint(1, 3))
    ]
    for offer in offers:
        for _ in range(rng.randint(0, 12)):
            drafted = rng.randint(1, 4)
            controller.observe_draft(
                offer.request.request_id,
                offer.proposer,
                num_draft_tokens=drafted,
                num_accepted_tokens=rng.randint(0, drafted),
            )
    return controller, offers


@pytest.mark.parametrize("seed", range(5))
def test_the_lengths_chosen_have_the_highest_goodput_of_all_possible_ones(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        controller, offers = random_situation(rng)
        batch_size = len(offers) + rng.randint(0, 2)
        names = [o.request.request_id for o in offers]
        possible = (
            dict(zip(names, lengths, strict=True))
            for lengths in itertools.product(*[range(o.max_length + 1) for o in offers])
        )
        best = max(goodput(controller, offers, lengths, batch_size) for lengths in possible)
        chosen = lengths_of(controller.choose(offers, batch_size))
        if best > goodput(controller, offers, {}, batch_size):
            assert goodput(controller, offers, chosen, batch_size) == pytest.approx(best)
        else:
            assert set(chosen.values()) <= {1}, "where nothing pays, what is drafted is only to make sure"
        assert all(chosen.get(o.request.request_id, 0) <= o.max_length for o in offers)


def test_without_measured_costs_drafts_are_as_long_as_offered() -> None:
    controller = LengthController(settings())
    offers = [make_offer(make_request("a"), "ngram", 5), make_offer(make_request("b"), DRAFT_MODEL, 2)]
    assert lengths_of(controller.choose(offers, 2)) == {"a": 5, "b": 2}


def test_no_offers_give_no_lengths() -> None:
    assert LengthController(settings()).choose([], 3) == {}


def test_a_predictable_request_gets_a_longer_draft_than_one_that_is_not() -> None:
    machine = Machine(cpu, draft_of(0.02), lambda _, index: 0.95 if index < 4 else 0.05, mean_life=None)
    machine.run(300)
    easy, hard = (
        [sum(lengths.get(r.request_id, 0) for r in part) / 4 for lengths in machine.lengths[-100:]]
        for part in (machine.requests[:4], machine.requests[4:])
    )
    assert sum(easy) / 100 > 4.0
    assert sum(hard) / 100 < 1.0


def test_a_draft_model_that_costs_too_much_leaves_drafts_to_the_ngrams() -> None:
    controller = LengthController(settings(), seeded_costs(cpu, draft_of(0.9)))
    offers = [make_offer(make_request("a"), "ngram", 3), make_offer(make_request("b"), DRAFT_MODEL, 3)]
    chosen = lengths_of(controller.choose(offers, 2))
    assert chosen["a"] == 3
    assert chosen.get("b", 0) == 0


def test_lengths_never_depend_on_the_tokens_at_hand() -> None:
    chosen = []
    for token in (1, 9):
        controller = LengthController(settings(), seeded_costs(cpu, draft_of(0.1)))
        request = make_request(prompt=[token] * 7)
        for _ in range(5):
            controller.observe_draft("r", DRAFT_MODEL, num_draft_tokens=3, num_accepted_tokens=2)
        chosen.append(controller.choose([make_offer(request, DRAFT_MODEL, 5)], 1))
    assert chosen[0] == chosen[1]


# ---------------------------------------------------------------------------------------- in the long run


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("acceptance", [0.6, 0.8, 0.95])
def test_drafts_that_pay_come_within_a_few_percent_of_the_best_fixed_length(
    acceptance: float, share: float
) -> None:
    machine = Machine(cpu, draft_of(share), constant(acceptance))
    machine.run(350)
    assert machine.speedup(250) >= 0.95 * machine.best_fixed_speedup(acceptance)


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("share", [0.1, 0.5, 3.0])
@pytest.mark.parametrize("acceptance", [0.0, 0.4, 0.9])
def test_serving_is_never_much_slower_than_without_drafts(
    acceptance: float, share: float, batch_size: int
) -> None:
    machine = Machine(cpu, draft_of(share), constant(acceptance), batch_size=batch_size)
    machine.run(500)
    assert machine.speedup(450) >= 0.97


@pytest.mark.parametrize("steps_per_pace", [7, 40])
@pytest.mark.parametrize(
    ("batch_size", "share", "acceptance"), [(8, 0.15, 0.5), (8, 0.5, 0.9), (32, 0.25, 0.75), (32, 0.24, 1.0)]
)
def test_drafts_that_all_but_pay_cost_little_where_the_machine_changes_its_pace(
    batch_size: int, share: float, acceptance: float, steps_per_pace: int
) -> None:
    """And what steps with drafts are compared with was measured at another one. Costs are a small model's."""
    seconds = [0.0, 0.0]
    for seed in range(8):
        rng = random.Random(seed)
        machine = Machine(
            lambda n: 0.020 + 0.00175 * n,
            lambda _: share * (0.020 + 0.00175 * batch_size),
            constant(acceptance),
            batch_size=batch_size,
            noise=0.08,
            mean_life=60,
            options={"max_batch_size": 64},
            paces=tuple(rng.uniform(1.0, 1.7) for _ in range(100)),
            steps_per_pace=steps_per_pace,
            seed=seed,
        )
        machine.run(60)
        speedup = machine.run(240)
        seconds[0] += sum(machine.seconds[-240:])
        seconds[1] += sum(machine.seconds[-240:]) * speedup
        assert speedup >= 0.95, f"seed {seed}"
    assert seconds[1] / seconds[0] >= 0.985


@pytest.mark.parametrize(("batch_size", "share"), [(1, 0.3), (8, 0.1)])
def test_steps_with_drafts_that_become_dearer_are_not_taken_for_a_slower_machine_for_long(
    batch_size: int, share: float
) -> None:
    dearer = 1.0
    machine = Machine(
        lambda n: (0.020 + 0.00175 * n) * (dearer if n > batch_size else 1.0),
        lambda _: share * (0.020 + 0.00175 * batch_size),
        constant(0.75),
        batch_size=batch_size,
        noise=0.08,
    )
    machine.run(400)
    assert machine.controller.is_active
    dearer = 1.8
    machine.run(300)
    assert not all(machine.was_active[400:])


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("batch_size", [1, 8])
def test_an_unrelated_draft_is_switched_off_within_a_few_steps(batch_size: int, share: float) -> None:
    machine = Machine(cpu, draft_of(share), constant(0.01), batch_size=batch_size)
    machine.run(MIN_OBSERVED_DRAFTS + STEPS_BEFORE_OFF)
    assert not machine.controller.is_active
    assert machine.controller.fallbacks == {"predicted_slower": 1}
    assert machine.controller.speedup == 1.0


def test_a_draft_that_cannot_pay_even_by_the_first_guess_is_off_and_not_on_with_nothing() -> None:
    machine = Machine(cpu, draft_of(2.0), constant(0.9))
    machine.run(STEPS_BEFORE_OFF)
    assert not machine.controller.is_active
    assert not any(machine.lengths)


def test_while_off_nearly_all_steps_do_not_even_look_for_drafts() -> None:
    machine = Machine(cpu, draft_of(0.2), constant(0.0))
    machine.run(2_000)
    looked = sum(bool(lengths) for lengths in machine.lengths[100:])
    assert 1_900 // MAX_PROBE_INTERVAL <= looked <= 12


@pytest.mark.parametrize(
    ("batch_size", "share", "acceptance"),
    [
        pytest.param(1, 0.1, 0.7, id="one-request"),
        pytest.param(8, 0.1, 0.7, id="batch"),
        pytest.param(8, 0.3, 0.9, id="costly-but-good"),
    ],
)
def test_speculation_comes_back_when_the_workload_turns_predictable(
    batch_size: int, share: float, acceptance: float
) -> None:
    machine = Machine(
        cpu,
        draft_of(share),
        lambda step, _: 0.02 if step < 1_000 else acceptance,
        batch_size=batch_size,
        catches_up=True,
    )
    machine.run(1_000)
    assert not machine.controller.is_active
    machine.run(700)
    assert any(machine.was_active[1_000:])
    machine.run(200)
    assert machine.speedup(200) >= 0.93 * machine.best_fixed_speedup(acceptance)


def test_long_drafts_come_back_after_a_time_of_short_ones() -> None:
    machine = Machine(cpu, draft_of(0.1), lambda step, _: 0.45 if step < 400 else 0.97)
    machine.run(300)
    assert machine.controller.is_active
    machine.run(300)
    assert machine.speedup(200) >= 0.95 * machine.best_fixed_speedup(0.97)


def test_good_times_that_end_are_noticed() -> None:
    machine = Machine(cpu, draft_of(0.3), lambda step, _: 0.9 if step < 300 else 0.05)
    machine.run(300)
    assert machine.controller.is_active
    machine.run(60)
    assert not machine.controller.is_active


@pytest.mark.parametrize("seed", range(2))
def test_a_workload_on_the_border_does_not_make_it_flap(seed: int) -> None:
    # By definition neither state is wrong there; what costs is to change it.
    machine = Machine(cpu, draft_of(0.3), constant(0.48), seed=seed)
    speedup = machine.run(1_000)
    changes = sum(a != b for a, b in itertools.pairwise(machine.was_active))
    assert changes <= 10
    assert speedup >= 0.97


def test_a_switch_that_is_soon_off_again_waits_longer_each_time_until_it_stays_on() -> None:
    switch = ProposerSwitch(is_on=True)

    def steps_until_probe_after(num_steps_on: int) -> int:
        for _ in range(num_steps_on):
            switch.note(is_poor=True)
        switch.turn_off(batch_size=1)
        num_steps = 1
        while not switch.count_down(1):
            num_steps += 1
        switch.turn_on()
        return num_steps

    first = MIN_PROBE_INTERVAL
    waits = [steps_until_probe_after(STEPS_BEFORE_OFF) for _ in range(8)]
    assert waits == [first, *(first * 2**n for n in (1, 2, 3, 4, 5, 5, 5))]
    assert steps_until_probe_after(LONG_STAY) == first


@pytest.mark.parametrize(
    ("batch_size", "waits"), [(32, True), (9, True), (100, True), (8, False), (1, False), (128, False)]
)
def test_with_another_number_of_sequences_a_switch_has_another_chance(
    batch_size: int, *, waits: bool
) -> None:
    switch = ProposerSwitch(is_on=True)
    for _ in range(8):  # on for too short a time, again and again
        switch.turn_on()
        switch.turn_off(batch_size=32)
    assert not any(switch.count_down(32) for _ in range(MIN_PROBE_INTERVAL))
    num_steps = 1
    while not switch.count_down(batch_size):
        num_steps += 1
    assert (num_steps > 10 * MIN_PROBE_INTERVAL) is waits
    assert waits or num_steps == MIN_PROBE_INTERVAL


@pytest.mark.parametrize(("num_missed", "goes_on"), [(10, True), (3_000, False)])
def test_a_draft_model_comes_back_only_where_it_earns_what_it_has_to_read_first(
    num_missed: int, *, goes_on: bool
) -> None:
    # Each accepted token adds an eighth to a step; reading a token that was missed costs a 200th of it.
    costs = seeded_costs(lambda _: 0.04, lambda size: 0.0002 * size)
    controller = LengthController(settings(), costs, proposers=[DRAFT_MODEL])
    controller.switch_off()
    request = make_request("r", range(num_missed))
    for _ in range(MIN_OBSERVED_DRAFTS):
        controller.observe_draft("r", DRAFT_MODEL, num_draft_tokens=1, num_accepted_tokens=1)
    for _ in range(2 * MAX_PROBE_INTERVAL):
        offers = [make_offer(request, DRAFT_MODEL, 1)] if controller.usable(8) else []
        controller.choose(offers, 8)
    assert controller.is_active is goes_on


@pytest.mark.parametrize("starts_active", [True, False], ids=["on", "off"])
def test_between_the_two_thresholds_it_stays_as_it_is(*, starts_active: bool) -> None:
    # Drafts that cost nothing, for one request of eight: the promise is what they add.
    promise = (OFF_BELOW + ON_ABOVE) / 2
    costs = seeded_costs(lambda _: 0.05, lambda _: 0.0)
    controller = LengthController(settings(), costs, proposers=["ngram"])
    num_drafts = 0

    def verify(name: str) -> None:
        nonlocal num_drafts
        rate = 8 * (promise - 1.0)
        was_accepted = int((num_drafts + 1) * rate) > int(num_drafts * rate)
        num_drafts += 1
        controller.observe_draft(name, "ngram", num_draft_tokens=1, num_accepted_tokens=int(was_accepted))

    for _ in range(100):
        verify("a")
    if not starts_active:
        controller.switch_off()
    for _ in range(1_000):
        offers = [make_offer(make_request("a"), "ngram", 1)] if controller.usable(8) else []
        for name in controller.choose(offers, 8):
            verify(name)
        assert controller.is_active is starts_active


def test_single_slow_steps_do_not_switch_off_what_pays() -> None:
    machine = Machine(cpu, draft_of(0.1), constant(0.85), noise=0.3)
    for _ in range(10):
        machine.run(60)
        machine.controller.observe_step(
            batch_size=8,
            draft_lengths=[(DRAFT_MODEL, 3)] * 8,
            num_output_tokens=8,
            draft_seconds=3.0,
            verify_seconds=3.0,
        )
    assert all(machine.was_active)


@pytest.mark.parametrize("seeds_are_off_by", [0.7, 1.0, 1.4])
def test_the_stated_speedup_is_the_real_one_however_wrong_the_first_measurement(
    seeds_are_off_by: float,
) -> None:
    machine = Machine(cpu, draft_of(0.1), constant(0.8), seeds_are_off_by=seeds_are_off_by)
    machine.run(800)
    real = machine.speedup(200)
    assert real > 1.4
    assert machine.controller.speedup == pytest.approx(real, rel=0.06)


def test_while_on_a_step_is_plain_now_and_then_so_that_there_is_something_to_compare_with() -> None:
    machine = Machine(cpu, draft_of(0.1), constant(0.8))
    machine.run(500)
    assert all(machine.was_active)
    num_plain = sum(not lengths for lengths in machine.lengths)
    assert 4 <= num_plain <= 15


def test_a_probe_that_has_to_catch_up_does_not_make_the_draft_model_look_dear() -> None:
    machine = Machine(cpu, draft_of(0.1), constant(0.0), catches_up=True)
    machine.run(3_000)
    assert machine.controller.costs.draft.estimate(8) <= 1.2 * machine.draft(8)


def test_a_probe_that_was_dear_and_right_is_followed_by_more_at_once() -> None:
    """Short answers to long prompts: a probe has a prompt to read first, which costs several plain steps."""
    costs = seeded_costs(cpu, lambda num_tokens: 0.012 + 0.0008 * num_tokens)
    controller = LengthController(settings(), costs, proposers=[DRAFT_MODEL])
    controller.switch_off()
    request, first_right = make_request("r0"), 0
    for step in range(6_000):
        if step % 64 == 0:
            request = make_request(f"r{step}", prompt=range(120))
        is_right = step >= 3_000
        offers = [make_offer(request, DRAFT_MODEL, 5)] if controller.usable(1) else []
        choices = controller.choose(offers, 1)
        for request_id, (name, length) in choices.items():
            accepted = length if is_right else 0
            request.draft_len = request.num_tokens
            controller.observe_draft(request_id, name, num_draft_tokens=length, num_accepted_tokens=accepted)
            first_right = first_right or (step if is_right else 0)
        request.token_ids.append(0)
        if is_right and controller.is_active:
            break
    assert 3_000 < first_right < 4_000, "it had to wait for its turn"
    assert step - first_right <= 64


# --------------------------------------------------------------------------------- several proposers


def run_chain(
    controller: LengthController, *, ngram_acceptance: float, model_acceptance: float, num_steps: int
) -> list[Mapping[str, Choice]]:
    """Steps of 8 requests, to all of which both proposers offer something; returns the choices."""
    rng = random.Random(0)
    requests = [make_request(f"r{index}") for index in range(8)]
    rates = {"ngram": ngram_acceptance, DRAFT_MODEL: model_acceptance}
    history = []
    for _ in range(num_steps):
        usable = controller.usable(8)
        offers = [
            make_offer(r, name, 5) for r in requests for name in ("ngram", DRAFT_MODEL) if name in usable
        ]
        choices = controller.choose(offers, 8)
        num_output_tokens = 8
        for request_id, (name, length) in choices.items():
            accepted = next((n for n in range(length) if rng.random() >= rates[name]), length)
            num_output_tokens += accepted
            controller.observe_draft(request_id, name, num_draft_tokens=length, num_accepted_tokens=accepted)
        model_lengths = [c.length for c in choices.values() if c.proposer == DRAFT_MODEL]
        controller.observe_step(
            batch_size=8,
            draft_lengths=list(choices.values()),
            num_output_tokens=num_output_tokens,
            draft_seconds=max(model_lengths, default=0) * draft_of(0.1)(8),
            verify_seconds=cpu(8 + sum(c.length for c in choices.values())),
        )
        history.append(choices)
    return history


def test_ngrams_that_are_wrong_leave_the_requests_to_a_draft_model_that_is_right() -> None:
    controller = LengthController(settings(), seeded_costs(cpu, draft_of(0.1)))
    history = run_chain(controller, ngram_acceptance=0.02, model_acceptance=0.85, num_steps=300)
    assert controller.is_on(DRAFT_MODEL)
    proposers = Counter(choice.proposer for choices in history[-100:] for choice in choices.values())
    assert proposers[DRAFT_MODEL] > 600
    assert proposers["ngram"] < 2 * 8 * 100 / PASSED_OVER
    assert controller.speedup > 1.4


def test_of_two_that_pay_the_better_one_drafts() -> None:
    controller = LengthController(settings(), seeded_costs(cpu, draft_of(0.02)))
    history = run_chain(controller, ngram_acceptance=0.5, model_acceptance=0.9, num_steps=300)
    proposers = Counter(choice.proposer for choices in history[-100:] for choice in choices.values())
    assert proposers[DRAFT_MODEL] > 10 * proposers["ngram"]


def test_a_first_method_that_was_wrong_is_tried_again_and_taken_as_soon_as_it_is_right() -> None:
    """As n-grams are when an answer begins to repeat its prompt. Before, they just about paid."""
    controller = LengthController(settings(), seeded_costs(cpu, draft_of(0.1)))
    run_chain(controller, ngram_acceptance=0.3, model_acceptance=0.7, num_steps=300)
    assert controller.is_on("ngram")
    history = run_chain(controller, ngram_acceptance=1.0, model_acceptance=0.7, num_steps=3 * PASSED_OVER)
    proposers = Counter(choice.proposer for choices in history[-8:] for choice in choices.values())
    assert proposers["ngram"] > 6 * proposers[DRAFT_MODEL]


def test_the_chance_of_a_first_method_waits_for_its_next_offer() -> None:
    """And is not used up by another's."""
    controller = LengthController(settings(), seeded_costs(cpu, draft_of(0.1)))
    request = make_request("r")
    ngram, model = (make_offer(request, name, 5) for name in ("ngram", DRAFT_MODEL))

    rng = random.Random(0)

    def drafts_by(*offers: Offer, acceptance: float = 0.7) -> str:
        for name, length in controller.choose(offers, 1).values():
            rate = acceptance if name == DRAFT_MODEL else 0.3
            accepted = next((n for n in range(length) if rng.random() >= rate), length)
            controller.observe_draft("r", name, num_draft_tokens=length, num_accepted_tokens=accepted)
            return name
        return "plain"

    chances = 0
    for _ in range(8):
        num_passed_over = 0
        while num_passed_over < PASSED_OVER:
            num_passed_over = 0 if drafts_by(ngram, model) == "ngram" else num_passed_over + 1
        drafts_by(model, acceptance=0.0)
        chances += "ngram" in {drafts_by(ngram, model) for _ in range(2)}  # one of both may be plain
    assert chances == 8


def test_kinds_of_drafts_are_told_apart() -> None:
    """Long matches are right and short ones wrong: the model drafts in place of the short ones alone."""
    controller = LengthController(settings(), seeded_costs(cpu, draft_of(0.1)))
    rates = {"long": 0.95, "short": 0.1, DRAFT_MODEL: 0.7}
    rng, request = random.Random(0), make_request("r")
    chosen: dict[str, Counter[str]] = {"long": Counter(), "short": Counter()}
    for step in range(600):
        kind = rng.choice(["long", "short"])
        usable = controller.usable(1)
        offers = [make_offer(request, "ngram", 5, kind), make_offer(request, DRAFT_MODEL, 5)]
        choices = controller.choose([o for o in offers if o.proposer in usable], 1)
        accepted, length = 0, 0
        for request_id, (name, length) in choices.items():
            rate = rates[kind if name == "ngram" else name]
            accepted = next((n for n in range(length) if rng.random() >= rate), length)
            controller.observe_draft(request_id, name, num_draft_tokens=length, num_accepted_tokens=accepted)
            if step >= 300:
                chosen[kind][name] += 1
        is_model = any(choice.proposer == DRAFT_MODEL for choice in choices.values())
        controller.observe_step(
            batch_size=1,
            draft_lengths=list(choices.values()),
            num_output_tokens=1 + accepted,
            draft_seconds=length * draft_of(0.1)(1) if is_model else 0.0,
            verify_seconds=cpu(1 + length),
        )
    assert chosen["long"]["ngram"] > 5 * chosen["long"][DRAFT_MODEL]
    assert chosen["short"][DRAFT_MODEL] > 5 * chosen["short"]["ngram"]


def test_probes_of_two_proposers_that_are_due_together_are_both_made() -> None:
    controller = LengthController(settings(), seeded_costs(cpu, draft_of(0.1)))
    controller.switch_off()
    request = make_request("r")
    probed: Counter[str] = Counter()
    for _ in range(4 * MAX_PROBE_INTERVAL):
        usable = controller.usable(1)
        offers = [make_offer(request, name, 5) for name in ("ngram", DRAFT_MODEL) if name in usable]
        choices = controller.choose(offers, 1)
        for request_id, (name, length) in choices.items():
            probed[name] += 1
            controller.observe_draft(request_id, name, num_draft_tokens=length, num_accepted_tokens=0)
    assert min(probed["ngram"], probed[DRAFT_MODEL]) > 0.7 * max(probed.values()) > 10


def test_a_draft_model_that_is_wrong_is_off_while_ngrams_go_on() -> None:
    controller = LengthController(settings(), seeded_costs(cpu, draft_of(0.1)))
    costs_nothing_more = run_chain(controller, ngram_acceptance=0.8, model_acceptance=0.0, num_steps=300)
    assert controller.is_on("ngram")
    assert {c.proposer for choices in costs_nothing_more for c in choices.values()} == {"ngram"}
    # As soon as it has to show what it can: requests for which there is no n-gram.
    requests = [make_request(f"s{index}") for index in range(8)]
    for _ in range(MIN_OBSERVED_DRAFTS + 2 * STEPS_BEFORE_OFF):
        is_usable = DRAFT_MODEL in controller.usable(8)
        offers = [make_offer(r, DRAFT_MODEL, 5) for r in requests] if is_usable else []
        for request_id, (name, length) in controller.choose(offers, 8).items():
            controller.observe_draft(request_id, name, num_draft_tokens=length, num_accepted_tokens=0)
    assert not controller.is_on(DRAFT_MODEL)
    assert controller.is_on("ngram")
    assert not controller.may_follow(8, has_offers=True), "what is not used need not be kept up"


def test_what_following_costs_has_to_be_earned() -> None:
    def num_drafted(follow_seconds: float) -> int:
        """Of the last 3,000 of 6,000 steps."""
        controller = LengthController(settings(), seeded_costs(cpu, draft_of(0.1)), proposers=[DRAFT_MODEL])
        requests = [make_request(f"r{index}") for index in range(8)]
        num_drafted = 0
        for step in range(6_000):
            offers = [make_offer(r, DRAFT_MODEL, 1) for r in requests] if controller.usable(8) else []
            choices = controller.choose(offers, 8)
            for request_id in choices:
                controller.observe_draft(request_id, DRAFT_MODEL, num_draft_tokens=1, num_accepted_tokens=1)
            controller.observe_follow(follow_seconds)
            controller.observe_step(
                batch_size=8,
                draft_lengths=list(choices.values()),
                num_output_tokens=8 + len(choices),
                draft_seconds=draft_of(0.1)(8) if choices else 0.0,
                verify_seconds=cpu(8 + len(choices)),
            )
            num_drafted += bool(choices) and step >= 3_000
        return num_drafted

    assert num_drafted(0.0) > 2_900
    assert num_drafted(2 * cpu(8)) < 200


# ---------------------------------------------------------------------------------------- the settings


def test_above_its_batch_size_nothing_is_drafted() -> None:
    controller = LengthController(settings(max_batch_size=8))
    assert controller.usable(8) == {"ngram", DRAFT_MODEL}
    assert not controller.usable(9)


def test_a_limit_of_zero_is_off() -> None:
    controller = LengthController(settings(num_speculative_tokens=0))
    assert not controller.is_active
    assert not any(controller.usable(1) for _ in range(2 * MIN_PROBE_INTERVAL))
    assert controller.fallbacks == {}


def test_without_adaption_every_draft_has_the_length_offered() -> None:
    machine = Machine(cpu, draft_of(0.1), constant(0.7), options={"adaptive": False})
    machine.run(100)
    drafted = [lengths for lengths in machine.lengths if lengths]
    assert len(drafted) > 90
    assert all(set(lengths.values()) == {5} for lengths in drafted)


def test_without_adaption_a_useless_draft_is_switched_off_all_the_same() -> None:
    machine = Machine(cpu, draft_of(0.1), constant(0.0), options={"adaptive": False})
    machine.run(40)
    assert not machine.controller.is_active


@pytest.mark.parametrize("adaptive", [True, False])
def test_without_fallback_every_step_drafts_for_every_request(*, adaptive: bool) -> None:
    machine = Machine(
        cpu, draft_of(0.5), constant(0.0), batch_size=3, options={"fallback": False, "adaptive": adaptive}
    )
    machine.run(200)
    assert all(machine.was_active)
    assert all(len(lengths) == 3 for lengths in machine.lengths)
    assert set(machine.lengths[-1].values()) == ({1} if adaptive else {5})
    assert machine.controller.fallbacks == {}


def test_acceptance_below_the_users_minimum_is_a_reason_of_its_own_and_recovers() -> None:
    machine = Machine(
        cpu,
        draft_of(0.02),
        lambda step, _: 0.4 if step < 500 else 0.9,
        options={"min_acceptance_rate": 0.6},
    )
    machine.run(500)
    assert not machine.controller.is_active
    assert machine.controller.fallbacks["acceptance"] >= 1
    machine.run(500)
    assert machine.controller.is_active


def test_a_minimum_that_is_met_changes_nothing() -> None:
    machine = Machine(cpu, draft_of(0.02), constant(0.8), options={"min_acceptance_rate": 0.5})
    machine.run(300)
    assert all(machine.was_active)


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    controller = LengthController(settings())
    for _ in range(50):
        offers = (
            [make_offer(make_request("a"), DRAFT_MODEL, 5)] if DRAFT_MODEL in controller.usable(1) else []
        )
        lengths = lengths_of(controller.choose(offers, 1))
        for name, length in lengths.items():
            controller.observe_draft(name, DRAFT_MODEL, num_draft_tokens=length, num_accepted_tokens=length)
        controller.observe_step(
            batch_size=1,
            draft_lengths=[(DRAFT_MODEL, length) for length in lengths.values()],
            num_output_tokens=1 + sum(lengths.values()),
            draft_seconds=0.0,
            verify_seconds=0.0,
        )
