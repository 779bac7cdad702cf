"""Requests that end early, at any moment and for any reason, leave nothing behind."""

from __future__ import annotations

import random

import pytest

from draftline_server.core.admission import admit
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams
from draftline_server.engine import Engine
from draftline_server.errors import CancelledError, DeadlineError
from support.driving import Session
from support.engines import add, drain, generate, make_engine
from support.function_models import FakeClock, letters, make_function_engine
from support.guarantees import assert_idle, guarded
from support.prompts import random_prompt
from support.reference import Reference
from support.zoo import ModelZoo

pytestmark = pytest.mark.usefixtures("fixed_randomness")

CONTEXT = 128
GONE = CancelledError("the client went away")


def engine_of(zoo: ModelZoo, clock: FakeClock) -> Engine:
    """Little memory and a small budget, so that there are queues, chunks and preemptions to cancel in."""
    return make_engine(
        zoo.target(),
        zoo.draft("noised"),
        num_blocks=14,
        max_running=8,
        max_context_length=CONTEXT,
        inference={"max_batched_tokens": 48},
        speculation={"methods": ("ngram", "draft_model"), "num_speculative_tokens": 4},
        clock=clock,
    )


def storm(engine: Engine, clock: FakeClock, *, num_requests: int, seed: int = 1) -> Session:
    """Requests arrive, are cancelled, run out of time or finish, all at random; a step takes one second."""
    source = random.Random(seed)
    session = Session(engine)
    num_added = num_cancelled = 0
    while num_added < num_requests or engine.has_work:
        for _ in range(source.choice([0, 0, 1, 3])):
            if num_added < num_requests:
                prompt = random_prompt(source.choice([1, 5, 20, 33, 90]), seed=source.randrange(6))
                session.add(
                    str(num_added),
                    prompt,
                    max_tokens=source.choice([1, 4, 20, 35]),
                    ignore_eos=True,
                    temperature=source.choice([0.0, 1.0]),
                    logprobs=source.choice([None, 2]),
                    deadline=clock.now + source.randrange(1, 40) if source.random() < 0.5 else None,
                    speculation=SpeculationParams(max_draft_tokens=source.randrange(5)),
                    priority=source.randrange(2),
                )
                num_added += 1
        unfinished = [
            name for name, c in session.completions.items() if c.summary is None and c.error is None
        ]
        if unfinished and source.random() < 0.3:
            # Old ones are in the middle of something, new ones in the queue.
            session.abort(source.choice([unfinished[0], unfinished[-1], source.choice(unfinished)]), GONE)
            num_cancelled += 1
        session.step()
        clock.advance(1.0)
    return session


def check_storm(zoo: ModelZoo, *, num_requests: int) -> None:
    clock = FakeClock()
    engine = engine_of(zoo, clock)
    reference = Reference(zoo.target())
    with guarded(engine):
        session = storm(engine, clock, num_requests=num_requests)
        assert len(session.completions) == num_requests
        outcomes = {"finished": 0, "expired": 0, "cancelled": 0}
        for completion in session.completions.values():
            if completion.summary is not None:
                outcomes["finished"] += 1
                assert completion.summary.num_output_tokens == len(completion.token_ids)
            else:
                outcomes["expired" if isinstance(completion.error, DeadlineError) else "cancelled"] += 1
        assert min(outcomes.values()) > num_requests / 20, outcomes
        assert outcomes["finished"] < num_requests / 2, outcomes
    assert engine.statistics().num_preemptions > 0
    # The whole pool is there again: a request that needs nearly all of the context gets it.
    prompt = random_prompt(100, seed=99)
    expected = reference.greedy(prompt, CONTEXT - 100, ignore_eos=True)
    assert generate(engine, [prompt], ignore_eos=True)[0].token_ids == expected
    everything = [random_prompt(CONTEXT - 1, seed=seed) for seed in range(3)]
    for completion in generate(engine, everything, ignore_eos=True):
        assert len(completion.token_ids) == 1
    assert_idle(engine)


def test_300_requests_cancelled_and_expired_at_random_moments_leave_nothing(zoo: ModelZoo) -> None:
    check_storm(zoo, num_requests=300)


@pytest.mark.slow
def test_2000_requests_of_which_1000_are_cancelled_or_expire_leave_nothing(zoo: ModelZoo) -> None:
    check_storm(zoo, num_requests=2000)


@pytest.mark.parametrize(
    "moment", ["queued", "in prefill", "after prefill", "in the middle", "just before the end"]
)
def test_a_cancelled_request_frees_its_blocks_at_once(zoo: ModelZoo, moment: str) -> None:
    engine = engine_of(zoo, FakeClock())
    prompt = random_prompt(90, seed=1)
    steps = {"queued": 0, "in prefill": 1, "after prefill": 2, "in the middle": 5, "just before the end": 0}
    with guarded(engine):
        session = Session(engine)
        session.add("a", prompt, max_tokens=20, ignore_eos=True)
        if moment == "just before the end":
            while len(session.completions["a"].token_ids) < 17:
                session.step()
        session.step(steps[moment])
        assert (engine.statistics().kv_blocks_used > 0) == (moment != "queued")
        tokens_before = len(session.completions["a"].token_ids)
        assert tokens_before < 20
        session.abort("a", GONE)
        statistics = engine.statistics()
        assert (statistics.kv_blocks_used, statistics.num_running, statistics.num_waiting) == (0, 0, 0)
        # Its caller hears why in the next step, and nothing after.
        deltas = session.step()
        assert [(d.request_id, d.error) for d in deltas] == [("a", GONE)]
        assert not engine.has_work
        assert len(session.completions["a"].token_ids) == tokens_before


def test_cancelling_what_is_unknown_or_over_changes_nothing(zoo: ModelZoo) -> None:
    engine = engine_of(zoo, FakeClock())
    with guarded(engine):
        engine.abort("nobody", GONE)
        assert not engine.has_work
        assert engine.step() == []
        completion = generate(engine, [[5, 6]], max_tokens=3)[0]
        engine.abort("request-0", GONE)
        assert not engine.has_work
        assert completion.summary is not None
        # The id is free again, and twice the same cancellation is one.
        add(engine, "request-0", [5, 6], max_tokens=3)
        engine.abort("request-0", GONE)
        engine.abort("request-0", GONE)
        assert [delta.error for delta in engine.step()] == [GONE]


def test_a_deadline_ends_a_request_wherever_it_is(zoo: ModelZoo) -> None:
    clock = FakeClock()
    engine = engine_of(zoo, clock)
    with guarded(engine):
        session = Session(engine)
        for index in range(8):
            session.add(f"running-{index}", [5 + index], max_tokens=100, ignore_eos=True)
        session.add("waiting", [20], max_tokens=5, deadline=10.0)
        session.add("running", [21], max_tokens=100, deadline=10.0, priority=1, ignore_eos=True)
        session.step(2)
        assert engine.statistics().num_waiting > 0
        clock.advance(9.5)
        session.step()
        assert session.completions["running"].error is None
        clock.advance(0.5)
        session.step()
        for name in ("waiting", "running"):
            assert isinstance(session.completions[name].error, DeadlineError)
        assert session.completions["running"].token_ids
        assert not session.completions["waiting"].token_ids
        session.drain()


def test_a_request_that_waits_too_long_ends_and_one_that_ran_before_does_not(zoo: ModelZoo) -> None:
    clock = FakeClock()
    engine = make_function_engine(
        lambda prefix: 5 + len(prefix) % 7, decode=letters, max_running=1, clock=clock, vocab_size=64
    )
    for name in ("first", "second"):
        engine.add_request(
            admit(
                request_id=name,
                prompt_token_ids=[1],
                sampling=SamplingParams(temperature=0.0, max_tokens=40),
                speculation=SpeculationParams(enabled=False),
                limits=engine.limits,
                now=0.0,
                queue_deadline=5.0,
            )
        )
    ended: dict[str, object] = {}
    while engine.has_work:
        for delta in engine.step():
            if delta.is_final:
                ended[delta.request_id] = delta.error
        clock.advance(1.0)
    assert ended["first"] is None
    assert isinstance(ended["second"], DeadlineError)
    assert_idle(engine)


def test_what_is_left_after_a_cancellation_is_the_same_as_without_it(zoo: ModelZoo) -> None:
    engine = engine_of(zoo, FakeClock())
    reference = Reference(zoo.target())
    prompts = [random_prompt(10 + 5 * index, seed=index) for index in range(6)]
    for index, prompt in enumerate(prompts):
        add(engine, str(index), prompt, max_tokens=20)
    tokens: dict[str, list[int]] = {str(index): [] for index in range(6)}
    for step in range(6):
        for delta in engine.step():
            tokens[delta.request_id].extend(delta.token_ids)
        if step % 2 == 0:
            engine.abort(str(step), GONE)
    rest = drain(engine)
    for index in (1, 3, 5):
        assert tokens[str(index)] + rest[str(index)].token_ids == reference.greedy(prompts[index], 20)
    assert_idle(engine)
