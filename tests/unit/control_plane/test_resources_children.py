"""What holds for all children: names, owners, labels, selectors, API versions, equal bytes everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from draftline_operator.models.names import MAX_NAME_LENGTH
from draftline_operator.models.resource import Manifest
from draftline_operator.resources.labels import selector_labels
from draftline_operator.resources.pair import pair_key
from draftline_operator.resources.pair_record import render_pair_record
from support.speculative_deployments import (
    FULL,
    MINIMAL,
    PAIR,
    SETTINGS,
    changed,
    deployment,
    preflight_job,
    render_all,
    resource,
)

TESTS = Path(__file__).resolve().parents[2]
SPECS = {"minimal": MINIMAL, "pair": PAIR, "full": FULL}
API_VERSIONS = {
    "v1",
    "apps/v1",
    "autoscaling/v2",
    "batch/v1",
    "keda.sh/v1alpha1",
    "monitoring.coreos.com/v1",
    "networking.k8s.io/v1",
    "policy/v1",
}
OF_SERVING_PODS = {
    "app.kubernetes.io/name": "draftline",
    "app.kubernetes.io/instance": "chat",
    "app.kubernetes.io/component": "server",
}


@pytest.fixture(params=list(SPECS.values()), ids=list(SPECS))
def children(request: pytest.FixtureRequest) -> list[Manifest]:
    return render_all(resource(request.param))


def selectors(node: Any) -> Iterator[dict[str, Any]]:
    """Every selector of pods or Services in a manifest."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("selector", "podSelector", "labelSelector"):
                yield value
            yield from selectors(value)
    elif isinstance(node, list):
        for value in node:
            yield from selectors(value)


def nulls(node: Any) -> Iterator[Any]:
    if isinstance(node, dict):
        for value in node.values():
            yield from nulls(value)
    elif isinstance(node, list):
        for value in node:
            yield from nulls(value)
    elif node is None:
        yield node


def test_children_have_an_identity_and_an_owner(children: list[Manifest]) -> None:
    for child in children:
        metadata = child["metadata"]
        assert metadata["namespace"] == "models"
        assert metadata["labels"]["app.kubernetes.io/name"] == "draftline"
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "draftline-operator"
        (owner,) = metadata["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("SpeculativeDeployment", "chat", "uid-1")
        is_shared = metadata["name"].startswith("draftline-pair-")
        assert owner["controller"] is not is_shared


def test_no_two_children_share_kind_and_name(children: list[Manifest]) -> None:
    names = [(child["kind"], child["metadata"]["name"]) for child in children]
    assert len(set(names)) == len(names)


def test_only_served_api_versions_are_written(children: list[Manifest]) -> None:
    assert {child["apiVersion"] for child in children} <= API_VERSIONS


def test_nothing_is_null(children: list[Manifest]) -> None:
    assert list(nulls(children)) == []


def test_no_selector_is_empty(children: list[Manifest]) -> None:
    # policy/v1 takes an empty one for every pod of the namespace.
    found = [selector for child in children for selector in selectors(child)]
    assert found
    assert all(selector for selector in found)


def test_whatever_selects_pods_selects_serving_pods_only() -> None:
    described = resource(FULL)
    job_labels = preflight_job(described)["spec"]["template"]["metadata"]["labels"]
    kinds = set()
    for child in render_all(described):
        if child["kind"] in ("Deployment", "Service", "PodDisruptionBudget"):
            selector = child["spec"]["selector"]
            matched = selector.get("matchLabels", selector)
            assert matched == OF_SERVING_PODS == selector_labels("chat")
            assert not matched.items() <= job_labels.items()
            kinds.add(child["kind"])
    assert len(kinds) == 3
    assert OF_SERVING_PODS.items() <= deployment(described)["spec"]["template"]["metadata"]["labels"].items()


def test_resources_never_select_each_others_pods() -> None:
    one, other = deployment(resource(FULL)), deployment(resource(FULL, name="chat-2", uid="uid-2"))
    labels = other["spec"]["template"]["metadata"]["labels"]
    assert not one["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_what_kubernetes_never_lets_change_depends_on_the_name_alone() -> None:
    def immutable(child: Manifest) -> Any:
        spec = child.get("spec", {})
        return {
            "Deployment": spec.get("selector"),
            "Service": (spec.get("clusterIP"), spec.get("type")),
        }.get(child["kind"])

    def of(spec: dict[str, Any]) -> dict[str, Any]:
        children = render_all(resource(spec))
        fixed = {(child["kind"], child["metadata"]["name"]): immutable(child) for child in children}
        return {f"{kind} {name}": value for (kind, name), value in fixed.items() if value is not None}

    assert of(MINIMAL) == of(PAIR) == of(FULL)
    assert len(of(MINIMAL)) == 3


def test_the_longest_name_gives_names_and_labels_that_are_valid() -> None:
    for child in render_all(resource(FULL, name="n" * MAX_NAME_LENGTH)):
        assert len(child["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in child["metadata"]["labels"].values())


def test_a_pair_record_is_named_by_the_pair_and_not_by_who_serves_it() -> None:
    one, other = resource(PAIR), resource(PAIR, name="other", uid="uid-2")
    records = [render_pair_record(item, pair_key(item, SETTINGS), "{}") for item in (one, other)]
    owners = [record["metadata"].pop("ownerReferences") for record in records]
    assert records[0] == records[1]
    assert [owner["uid"] for (owner,) in owners] == ["uid-1", "uid-2"]


_RENDER = """
import json, sys
from support.speculative_deployments import FULL, MINIMAL, PAIR, render_all, resource
print(json.dumps([render_all(resource(spec)) for spec in (MINIMAL, PAIR, FULL)]))
"""


@pytest.mark.parametrize("num_processes", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_every_process_renders_the_same_bytes(num_processes: int) -> None:
    def render(seed: int) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(TESTS)}
        command = [sys.executable, "-c", _RENDER]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(2) as pool:
        outputs = set(pool.map(render, range(num_processes)))
    assert len(outputs) == 1
    here = [render_all(resource(spec)) for spec in (MINIMAL, PAIR, FULL)]
    assert json.loads(outputs.pop()) == here


def test_the_order_of_keys_in_a_spec_changes_nothing() -> None:
    def reversed_keys(node: Any) -> Any:
        return {key: reversed_keys(node[key]) for key in reversed(node)} if isinstance(node, dict) else node

    assert json.dumps(render_all(resource(reversed_keys(FULL)))) == json.dumps(render_all(resource(FULL)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("podTemplate__env", [{"name": "ADDED", "value": "1"}]),
        ("podTemplate__resources", {"limits": {"cpu": "2"}}),
        ("podTemplate__nodeSelector", {"pool": "a"}),
        ("podTemplate__tolerations", [{"key": "a", "operator": "Exists"}]),
        ("podTemplate__affinity", {"podAntiAffinity": {}}),
        ("podTemplate__imagePullSecrets", [{"name": "pull"}]),
        ("podTemplate__volumes", [{"name": "added", "emptyDir": {}}]),
        ("podTemplate__labels", {"added": "1"}),
        ("podTemplate__annotations", {"added": "1"}),
        ("podTemplate__priorityClassName", "high"),
        ("podTemplate__runtimeClassName", "nvidia"),
        ("podTemplate__schedulerName", "custom"),
        ("podTemplate__topologySpreadConstraints", [{"maxSkew": 1, "topologyKey": "a"}]),
        ("accelerator", {}),
        ("draft", {"model": {"uri": "hf://org/draft"}}),
        ("speculation__minAcceptanceRate", 0.5),
        ("serving__maxContextLength", 1024),
        ("autoscaling", {"maxReplicas": 3}),
    ],
)
def test_what_is_added_and_removed_again_leaves_no_trace(path: str, value: Any) -> None:
    before = render_all(resource(MINIMAL))
    added = render_all(resource(changed(MINIMAL, **{path: value})))
    assert added != before
    removed = changed(changed(MINIMAL, **{path: value}), **{path: None})
    assert render_all(resource(removed)) == before
