"""What evictions may take of real serving pods, and that the drain of a node always ends."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest

from draftline_operator import constants
from support.kube.components import NODE_NAME
from support.kube.local import LocalCluster
from support.serving_models import pair_on_disk
from support.serving_operator import serving_operator
from support.serving_pods import ServingPods, serving_pods, small_pods

DRAIN_SECONDS = 120

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def serving(local_cluster: LocalCluster, operator_image: str, server_image: str) -> Iterator[ServingPods]:
    with pair_on_disk() as pair, serving_operator(local_cluster, operator_image, server_image):
        spec: dict[str, Any] = {
            **pair.spec,
            "replicas": 1,
            "serving": {"maxContextLength": 4096, "kvCacheMemory": "64Mi"},
            "podTemplate": small_pods(),
        }
        with serving_pods(local_cluster, spec) as serving:
            yield serving


def test_the_drain_of_a_node_with_the_only_pod_ends(serving: ServingPods) -> None:
    (pod,) = serving.ready()
    try:
        selector = f"--pod-selector={constants.INSTANCE_LABEL}={serving.name}"
        options = ("--delete-emptydir-data", "--ignore-daemonsets", f"--timeout={DRAIN_SECONDS}s")
        drained = serving.cluster.kubectl("drain", NODE_NAME, selector, *options)
    finally:
        serving.cluster.kubectl("uncordon", NODE_NAME)
    assert f"pod/{pod} evicted" in drained
    serving.wait_until_settled(1)
    assert serving.ready() != [pod]


def test_an_eviction_that_would_break_the_budget_is_refused(serving: ServingPods) -> None:
    serving.scale(2)
    serving.wait_until_settled(2)
    serving.wait_until(lambda: disruptions_allowed(serving) == 1, "the budget allows one", 30)
    first, second = serving.ready()
    serving.evict(first)
    with pytest.raises(urllib.error.HTTPError) as refusal:
        serving.evict(second)
    assert refusal.value.code == 429
    status = json.loads(refusal.value.read())
    assert status["details"]["causes"][0]["reason"] == "DisruptionBudget"
    serving.wait_until_settled(2)
    assert second in serving.ready()


def disruptions_allowed(serving: ServingPods) -> int:
    return int(serving.get("pdb", serving.name)["status"]["disruptionsAllowed"])
