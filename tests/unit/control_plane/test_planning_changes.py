"""Writes happen where something differs, never to what is somebody else's; what serves nothing is removed."""

from __future__ import annotations

from typing import Any

import pytest

from draftline_operator.constants import APPLIED_HASH_ANNOTATION
from draftline_operator.errors import NameConflictError
from draftline_operator.models.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    HORIZONTAL_POD_AUTOSCALER,
    POD_DISRUPTION_BUDGET,
    SERVICE,
)
from draftline_operator.models.observed import Object
from draftline_operator.models.resource import Manifest
from draftline_operator.planning.changes import (
    changes_of,
    check_names,
    keep_selector,
    superfluous,
    with_applied_hash,
)
from draftline_operator.planning.drift import has_drifted
from draftline_operator.planning.gate import Gate
from support.observations import (
    KEY,
    NAME,
    UID,
    deployment,
    foreign,
    observed,
    owned,
    preflight_job,
    serving_pod,
)


def service(**spec: Any) -> Manifest:
    return owned("Service", NAME, spec=spec or {"ports": [{"name": "grpc", "port": 50051}]})


def gate(*, job: Object | None = None, is_recorded: bool = True, retry_after: float | None = None) -> Gate:
    return Gate(
        state="verified",
        pair_key=KEY,
        reason="Verified",
        message="",
        job=job,
        is_recorded=is_recorded,
        retry_after=retry_after,
    )


def test_what_is_missing_is_applied() -> None:
    (applied,) = changes_of([service()], observed())
    assert applied["spec"] == service()["spec"]
    assert applied["metadata"]["annotations"][APPLIED_HASH_ANNOTATION]


def test_what_was_applied_is_not_applied_again() -> None:
    live = with_applied_hash(service())
    live["metadata"]["annotations"]["added-by"] = "others"
    live["spec"]["clusterIP"] = "10.0.0.1"
    assert changes_of([service()], observed(named={(SERVICE, NAME): live})) == []


def test_what_is_to_be_different_is_applied() -> None:
    live = with_applied_hash(service())
    wanted = service(ports=[{"name": "grpc", "port": 50052}])
    assert len(changes_of([wanted], observed(named={(SERVICE, NAME): live}))) == 1


def test_a_field_that_was_taken_out_is_applied_although_what_is_left_is_there() -> None:
    live = with_applied_hash(service(ports=[], type="ClusterIP"))
    assert len(changes_of([service(ports=[])], observed(named={(SERVICE, NAME): live}))) == 1


def test_what_somebody_has_changed_is_applied_again() -> None:
    live = with_applied_hash(service())
    live["spec"]["ports"][0]["port"] = 1
    assert len(changes_of([service()], observed(named={(SERVICE, NAME): live}))) == 1


def test_replicas_alone_never_apply_a_deployment_anew() -> None:
    live = with_applied_hash(deployment(replicas=1))
    named = {(DEPLOYMENT, NAME): live}
    wanted = deployment(replicas=5)
    wanted.pop("status")
    wanted["metadata"].pop("generation")
    live_document = with_applied_hash(wanted)
    live["metadata"]["annotations"] = live_document["metadata"]["annotations"]
    assert changes_of([wanted], observed(named=named)) == []


def test_an_immutable_config_map_is_written_once() -> None:
    wanted = owned("ConfigMap", "chat-config-1", data={"config.yaml": "a"})
    live = owned("ConfigMap", "chat-config-1", data={"config.yaml": "b"})
    assert changes_of([wanted], observed(config_maps=(live,))) == []
    assert len(changes_of([wanted], observed())) == 1


@pytest.mark.parametrize(
    ("desired", "live"),
    [
        pytest.param({"cpu": "1"}, {"cpu": "1000m"}, id="same-cpu"),
        pytest.param({"memory": "2147483648"}, {"memory": "2048Mi"}, id="same-memory"),
        pytest.param({"port": "50051"}, {"port": 50051}, id="number-as-text"),
        pytest.param([{"name": "a"}], [{"name": "injected"}, {"name": "a", "image": "b"}], id="injected"),
        pytest.param({"a": {}, "b": [], "c": None}, {}, id="empty-is-absent"),
        pytest.param({"labels": {"a": "b"}}, {"labels": {"a": "b", "c": "d"}, "more": 1}, id="added"),
    ],
)
def test_no_drift_is_seen_in_what_means_the_same(desired: Any, live: Any) -> None:
    assert not has_drifted(desired, live)


@pytest.mark.parametrize(
    ("desired", "live"),
    [
        pytest.param({"a": 1}, {}, id="missing"),
        pytest.param({"a": True}, {"a": False}, id="boolean"),
        pytest.param({"a": False}, {"a": True}, id="false-that-became-true"),
        pytest.param(["x", "y"], ["y", "x"], id="order-of-arguments"),
        pytest.param([{"name": "a", "value": "1"}], [{"name": "a", "value": "2"}], id="item"),
        pytest.param({"cpu": "1"}, {"cpu": "2"}, id="quantity"),
        pytest.param({"a": {"b": 1}}, {"a": "text"}, id="kind-of-value"),
    ],
)
def test_drift_is_seen(desired: Any, live: Any) -> None:
    assert has_drifted(desired, live)


def test_free_and_own_names_may_be_used() -> None:
    assert check_names([(SERVICE, NAME)], observed())
    assert check_names([(SERVICE, NAME)], observed(named={(SERVICE, NAME): service()}))


def test_a_name_that_somebody_else_has_is_a_conflict() -> None:
    with pytest.raises(NameConflictError, match="Service chat exists"):
        check_names([(SERVICE, NAME)], observed(named={(SERVICE, NAME): foreign("Service", NAME)}))


def test_an_object_of_another_resource_is_somebody_elses() -> None:
    theirs = owned("Service", NAME, uid="uid-2", owner="other")
    with pytest.raises(NameConflictError):
        check_names([(SERVICE, NAME)], observed(named={(SERVICE, NAME): theirs}))


@pytest.mark.parametrize(
    "live",
    [
        pytest.param(owned("Service", NAME, uid="uid-0"), id="of-a-deleted-namesake"),
        pytest.param(owned("Service", NAME, metadata={"deletionTimestamp": "now"}), id="ours-and-going"),
    ],
)
def test_leftovers_are_waited_for(live: Object) -> None:
    assert not check_names([(SERVICE, NAME)], observed(named={(SERVICE, NAME): live}))


def test_the_selector_of_an_older_operator_is_kept_and_its_labels_on_the_pods() -> None:
    live, wanted = deployment(), deployment()
    live["spec"]["selector"] = {"matchLabels": {"app": "old"}}
    kept = keep_selector(wanted, live)
    assert kept["spec"]["selector"] == {"matchLabels": {"app": "old"}}
    assert kept["spec"]["template"]["metadata"]["labels"]["app"] == "old"
    assert wanted["spec"]["selector"] != kept["spec"]["selector"], "the argument is left alone"


def test_optional_children_that_are_not_wanted_any_more_are_deleted() -> None:
    autoscaler = owned("HorizontalPodAutoscaler", NAME)
    budget = owned("PodDisruptionBudget", NAME)
    seen = observed(
        named={(HORIZONTAL_POD_AUTOSCALER, NAME): autoscaler, (POD_DISRUPTION_BUDGET, NAME): budget}
    )
    (deletion,) = superfluous([budget], seen, gate())
    assert (deletion.kind, deletion.uid) == (HORIZONTAL_POD_AUTOSCALER, "uid-of-chat")


def test_a_foreign_autoscaler_of_the_same_name_is_never_deleted() -> None:
    theirs = foreign("HorizontalPodAutoscaler", NAME)
    assert superfluous([], observed(named={(HORIZONTAL_POD_AUTOSCALER, NAME): theirs}), gate()) == []


def test_a_job_goes_only_after_its_verdict_was_kept() -> None:
    job = preflight_job(state="Complete")
    seen = observed(jobs=(job,))
    assert superfluous([], seen, gate(job=job, is_recorded=False)) == []
    assert [deletion.name for deletion in superfluous([], seen, gate(job=job))] == [job["metadata"]["name"]]


def test_a_job_of_an_earlier_pair_goes_at_once_and_nobody_elses_ever() -> None:
    earlier, theirs = preflight_job(key="eeeeeeee"), preflight_job(owner="other", key="eeeeeeee")
    seen = observed(jobs=(earlier, theirs))
    names = [deletion.name for deletion in superfluous([], seen, gate(is_recorded=False))]
    assert names == ["chat-preflight-eeeeeeee"]


def test_a_failed_job_goes_when_it_is_to_be_repeated() -> None:
    job = preflight_job(state="Failed")
    seen = observed(jobs=(job,))
    assert superfluous([], seen, gate(job=job, is_recorded=False, retry_after=12)) == []
    assert len(superfluous([], seen, gate(job=job, is_recorded=False, retry_after=0))) == 1


def configured(config_map: str) -> dict[str, Any]:
    return {"volumes": [{"name": "config", "configMap": {"name": config_map}}]}


def with_config(live: Object, config_map: str) -> Object:
    live["spec"]["template"]["spec"] = configured(config_map)
    return live


@pytest.mark.parametrize(
    ("live", "pods", "deleted"),
    [
        pytest.param(deployment(), [], ["old"], id="nobody-reads-it"),
        pytest.param(deployment(updated=1), [], [], id="rollout-under-way"),
        pytest.param(deployment(), [serving_pod("a", spec=configured("old"))], [], id="a-pod-reads-it"),
        pytest.param(
            deployment(),
            [serving_pod("a", is_leaving=True, spec=configured("old"))],
            [],
            id="a-leaving-pod-reads-it",
        ),
        pytest.param(None, [], [], id="no-deployment-yet"),
    ],
)
def test_a_configuration_goes_when_no_pod_can_need_it(
    live: Object | None, pods: list[Object], deleted: list[str]
) -> None:
    config_maps = tuple(owned("ConfigMap", name) for name in ("old", "current", "wanted"))
    named = {(DEPLOYMENT, NAME): with_config(live, "current")} if live is not None else {}
    seen = observed(named=named, pods=tuple(pods), config_maps=config_maps)
    found = superfluous([owned("ConfigMap", "wanted")], seen, gate())
    assert [(item.kind, item.name) for item in found] == [(CONFIG_MAP, name) for name in deleted]


def test_ownership_is_by_uid_and_not_by_name() -> None:
    seen = observed(named={(DEPLOYMENT, NAME): owned("Deployment", NAME, uid="uid-0")})
    assert seen.deployment is None
    assert seen.uid == UID
