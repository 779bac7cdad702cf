"""The API group belongs to one server of the cluster, and the operator knows whether that is itself."""

from __future__ import annotations

from typing import Any

import pytest

from draftline_operator.planning.api_service_ownership import ServiceReference, judge_api_services
from draftline_operator.services.metrics_api import unregister
from support.object_store import ObjectStore

OURS = ServiceReference("draftline", "draftline-metrics-api")
NAMES = ("v1beta2.custom.metrics.k8s.io", "v1beta1.custom.metrics.k8s.io")


def api_service(
    name: str, service: ServiceReference | None = OURS, available: str | None = "True"
) -> dict[str, Any]:
    reference = {"namespace": service.namespace, "name": service.name} if service else None
    conditions = [
        {"type": "Available", "status": available, "reason": "FailedDiscoveryCheck", "message": "no route"}
    ]
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": name},
        "spec": {"service": reference},
        "status": {"conditions": conditions if available else []},
    }


def test_two_apiservices_that_lead_here_and_are_reached_are_ok() -> None:
    state = judge_api_services({name: api_service(name) for name in NAMES}, OURS)
    assert (state.status, state.detail) == ("ok", "")


@pytest.mark.parametrize("taken", NAMES)
def test_one_version_in_other_hands_is_a_conflict_that_names_them(taken: str) -> None:
    theirs = ServiceReference("monitoring", "prometheus-adapter")
    found = {name: api_service(name, theirs if name == taken else OURS) for name in NAMES}
    state = judge_api_services(found, OURS)
    assert state.status == "conflict"
    assert state.detail == f"APIService {taken} belongs to Service monitoring/prometheus-adapter"


def test_our_service_of_another_namespace_is_somebody_else() -> None:
    found = {name: api_service(name, ServiceReference("other", OURS.name)) for name in NAMES}
    assert judge_api_services(found, OURS).status == "conflict"


def test_a_group_that_the_api_server_serves_itself_is_a_conflict() -> None:
    state = judge_api_services({name: api_service(name, None) for name in NAMES}, OURS)
    assert (state.status, "the API server itself" in state.detail) == ("conflict", True)


def test_a_missing_apiservice_is_unavailable() -> None:
    state = judge_api_services({NAMES[0]: api_service(NAMES[0]), NAMES[1]: None}, OURS)
    assert (state.status, state.detail) == ("unavailable", f"APIService {NAMES[1]} is not registered")


@pytest.mark.parametrize(
    ("available", "detail"), [("False", "FailedDiscoveryCheck: no route"), (None, "has not tried it yet")]
)
def test_what_the_api_server_does_not_reach_is_unavailable(available: str | None, detail: str) -> None:
    state = judge_api_services({name: api_service(name, available=available) for name in NAMES}, OURS)
    assert (state.status, detail in state.detail) == ("unavailable", True)


async def test_unregistering_takes_ours_and_leaves_what_is_not() -> None:
    theirs = ServiceReference("monitoring", "prometheus-adapter")
    store = ObjectStore([api_service(NAMES[0]), api_service(NAMES[1], theirs)])
    assert await unregister(store, OURS) == [NAMES[0]]
    assert [key[2] for key in store.objects] == [NAMES[1]]
    assert await unregister(store, OURS) == []
