"""Pods serve the pair that was verified and no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.draft_heads import make_tiny_head
from support.kube.local import LocalCluster
from support.serving_load import steady_load, summary
from support.serving_models import Pair, make_target, pair_on_disk
from support.serving_operator import serving_operator
from support.serving_pods import ServingPods, serving_pods, small_pods
from support.tiny_models import make_tiny_model

CRASHES = 2

pytestmark = pytest.mark.timeout(600)


def spec_of(pair: Pair) -> dict[str, Any]:
    return {
        **pair.spec,
        "replicas": 1,
        "serving": {"maxContextLength": 2048, "kvCacheMemory": "64Mi"},
        "podTemplate": small_pods(),
    }


@pytest.fixture(scope="module")
def operator(local_cluster: LocalCluster, operator_image: str, server_image: str) -> Iterator[None]:
    with serving_operator(local_cluster, operator_image, server_image):
        yield


@pytest.fixture
def pair() -> Iterator[Pair]:
    with pair_on_disk() as pair:
        yield pair


@pytest.fixture
def serving(local_cluster: LocalCluster, operator: None, pair: Pair) -> Iterator[ServingPods]:
    with serving_pods(local_cluster, spec_of(pair)) as serving:
        yield serving


def assert_serves(serving: ServingPods) -> None:
    with steady_load(serving, streams=2, tokens=20, rounds=1) as load:
        streams = load.wait()
    assert [stream.outcome for stream in streams] == ["complete"] * 2, summary(streams)


def test_a_pair_that_does_not_fit_never_touches_running_pods(serving: ServingPods, pair: Pair) -> None:
    uid = serving.pods()[0]["metadata"]["uid"]
    stranger = make_tiny_model(pair.target.parent / "stranger", vocab_size=300, tokenizer="letters")
    pair.open_to_all()
    serving.apply(spec_of(Pair(pair.target, stranger)))
    serving.wait_until(lambda: serving.condition("ModelsVerified").get("status") == "False", "refused", 180)
    print(serving.condition("ModelsVerified"))
    assert serving.condition("Ready")["status"] == "False"
    assert serving.condition("Available")["status"] == "True"
    (pod,) = serving.pods()
    assert pod["metadata"]["uid"] == uid
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    assert_serves(serving)
    serving.apply(spec_of(pair))
    serving.wait_until(lambda: serving.condition("Ready").get("status") == "True", "as before", 60)
    (pod,) = serving.pods()
    assert pod["metadata"]["uid"] == uid


def test_a_pair_with_a_draft_head_is_verified_and_served(serving: ServingPods, pair: Pair) -> None:
    head = make_tiny_head(pair.target.parent / "head", pair.target, fc_norm=True, norm_output=True)
    pair.open_to_all()
    serving.apply(spec_of(Pair(pair.target, head)))
    serving.wait_until(
        lambda: (
            serving.resource()["status"].get("draft", {}).get("architecture") == "Eagle3DraftHead"
            and serving.condition("Ready").get("status") == "True"
        ),
        "it serves with the head",
        240,
    )
    assert_serves(serving)


def test_a_pod_whose_files_are_not_those_that_were_verified_never_serves(
    serving: ServingPods, pair: Pair
) -> None:
    (good,) = serving.ready()
    kept = pair.target.rename(pair.target.with_name("kept"))
    make_target(pair.target, seed=1)
    pair.open_to_all()
    serving.scale(2)
    serving.wait_until(lambda: restarts_of_others(serving, good) >= CRASHES, "the new pod gives up", 240)
    assert serving.ready() == [good]
    assert "expected_pair_digest" in serving.kubectl("logs", other(serving, good), "--previous")
    assert serving.condition("Degraded")["status"] == "True"
    assert_serves(serving)
    pair.target.rename(pair.target.with_name("changed"))
    kept.rename(pair.target)
    serving.wait_until(lambda: len(serving.ready()) == 2, "it serves with the files that were verified", 240)


def other(serving: ServingPods, good: str) -> str:
    (name,) = (pod["metadata"]["name"] for pod in serving.pods() if pod["metadata"]["name"] != good)
    return str(name)


def restarts_of_others(serving: ServingPods, good: str) -> int:
    statuses = [pod["status"] for pod in serving.pods() if pod["metadata"]["name"] != good]
    return sum(each["restartCount"] for status in statuses for each in status.get("containerStatuses", []))
