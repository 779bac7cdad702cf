"""A pair's key changes with everything that a preflight depends on, and with nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from draftline_operator.resources.pair import pair_key
from support.speculative_deployments import FULL, MINIMAL, PAIR, SETTINGS, changed, deployment, resource


def key(spec: dict[str, Any]) -> str:
    return pair_key(resource(spec), SETTINGS)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("image", "registry.test/draftline-server:3"),
        ("accelerator__memory", "40Gi"),
        ("accelerator__resourceName", "amd.com/gpu"),
        ("accelerator", None),
        ("target__model__uri", "hf://org/other"),
        ("target__model__revision", "v2"),
        ("target__model__digest", f"sha256:{'3' * 64}"),
        ("target__dtype", "float16"),
        ("draft__model__uri", "hf://org/other"),
        ("draft__model__revision", "v2"),
        ("draft__dtype", "float16"),
        ("draft", None),
        ("speculation__numSpeculativeTokens", 5),
        ("speculation__enabled", False),
        ("serving__maxContextLength", 2048),
        ("serving__maxConcurrentRequests", 8),
        ("serving__maxBatchedTokens", 2048),
        ("serving__memoryFraction", 0.5),
        ("serving__kvCacheMemory", "2Gi"),
    ],
)
def test_what_a_preflight_depends_on_changes_the_key(path: str, value: Any) -> None:
    assert key(changed(FULL, **{path: value})) != key(FULL)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("replicas", 5),
        ("autoscaling", None),
        ("disruption__drainTimeoutSeconds", 300),
        ("serving__requestTimeoutSeconds", 30),
        ("serving__maxQueueLength", 1),
        ("speculation__adaptive", True),
        ("speculation__minAcceptanceRate", None),
        ("target__model__credentialsSecretRef", None),
        ("modelCache", {"emptyDir": {}}),
        ("podTemplate", {}),
        ("accelerator__memory", "81920Mi"),
        ("accelerator__count", None),
    ],
)
def test_anything_else_keeps_it(path: str, value: Any) -> None:
    assert key(changed(FULL, **{path: value})) == key(FULL)


def test_nodes_count_where_they_tell_how_much_memory_an_accelerator_has() -> None:
    told = changed(FULL, accelerator__memory=None)
    elsewhere = {"podTemplate__nodeSelector": {"gpu": "small"}}
    assert key(changed(told, **elsewhere)) != key(told)
    assert key(changed(FULL, **elsewhere)) == key(FULL)


def test_a_draft_that_never_runs_does_not_count() -> None:
    without = changed(PAIR, draft=None, speculation__methods=["NGram"])
    assert key(changed(PAIR, speculation__methods=["NGram"])) == key(without)


def test_on_cpus_the_containers_memory_counts_by_value() -> None:
    def limited(memory: str) -> dict[str, Any]:
        return changed(MINIMAL, podTemplate__resources={"limits": {"memory": memory}})

    assert key(limited("2Gi")) == key(limited("2048Mi"))
    assert key(limited("2Gi")) != key(limited("3Gi"))
    assert key(limited("2Gi")) != key(MINIMAL)


def test_resources_share_the_key_whatever_their_names() -> None:
    one, other = resource(PAIR), resource(PAIR, name="other", uid="uid-2")
    assert pair_key(one, SETTINGS) == pair_key(other, SETTINGS)


def test_the_operators_default_image_counts_where_the_spec_names_none() -> None:
    newer = dataclasses.replace(SETTINGS, default_image="registry.test/draftline-server:9")
    assert pair_key(resource(PAIR), newer) != pair_key(resource(PAIR), SETTINGS)
    assert pair_key(resource(FULL), newer) == pair_key(resource(FULL), SETTINGS)


def test_pods_carry_the_key_as_their_revision() -> None:
    labels = deployment(resource(PAIR))["spec"]["template"]["metadata"]["labels"]
    assert labels["draftline.dev/revision"] == key(PAIR)
