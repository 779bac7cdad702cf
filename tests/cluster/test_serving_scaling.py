"""Replicas follow the load, and clients follow the replicas: real pods, a real autoscaler, real streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from draftline_operator import constants
from support.kube import provision
from support.kube.components import Options
from support.kube.local import LocalCluster
from support.kube.local import local_cluster as started_cluster
from support.serving_autoscaling import scale_writes
from support.serving_departures import departures_of
from support.serving_load import steady_load
from support.serving_models import Pair, pair_on_disk
from support.serving_operator import serving_operator
from support.serving_pods import ServingPods, serving_pods, small_pods

SEATS = 4
"""Requests that a pod runs at once."""
HIGH, LOW = 4, 1
WINDOW_SECONDS = 20
SCALE_SECONDS = 20
"""From a queue that is too long to the autoscaler's write."""
REACH_SECONDS = 60
"""From a pod that is ready to its first call of a client that was there before."""
TOKENS = 200

pytestmark = pytest.mark.timeout(600)


def spec_of(pair: Pair, *, min_replicas: int = 1) -> dict[str, Any]:
    window = {
        "stabilizationWindowSeconds": WINDOW_SECONDS,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 15}],
    }
    return {
        **pair.spec,
        "speculation": {"methods": ["NGram"]},
        "serving": {
            "maxConcurrentRequests": SEATS,
            "maxQueueLength": 64,
            "maxContextLength": 4096,
            "kvCacheMemory": "64Mi",
            "queueTimeoutSeconds": 120,
            "requestTimeoutSeconds": 240,
        },
        "disruption": {"drainTimeoutSeconds": 240},
        "autoscaling": {
            "minReplicas": min_replicas,
            "maxReplicas": 2,
            "queueDepth": {"highWatermark": HIGH, "lowWatermark": LOW},
            "behavior": {"scaleDown": window},
        },
        "podTemplate": small_pods(),
    }


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with pair_on_disk() as pair:
        yield pair


@pytest.fixture(scope="module")
def operator(local_cluster: LocalCluster, operator_image: str, server_image: str) -> Iterator[None]:
    with serving_operator(local_cluster, operator_image, server_image):
        yield


def test_a_queue_adds_pods_that_connected_clients_reach(
    local_cluster: LocalCluster, operator: None, pair: Pair
) -> None:
    with serving_pods(local_cluster, spec_of(pair)) as serving:
        check_scale_up(serving)


@pytest.mark.slow
def test_a_queue_adds_pods_in_time_where_the_autoscaler_looks_every_fifteen_seconds(
    starts_clusters: None, pair: Pair
) -> None:
    with started_cluster(Options(hpa_sync_seconds=15)) as cluster:
        images = [provision.built_image(name, lambda _: None) for name in ("operator", "server")]
        for image in images:
            cluster.load_image(image.archive)
        references = [image.reference for image in images]
        with (
            serving_operator(cluster, *references),
            serving_pods(cluster, spec_of(pair)) as serving,
        ):
            check_scale_up(serving)


def check_scale_up(serving: ServingPods) -> None:
    (first,) = serving.ready()
    with steady_load(serving, streams=SEATS + 2 * HIGH, tokens=TOKENS) as load:
        serving.wait_until(lambda: (serving.in_flight(first) or 0) > SEATS + HIGH, "a queue that is too long")
        exceeded = time.time()
        serving.wait_until(lambda: any(at > exceeded for at in scale_writes(serving)), "it scales", 60)
        took = min(at for at in scale_writes(serving) if at > exceeded) - exceeded
        serving.wait_until(lambda: len(serving.ready()) == 2, "the second pod serves", 180)
        ready = time.time()
        (second,) = set(serving.ready()) - {first}
        serving.wait_until(
            lambda: (serving.in_flight(second) or 0) > 0, "clients reach it", REACH_SECONDS + 30
        )
        reached = time.time() - ready
        streams = load.end()
    print(f"scaled after {took:.1f} s; clients reached the new pod {reached:.1f} s after it was ready")
    assert took <= SCALE_SECONDS
    assert reached <= REACH_SECONDS
    assert not [stream for stream in streams if stream.outcome == "cut"]


def test_load_holds_pods_above_the_low_watermarks_share_and_below_it_the_idlest_leaves(
    local_cluster: LocalCluster, operator: None, pair: Pair
) -> None:
    with serving_pods(local_cluster, spec_of(pair, min_replicas=2), replicas=2) as serving:
        older, newer = by_age(serving)
        # One pod would do for these, and more than LOW / HIGH of the seats of two are taken.
        with steady_load(serving, streams=SEATS - 1, tokens=TOKENS, pod=newer):
            serving.wait_until(lambda: autoscaler_sees_load(serving), "load that the autoscaler knows of")
            serving.apply(spec_of(pair))  # from now on one pod is allowed
            time.sleep(2 * WINDOW_SECONDS)
            assert serving.ready() == sorted((older, newer)), "load above the share did not hold the pods"
            assert not scale_writes(serving)
        with (
            departures_of(serving) as departures,
            steady_load(serving, streams=1, tokens=TOKENS, pod=newer) as load,
        ):
            fell = time.time()
            serving.wait_until(lambda: bool(scale_writes(serving)), "it scales in", 4 * WINDOW_SECONDS)
            took = scale_writes(serving)[0] - fell
            serving.wait_until(lambda: len(departures) == 1, "a pod leaves", 60)
            assert departures.in_flight == {older: 0}, "it was not the idlest"
            streams = load.end()
        print(f"consolidated {took:.1f} s after load had fallen")
        assert took >= WINDOW_SECONDS - 5  # the window begins with the last look at the higher load
        assert all(stream.outcome == "complete" for stream in streams)
        costs = {name: cost_of(serving, name) for name in serving.ready()}
        assert costs == {newer: "2"}


def by_age(serving: ServingPods) -> list[str]:
    """Names of the ready pods, the oldest first; without costs the newest would leave."""
    pods = {pod["metadata"]["name"]: pod["metadata"]["creationTimestamp"] for pod in serving.pods()}
    return sorted(serving.ready(), key=lambda name: pods[name])


def autoscaler_sees_load(serving: ServingPods) -> bool:
    """Until then it would rightly call the pods idle."""
    metrics = serving.get("hpa", serving.name)["status"].get("currentMetrics") or []
    known = [each["object"] for each in metrics if "object" in each]  # one that is missing has no value
    values = {each["metric"]["name"]: each["current"]["averageValue"] for each in known}
    return str(values.get(constants.RUNNING_METRIC, "0")) != "0"


def cost_of(serving: ServingPods, pod: str) -> str | None:
    annotations: dict[str, str] = serving.get("pod", pod)["metadata"]["annotations"]
    return annotations.get(constants.POD_DELETION_COST_ANNOTATION)
