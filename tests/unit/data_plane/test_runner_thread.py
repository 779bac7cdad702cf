"""The bridge between event loop and engine: bounded, merged, never blocking."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from draftline_server.core.generation import GenerationDelta, GenerationRequest, TokenLogprobs
from draftline_server.core.sampling_params import SamplingParams
from draftline_server.errors import (
    CancelledError,
    InternalError,
    ModelError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from draftline_server.log import JsonFormatter
from draftline_server.runner_thread import EngineHealth, EngineThread, RequestStream
from draftline_server.testing import ScriptedEngine, build_scripted_pair
from support.serving import wait_for


class ManualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_thread(engine: ScriptedEngine, *, clock: ManualClock | None = None) -> EngineThread:
    return EngineThread(
        lambda: build_scripted_pair(engine),
        max_concurrent_requests=4,
        max_queue_length=2,
        hang_seconds=10.0,
        clock=clock if clock is not None else ManualClock(),
    )


@pytest.fixture
async def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def thread(engine: ScriptedEngine) -> AsyncIterator[EngineThread]:
    thread = make_thread(engine)
    thread.start()
    await thread.wait_until_ready()
    yield thread
    engine.resume()
    await thread.stop(5.0)
    assert not thread.is_alive


def make_request(label: str = "r", *, max_tokens: int = 9) -> GenerationRequest:
    return GenerationRequest(
        request_id=label, prompt_token_ids=(97, 98, 99), sampling=SamplingParams(max_tokens=max_tokens)
    )


def submit(thread: EngineThread, request: GenerationRequest | None = None) -> RequestStream:
    return thread.submit(request if request is not None else make_request(), thread.reserve())


async def text_of(stream: RequestStream) -> str:
    return "".join([delta.text async for delta in stream])


async def error_of(stream: RequestStream) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await text_of(stream)
    return caught.value


def health_of(thread: EngineThread) -> EngineHealth:
    return thread.health


async def wait_for_step(engine: ScriptedEngine) -> None:
    assert await asyncio.to_thread(engine.step_began.wait, 5.0)


async def test_stream_ends_with_the_summary(thread: EngineThread) -> None:
    deltas = [delta async for delta in submit(thread)]
    assert "".join(d.text for d in deltas) == "abcabcabc"
    assert [d.summary is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]


async def test_equal_labels_are_different_requests(thread: EngineThread) -> None:
    streams = [submit(thread), submit(thread)]
    assert streams[0].key != streams[1].key
    assert await asyncio.gather(*map(text_of, streams)) == ["abcabcabc"] * 2


def test_unread_deltas_are_merged() -> None:
    async def read() -> list[GenerationDelta]:
        stream = RequestStream("k", num_prompt_tokens=1, cancel=lambda _: None)
        for index in range(1000):
            logprobs = (TokenLogprobs(index, -1.0, ()),)
            stream.push(GenerationDelta("k", text="x", token_ids=(index,), logprobs=logprobs), float(index))
        first = await anext(stream)
        stream.push(GenerationDelta("k", text="y", token_ids=(7,)), 0.0)
        stream.push(GenerationDelta("k", error=InternalError("e")), 0.0)
        stream.push(GenerationDelta("k", text="ignored"), 0.0)
        second = await anext(stream)
        with pytest.raises(InternalError):
            await anext(stream)
        return [first, second]

    first, second = asyncio.run(read())
    assert first.text == "x" * 1000
    assert first.token_ids == tuple(range(1000))
    assert len(first.logprobs) == 1000
    assert second.text == "y"


async def test_reader_that_gave_up_leaves_the_stream_readable() -> None:
    stream = RequestStream("k", num_prompt_tokens=1, cancel=lambda _: None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), timeout=0.01)
    stream.push(GenerationDelta("k", text="x"), 0.0)
    assert (await anext(stream)).text == "x"


def test_gaps_between_outputs_are_measured() -> None:
    async def measure() -> list[float | None]:
        stream = RequestStream("k", num_prompt_tokens=1, cancel=lambda _: None)
        deltas = [("", ()), ("a", (1,)), ("", ()), ("bc", (2, 3))]
        return [
            stream.push(GenerationDelta("k", text=text, token_ids=ids), float(now))
            for now, (text, ids) in enumerate(deltas)
        ]

    assert asyncio.run(measure()) == [None, None, None, 2.0]


async def test_engine_is_woken_once_per_step_at_most(
    engine: ScriptedEngine, thread: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.hold()
    streams = [submit(thread, make_request(max_tokens=3)) for _ in range(4)]
    await wait_for_step(engine)
    wake_ups = 0
    call_soon = thread._loop.call_soon_threadsafe

    def count(*arguments: object) -> object:
        nonlocal wake_ups
        wake_ups += 1
        return call_soon(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(thread._loop, "call_soon_threadsafe", count)
    engine.resume()
    await asyncio.gather(*map(text_of, streams))
    assert 1 <= wake_ups <= 2  # the first step began before all four were there


async def test_seats_and_queue_bound_what_is_accepted(engine: ScriptedEngine, thread: EngineThread) -> None:
    engine.hold()
    streams = [submit(thread) for _ in range(6)]
    with pytest.raises(QueueFullError) as caught:
        thread.reserve()
    assert caught.value.retry_after_seconds > 0
    engine.resume()
    await asyncio.gather(*map(text_of, streams))
    thread.reserve().release()


async def test_engine_that_lets_requests_wait_has_no_seats_to_offer(thread: EngineThread) -> None:
    small = ScriptedEngine(max_running=1)  # as if its cache had room for one
    other = make_thread(small)
    other.start()
    await other.wait_until_ready()
    small.hold()
    streams = [submit(other) for _ in range(3)]
    await wait_for_step(small)
    small.release(2)
    await wait_for(lambda: (other.statistics.num_running, small.statistics().num_waiting) == (1, 2))
    with pytest.raises(QueueFullError):
        other.reserve()
    small.resume()
    await asyncio.gather(*map(text_of, streams))
    await other.stop(5.0)


async def test_place_is_given_back(thread: EngineThread) -> None:
    for _ in range(20):
        with pytest.raises(ZeroDivisionError), thread.reserve():
            raise ZeroDivisionError
    places = [thread.reserve() for _ in range(6)]
    with pytest.raises(QueueFullError):
        thread.reserve()
    assert thread.statistics.num_waiting == 6
    for place in places:
        place.release()
        place.release()
    assert thread.statistics.num_waiting == 0


async def test_leaving_a_stream_cancels_the_request(engine: ScriptedEngine, thread: EngineThread) -> None:
    engine.hold()
    async with submit(thread, make_request(max_tokens=90)) as stream:
        await wait_for_step(engine)
    assert isinstance(await error_of(stream), CancelledError)
    engine.resume()
    await wait_for(lambda: not (thread.statistics.num_running or thread.statistics.num_waiting))
    assert thread.statistics.kv_blocks_used == 0


async def test_failed_step_fails_everything_for_good(
    engine: ScriptedEngine, thread: EngineThread, caplog: pytest.LogCaptureFixture
) -> None:
    engine.hold()
    streams = [submit(thread) for _ in range(3)]
    await wait_for_step(engine)
    engine.fail_next_step(RuntimeError("secret"))
    engine.resume()
    errors = [await error_of(stream) for stream in streams]
    assert all(isinstance(error, InternalError) for error in errors)
    assert not any("secret" in str(error) for error in errors)
    (line,) = map(JsonFormatter().format, caplog.records)
    assert "RuntimeError" in line
    assert "in step" in line
    assert "secret" not in line
    await thread.failure.wait()
    assert health_of(thread) is EngineHealth.FAILED
    assert (thread.statistics.num_running, thread.statistics.num_waiting) == (0, 0)
    with pytest.raises(UnavailableError):
        thread.reserve()


async def test_long_step_is_hung_until_it_ends(engine: ScriptedEngine) -> None:
    clock = ManualClock()
    thread = make_thread(engine, clock=clock)
    thread.start()
    await thread.wait_until_ready()
    engine.hold()
    stream = submit(thread)
    await wait_for_step(engine)
    clock.now = 10.0
    assert health_of(thread) is EngineHealth.READY
    clock.now = 10.1
    assert health_of(thread) is EngineHealth.HUNG
    with pytest.raises(UnavailableError, match="does not respond"):
        thread.reserve()
    thread.fail_all(lambda: UnavailableError("gone"))
    assert isinstance(await error_of(stream), UnavailableError)
    engine.resume()
    await wait_for(lambda: health_of(thread) is EngineHealth.READY)
    assert await text_of(submit(thread)) == "abcabcabc"
    await thread.stop(5.0)


async def test_idle_time_is_no_hang(engine: ScriptedEngine) -> None:
    clock = ManualClock()
    thread = make_thread(engine, clock=clock)
    thread.start()
    await thread.wait_until_ready()
    assert await text_of(submit(thread)) == "abcabcabc"
    clock.now = 1000.0
    await wait_for(lambda: health_of(thread) is EngineHealth.READY)  # once it has gone to sleep
    assert await text_of(submit(thread)) == "abcabcabc"
    await thread.stop(5.0)
    assert health_of(thread) is EngineHealth.STOPPED


async def test_refusal_spares_what_was_accepted(engine: ScriptedEngine, thread: EngineThread) -> None:
    engine.hold()
    stream, place = submit(thread), thread.reserve()
    thread.refuse(lambda: UnavailableError("draining"))
    with pytest.raises(UnavailableError, match="draining"):
        thread.reserve()
    late = thread.submit(make_request(), place)
    engine.resume()
    assert list(await asyncio.gather(text_of(stream), text_of(late))) == ["abcabcabc"] * 2


async def test_load_failure_is_handed_on() -> None:
    def build() -> object:
        raise ModelError("no such directory")

    thread = EngineThread(
        build,  # type: ignore[arg-type]
        max_concurrent_requests=1,
        max_queue_length=0,
        hang_seconds=1.0,
    )
    assert health_of(thread) is EngineHealth.LOADING
    with pytest.raises(UnavailableError, match="loading"):
        thread.reserve()
    thread.start()
    with pytest.raises(ModelError, match="no such directory"):
        await thread.wait_until_ready()
    await thread.stop(5.0)
