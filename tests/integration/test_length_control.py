"""Speculation is off where it does not pay and on again where it does, through the whole engine.

Time is a fake clock that each forward is charged to, so nothing here depends on the machine.
"""

from __future__ import annotations

import pytest

from draftline_server.speculation.proposer_switch import MAX_PROBE_INTERVAL, STEPS_BEFORE_OFF
from draftline_server.speculation.step_costs import StepCosts
from support.engines import add, drain, generate, make_engine
from support.function_models import letters, make_function_engine
from support.guarantees import assert_idle
from support.workloads import (
    PREDICTABLE,
    REPETITIVE,
    UNPREDICTABLE,
    Workload,
    target_seconds,
)
from support.zoo import ModelZoo

# Drafts before anything may be judged, poor steps in a row, and as many again for the estimates to fall.
STEPS_UNTIL_OFF = 4 * STEPS_BEFORE_OFF
# The longest wait for a probe, and as much again for the shorter ones that follow a success.
STEPS_UNTIL_ON = 2 * MAX_PROBE_INTERVAL


@pytest.mark.parametrize("streams", [1, 8])
def test_an_unrelated_draft_is_soon_off_and_on_again_when_the_workload_turns_predictable(
    streams: int,
) -> None:
    workload = Workload(streams)
    plain_rate = streams / target_seconds(streams)
    assert workload.is_on
    for _ in range(2):
        workload.steps_until(UNPREDICTABLE, is_on=False, at_most=STEPS_UNTIL_OFF + workload.request_length)
        workload.step(UNPREDICTABLE, 400)
        workload.steps_until(UNPREDICTABLE, is_on=False, at_most=STEPS_UNTIL_OFF)
        workload.steps_until(PREDICTABLE, is_on=True, at_most=STEPS_UNTIL_ON + workload.request_length)
        # Most of five drafts stand, for what they cost.
        assert workload.rate(PREDICTABLE, 300) > 1.5 * plain_rate
        assert workload.is_on
        assert workload.engine.statistics().speculation_speedup > 1.5
    assert workload.engine.statistics().fallbacks["predicted_slower"] >= 2


@pytest.mark.parametrize("streams", [1, 4])
def test_it_takes_few_steps_to_notice_from_the_start(streams: int) -> None:
    workload = Workload(streams)
    assert workload.steps_until(UNPREDICTABLE, is_on=False, at_most=STEPS_UNTIL_OFF) > 0
    # New requests, so that none of the old kind is left over.
    assert workload.steps_until(PREDICTABLE, is_on=True, at_most=STEPS_UNTIL_ON) > 0


@pytest.mark.parametrize("methods", [("ngram",), ("ngram", "draft_model")], ids="+".join)
def test_ngram_drafts_come_back_when_a_text_begins_to_repeat(methods: tuple[str, ...]) -> None:
    # One-token matches, so that there is always a draft, and in this text nearly always a wrong one.
    workload = Workload(4, methods=methods, speculation={"ngram_min": 1})
    workload.steps_until(UNPREDICTABLE, is_on=False, at_most=20 * STEPS_UNTIL_OFF)
    workload.step(UNPREDICTABLE, 200)
    workload.step(REPETITIVE, workload.request_length)
    workload.steps_until(REPETITIVE, is_on=True, at_most=STEPS_UNTIL_ON)
    assert workload.rate(REPETITIVE, 200) > 2 * 4 / target_seconds(4)


def test_useless_drafts_cost_next_to_nothing_in_the_long_run() -> None:
    for streams in (1, 4):
        workload = Workload(streams)
        rate = workload.rate(UNPREDICTABLE, 2000)
        assert rate > 0.98 * streams / target_seconds(streams)


def test_off_is_exactly_the_plain_path() -> None:
    workload = Workload(4)
    workload.steps_until(UNPREDICTABLE, is_on=False, at_most=STEPS_UNTIL_OFF)
    num_probes = 0
    for _ in range(500):
        forwards, now = workload.num_draft_forwards, workload.clock.now
        workload.step(UNPREDICTABLE)
        statistics = workload.engine.statistics()
        if statistics.draft_length > 0:
            num_probes += 1
            continue
        # The draft model is not run at all, not even to keep its cache up; only the target's time passes.
        assert workload.num_draft_forwards == forwards
        seconds = workload.clock.now - now
        assert seconds == pytest.approx(target_seconds(statistics.last_batch_tokens))
    assert 1 <= num_probes <= 15


def test_the_text_is_the_same_whatever_the_controller_decides() -> None:
    """Off, on, probing and at every length: compared with an engine that never drafts."""
    workload = Workload(3)
    plain = Workload(3, speculation={"num_speculative_tokens": 0})
    outputs: list[list[tuple[int, ...]]] = []
    for each in (workload, plain):
        texts = []
        for kind in (UNPREDICTABLE, PREDICTABLE, UNPREDICTABLE, REPETITIVE):
            for batch in range(3):
                prompts = [[kind, 5 + 3 * batch + index] for index in range(3)]
                completions = generate(each.engine, prompts, max_tokens=150, ignore_eos=True)
                texts += [tuple(completion.token_ids) for completion in completions]
        outputs.append(texts)
        assert_idle(each.engine)
    assert outputs[0] == outputs[1]
    assert workload.engine.statistics().fallbacks["predicted_slower"] >= 1


def test_a_batch_above_the_configured_size_decodes_without_drafts() -> None:
    workload = Workload(4, speculation={"max_batch_size": 3})
    workload.step(PREDICTABLE, 40)
    assert sum(workload.engine.statistics().draft_tokens.values()) == 0
    small = Workload(3, speculation={"max_batch_size": 3})
    small.step(PREDICTABLE, 40)
    assert sum(small.engine.statistics().draft_tokens.values()) > 0


def test_a_minimum_acceptance_rate_switches_off_what_would_still_pay() -> None:
    """A draft that is right two times out of three pays at these costs; this user wants nine of ten."""

    def sometimes_right(prefix: tuple[int, ...]) -> int:
        from support.workloads import draft, target

        return target(prefix) if len(prefix) % 3 else draft((UNPREDICTABLE, *prefix[1:]))

    without = Workload(4, draft=sometimes_right)
    without.step(PREDICTABLE, 200)
    assert without.is_on
    workload = Workload(4, draft=sometimes_right, speculation={"min_acceptance_rate": 0.9})
    workload.steps_until(PREDICTABLE, is_on=False, at_most=4 * STEPS_UNTIL_OFF)
    assert workload.engine.statistics().fallbacks == {"acceptance": 1}


@pytest.mark.parametrize("num_speculative_tokens", [5, 8])
def test_a_warm_up_teaches_nothing_but_costs(zoo: ModelZoo, num_speculative_tokens: int) -> None:
    engine = make_engine(
        zoo.target(),
        zoo.draft("unrelated"),
        speculation={
            "num_speculative_tokens": num_speculative_tokens,
            "adaptive": True,
            "fallback_to_standard_decoding": True,
        },
    )
    controller = engine._parts.controller
    untaught = state_of(controller)
    engine.warm_up()
    assert state_of(controller) == untaught
    assert not controller.costs.verify.is_empty
    assert not controller.costs.draft.is_empty
    assert engine.statistics().speculation_active
    assert engine.statistics().fallbacks == {}


def state_of(value: object) -> object:
    """All that an object holds, costs left out, as values that compare by content."""
    if isinstance(value, StepCosts):
        return None
    if isinstance(value, dict):
        return {key: state_of(item) for key, item in value.items()}
    return state_of(vars(value)) if hasattr(value, "__dict__") else value


def test_statistics_keep_their_identities_through_all_of_it() -> None:
    workload = Workload(4, methods=("ngram", "draft_model"), speculation={"ngram_min": 1})
    for kind in (UNPREDICTABLE, PREDICTABLE, REPETITIVE, UNPREDICTABLE):
        workload.step(kind, 150)
        statistics = workload.engine.statistics()
        for proposer, accepted in statistics.accepted_tokens.items():
            per_position = statistics.accepted_tokens_per_position[proposer]
            assert sum(per_position) == accepted <= statistics.draft_tokens[proposer]
            assert list(per_position) == sorted(per_position, reverse=True)
            assert statistics.drafts[proposer] >= max(per_position, default=0)
        assert statistics.generation_tokens == workload.num_tokens
        assert 0.0 <= statistics.draft_length <= 5.0


def test_what_a_draft_model_has_missed_is_read_within_the_token_budget() -> None:
    """Of nine requests none is drafted for; when one ends, eight have all of their prompts to catch up on."""
    budget = 256
    read: list[int] = []
    engine = make_function_engine(
        lambda prefix: len(prefix) % 300,
        lambda prefix: len(prefix) % 300,
        decode=letters,
        max_batched_tokens=budget,
        speculation={"methods": ("draft_model",), "num_speculative_tokens": 3, "max_batch_size": 8},
        charge_draft=read.append,
    )
    for index in range(9):
        add(engine, f"r{index}", [index + 1] * 200, max_tokens=4 if index == 0 else 40, ignore_eos=True)
    completions = drain(engine)
    assert all(len(c.token_ids) == (4 if name == "r0" else 40) for name, c in completions.items())
    assert sum(read) > 8 * 200, "they were drafted for"
    assert max(read) <= budget
