"""The CRD on a real API server: what it refuses, what it fills in, and what it tells a person."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftline_operator.constants import API_VERSION, KIND
from draftline_operator.models.names import MAX_NAME_LENGTH
from support.faulty_specs import BAD_URIS, FAULTS, GOOD_URIS, UNKNOWN_TO_THE_SCHEMA
from support.helm import ROOT
from support.kube.cluster import Cluster
from support.release import CRD, release_of
from support.speculative_deployments import FULL, MINIMAL, PAIR

EXAMPLES = sorted((ROOT / "crds" / "examples").glob("*.yaml"))
SCHEMA = yaml.safe_load((ROOT / "crds" / "speculativedeployments.yaml").read_text())["spec"]["versions"][0][
    "schema"
]["openAPIV3Schema"]


@pytest.fixture(scope="module")
def crd(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, with the CRD as the chart installs it."""
    with release_of(cluster) as release:
        release.install({"replicas": 0, "autoscaling": {"provider": "none"}})
        cluster.kubectl("wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=30s")
        yield cluster


def tried(cluster: Cluster, spec: Mapping[str, Any], *, name: str = "chat") -> tuple[dict[str, Any], str]:
    """What would be stored, or else why not; nothing is."""
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}
    command = ("create", "--dry-run=server", "--output=json", "--filename=-")
    result = cluster.try_kubectl(*command, stdin=json.dumps(manifest))
    return json.loads(result.stdout or "{}"), result.stderr


# -------------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("spec", "message"),
    [case[1:] for case in FAULTS if case[0] not in UNKNOWN_TO_THE_SCHEMA],
    ids=[case[0] for case in FAULTS if case[0] not in UNKNOWN_TO_THE_SCHEMA],
)
def test_what_the_operator_refuses_is_refused_first_and_by_its_field(
    crd: Cluster, spec: dict[str, Any], message: str
) -> None:
    stored, complaint = tried(crd, spec)
    assert not stored
    assert field_of(message) in complaint


def field_of(message: str) -> str:
    """Without indices, and only the beginning where the message is cut."""
    field, _, _ = message.partition(":")
    return field.rstrip("…").partition("[")[0].rstrip(".")


@pytest.mark.parametrize("uri", BAD_URIS)
def test_a_uri_of_another_form_is_refused(crd: Cluster, uri: str) -> None:
    stored, complaint = tried(crd, {"target": {"model": {"uri": uri}}})
    assert not stored
    assert "spec.target.model.uri" in complaint


@pytest.mark.parametrize("name", ["n" * (MAX_NAME_LENGTH + 1), "2-chat", "chat.v2"])
def test_a_name_that_no_child_could_have_is_refused(crd: Cluster, name: str) -> None:
    stored, complaint = tried(crd, MINIMAL, name=name)
    assert not stored
    assert f'"{name}" is invalid' in complaint


# ---------------------------------------------------------------------------------------------- what it takes


@pytest.mark.parametrize("spec", [MINIMAL, PAIR, FULL], ids=["minimal", "pair", "full"])
def test_sound_specs_are_stored_with_all_that_they_say(crd: Cluster, spec: dict[str, Any]) -> None:
    stored, complaint = tried(crd, spec, name="n" * MAX_NAME_LENGTH)
    assert complaint == ""
    assert has_all(stored["spec"], spec)
    assert stored["spec"]["serving"]["requestTimeoutSeconds"]
    assert ("replicas" in stored["spec"]) is ("replicas" in spec)


def has_all(found: Any, expected: Any) -> bool:
    """Whatever is there beside it."""
    if isinstance(expected, dict):
        return all(key in found and has_all(found[key], value) for key, value in expected.items())
    return bool(found == expected)


def test_uris_of_every_scheme_are_taken(crd: Cluster) -> None:
    for uri in GOOD_URIS:
        stored, complaint = tried(crd, {"target": {"model": {"uri": uri}}})
        assert stored, complaint


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_taken(crd: Cluster, path: Path) -> None:
    said = crd.kubectl("apply", "--dry-run=server", "--validate=strict", f"--filename={path}")
    assert said.endswith(" created (server dry run)\n")


# ------------------------------------------------------------------------------------- what it tells a person


@pytest.mark.parametrize("path", ["spec", "spec.target.model", "spec.autoscaling.queueDepth", "status"])
def test_every_field_is_explained(crd: Cluster, path: str) -> None:
    node = SCHEMA
    for part in path.split("."):
        node = node["properties"][part]
    explanation = explained(crd, path)
    for field, described in node["properties"].items():
        assert field in explanation
        assert " ".join(described["description"].split()) in explanation, field


def explained(cluster: Cluster, path: str) -> str:
    """In one line. The API server publishes what it knows of a new kind a moment later."""
    for _ in range(60):
        result = cluster.try_kubectl("explain", f"specdep.{path}")
        if result.returncode == 0:
            return " ".join(result.stdout.split())
        time.sleep(0.5)
    raise AssertionError(result.stderr)
