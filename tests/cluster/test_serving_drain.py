"""No stream is cut by what happens to pods on purpose: rolling updates, scale-ins, evictions.

All the while as many streams run as keep every pod busy. Each of them lasts, each pod that leaves has several
to finish, and each ends with its final message and the text of a run that nothing disturbed.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from support.kube.local import LocalCluster
from support.serving_departures import Departures, departures_of
from support.serving_load import PROMPTS, Stream, steady_load, summary
from support.serving_models import Pair, pair_on_disk
from support.serving_operator import serving_operator
from support.serving_pods import ServingPods, serving_pods, small_pods

STREAMS = 12
REPLICAS = 2
BUSY = 4
"""Streams that a pod has at least when it leaves."""
SHORTEST_SECONDS = 20
WANTED_SECONDS = 30
"""Of a stream while nothing else runs: they only get longer."""
SAMPLE_TOKENS = 300

pytestmark = pytest.mark.timeout(1200)  # the first one waits for pods and for undisturbed streams as well


@dataclass(frozen=True)
class Served:
    """A resource at rest, and what its streams are like without disturbance."""

    serving: ServingPods
    spec: dict[str, Any]
    tokens: int
    texts: dict[str, str]


def spec_of(pair: Pair) -> dict[str, Any]:
    return {
        **pair.spec,
        "replicas": REPLICAS,
        "speculation": {"methods": ["DraftModel"], "numSpeculativeTokens": 2},
        "serving": {
            "maxConcurrentRequests": 32,
            "maxContextLength": 32768,
            "maxTokensPerRequest": 32768,
            "kvCacheMemory": "512Mi",
            "requestTimeoutSeconds": 240,
        },
        "disruption": {"drainTimeoutSeconds": 240},
        "podTemplate": small_pods(),
    }


@pytest.fixture(scope="module")
def served(local_cluster: LocalCluster, operator_image: str, server_image: str) -> Iterator[Served]:
    with pair_on_disk() as pair, serving_operator(local_cluster, operator_image, server_image):
        spec = spec_of(pair)
        with serving_pods(local_cluster, spec, REPLICAS) as serving:
            tokens = tokens_that_last(serving)
            yield Served(serving, spec, tokens, undisturbed(serving, tokens))


def tokens_that_last(serving: ServingPods) -> int:
    """By the speed of the fastest stream while few run; long texts are slower by the token."""
    tokens = SAMPLE_TOKENS
    while True:
        with steady_load(serving, streams=len(PROMPTS), tokens=tokens, rounds=1) as load:
            fastest = min(stream.seconds for stream in load.wait())
        if fastest > WANTED_SECONDS * 0.75:
            return tokens
        tokens = math.ceil(tokens * (WANTED_SECONDS / fastest) ** 0.6)


def undisturbed(serving: ServingPods, tokens: int) -> dict[str, str]:
    """What each prompt is answered with."""
    with steady_load(serving, streams=len(PROMPTS), tokens=tokens, rounds=1) as load:
        streams = load.wait()
    print(f"{tokens} tokens;", summary(streams))
    assert all(stream.outcome == "complete" for stream in streams), summary(streams)
    texts = {stream.prompt: stream.text for stream in streams}
    assert len(set(texts.values())) == len(PROMPTS), "the model does not tell prompts apart"
    return texts


# ------------------------------------------------------------------------------------- what happens to pods


def rolling_update(served: Served, number: int) -> int:
    """A changed annotation of the pods; returns how many of them leave."""
    template = {**served.spec["podTemplate"], "annotations": {"example.com/update": secrets.token_hex(4)}}
    served.serving.apply({**served.spec, "podTemplate": template})
    return REPLICAS


def scale_in(served: Served, number: int) -> int:
    """By one pod."""
    served.serving.scale(REPLICAS - 1)
    return 1


def eviction(served: Served, number: int) -> int:
    served.serving.evict(served.serving.ready()[number % REPLICAS])
    return 1


Disturbance = Callable[[Served, int], int]


def test_no_stream_is_cut_by_a_rolling_update(served: Served) -> None:
    check(served, rolling_update, times=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("disturb", [rolling_update, scale_in, eviction])
def test_no_stream_is_cut_by_ten_times_a(disturb: Disturbance, served: Served) -> None:
    check(served, disturb, times=10)


def check(served: Served, disturb: Disturbance, *, times: int) -> None:
    serving = served.serving
    with (
        steady_load(serving, streams=STREAMS, tokens=served.tokens) as load,
        departures_of(serving) as departures,
    ):
        for number in range(times):
            happen(served, disturb, number, departures)
        streams = load.end()
    print(f"{disturb.__name__}: in flight on leaving pods {departures.in_flight};", summary(streams))
    assert_all_ended_well(served, streams)
    assert all((busy or 0) >= BUSY for busy in departures.in_flight.values()), departures.in_flight


def happen(served: Served, disturb: Disturbance, number: int, departures: Departures) -> None:
    """Once, when all pods are there and busy; until the pods that leave are gone."""
    serving = served.serving
    serving.scale(REPLICAS)
    serving.wait_until_settled(REPLICAS)
    serving.wait_until(lambda: serving.least_in_flight() >= BUSY, f"{BUSY} streams on each pod", 120)
    gone_before = len(departures)
    leaving = disturb(served, number)
    serving.wait_until(lambda: len(departures) >= gone_before + leaving, f"{leaving} pods leave", 240)
    serving.wait_until(lambda: len(serving.pods()) == len(serving.ready()), "they are gone", 300)


def assert_all_ended_well(served: Served, streams: list[Stream]) -> None:
    assert len(streams) >= STREAMS
    cut = [stream for stream in streams if stream.outcome != "complete"]
    assert not cut, summary(cut)
    assert min(stream.seconds for stream in streams) >= SHORTEST_SECONDS, summary(streams)
    differing = [stream for stream in streams if stream.text != served.texts[stream.prompt]]
    assert not differing, f"{len(differing)} of {len(streams)} streams have another text"
