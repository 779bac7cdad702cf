"""One look at a resource that is refused, that somebody interrupts, or that finds something due."""

from __future__ import annotations

import builtins
import datetime
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import pytest

from draftline_operator.cluster.forwarding import ForwardingCluster
from draftline_operator.cluster.interface import Cluster
from draftline_operator.cluster.memory import ObjectMemory
from draftline_operator.cluster.remembering import RememberedCluster, RememberingCluster
from draftline_operator.constants import (
    API_VERSION,
    COMPONENT_LABEL,
    FIELD_MANAGER,
    INSTANCE_LABEL,
    KIND,
    MANAGED_BY_LABEL,
    NAME_LABEL,
    OUR_LABELS,
    PREFLIGHT,
    REVISION_LABEL,
)
from draftline_operator.errors import ClusterError, ForbiddenError, RejectedError
from draftline_operator.handlers.registry import watched_kinds
from draftline_operator.models.kinds import DEPLOYMENT, JOB, SERVICE_ACCOUNT, Kind, kind_of
from draftline_operator.models.names import pair_record_name
from draftline_operator.models.observed import Object
from draftline_operator.models.resource import Manifest
from draftline_operator.planning.gate import PATIENCE_SECONDS
from draftline_operator.resources.pair import pair_key
from draftline_operator.services.pair_records import PairClaims
from draftline_operator.services.reconcile import Outcome, Surroundings, reconcile
from support.object_store import ObjectStore
from support.observations import (
    NAME,
    NOW,
    UID,
    deployment,
    foreign,
    owned,
    preflight_job,
    preflight_pod,
    serving_pod,
)
from support.speculative_deployments import PAIR, SETTINGS, changed, resource

NAMESPACE = "models"
MOMENT = datetime.datetime.fromisoformat(NOW)
LONG_AGO = "2026-11-29T12:00:00Z"
SPEC = changed(PAIR, replicas=1)
RESOURCE = ("SpeculativeDeployment", NAMESPACE, NAME)


class Server(ObjectStore):
    """With as much of an apply as a new child takes; `refusals` are by verb and kind."""

    def __init__(self, *objects: Manifest) -> None:
        super().__init__(objects)
        self.refusals: dict[tuple[str, Kind], Exception] = {}

    async def apply(self, manifest: Manifest, *, field_manager: str | None = None) -> Object:
        self._refuse("apply", kind_of(manifest))
        metadata = {"uid": f"uid-of-{manifest['metadata']['name']}", **manifest["metadata"]}
        return self.put({**manifest, "metadata": metadata})

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> builtins.list[Object]:
        self._refuse("list", kind)
        return await super().list(kind, namespace, labels=labels, is_cached=is_cached)

    async def delete(self, kind: Kind, namespace: str | None, name: str, **preconditions: Any) -> None:
        self._refuse("delete", kind)
        await super().delete(kind, namespace, name, resource_version=preconditions.get("resource_version"))

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, change: Mapping[str, Any], **options: Any
    ) -> Object | None:
        self._refuse("patch", kind)
        return await super().patch(kind, namespace, name, change, **options)

    def _refuse(self, verb: str, kind: Kind) -> None:
        if (refusal := self.refusals.get((verb, kind))) is not None:
            raise refusal

    def jobs(self) -> builtins.list[str]:
        return [name for kind, _, name in self.objects if kind == JOB.kind]

    def conditions(self, name: str = NAME) -> dict[str, tuple[str, str]]:
        """Status and reason by type."""
        status = self.objects["SpeculativeDeployment", NAMESPACE, name].get("status", {})
        return {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())}


class Interrupted(ForwardingCluster):
    """Somebody acts just after the first look at the Jobs."""

    def __init__(self, cluster: Cluster, act: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(cluster)
        self._acts = [act]

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> builtins.list[Object]:
        found = await super().list(kind, namespace, labels=labels, is_cached=is_cached)
        if kind == JOB and self._acts:
            await self._acts.pop()()
        return found


class Loads:
    async def refresh(self, namespace: str, pods: Iterable[Object]) -> Mapping[str, int | None]:
        return {pod["metadata"]["name"]: place for place, pod in enumerate(pods)}


async def no_time_passes(seconds: float) -> None:
    pass


async def look(
    cluster: Cluster,
    name: str = NAME,
    *,
    remembered: Cluster | None = None,
    claims: PairClaims | None = None,
    sleep: Callable[[float], Awaitable[None]] = no_time_passes,
    failures: int = 0,
) -> Outcome:
    surroundings = Surroundings(
        cluster=cluster,
        remembered=remembered,
        loads=Loads(),
        settings=lambda: SETTINGS,
        optional_kinds=lambda: (),
        now=lambda: MOMENT,
        claims=claims or PairClaims(),
        sleep=sleep,
    )
    return await reconcile(NAMESPACE, name, surroundings, failures=failures)


def body(
    spec: dict[str, Any] = SPEC, *, name: str = NAME, uid: str = UID, generation: int = 1, **parts: Any
) -> Manifest:
    metadata = {"namespace": NAMESPACE, "name": name, "uid": uid, "generation": generation}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec, **parts}


def check(spec: dict[str, Any] = SPEC, *, owner: str = NAME, made: str = LONG_AGO, state: str = "") -> Object:
    """The Job of the pair of this spec."""
    job = preflight_job(key=pair_key(resource(spec), SETTINGS), owner=owner, state=state, ended=LONG_AGO)
    labels = {NAME_LABEL: "draftline", COMPONENT_LABEL: PREFLIGHT, INSTANCE_LABEL: owner}
    job["metadata"] |= {"namespace": NAMESPACE, "labels": labels, "creationTimestamp": made}
    return job


# ------------------------------------------------------------------------------------ what nobody may look at

TOLD: dict[str, Any] = {
    "observedGeneration": 1,
    "conditions": [
        {"type": kind, "status": status, "reason": "AsSeen", "message": "", "lastTransitionTime": LONG_AGO}
        for kind, status in (("Ready", "True"), ("Available", "True"), ("Degraded", "False"))
    ],
    "replicas": 2,
    "readyReplicas": 2,
    "selector": "a=b",
    "currentRevision": "0123abcd",
    "queueDepth": 3,
}


@pytest.mark.parametrize("refusal", [ForbiddenError("may not"), RejectedError("bad")], ids=["403", "400"])
async def test_pods_that_may_not_be_looked_at_are_not_told_to_be_gone(refusal: Exception) -> None:
    server = Server(body(generation=2, status=TOLD))
    server.refusals["list", JOB] = refusal
    outcome = await look(server)
    reason = type(refusal).__name__.removesuffix("Error")
    conditions = server.conditions()
    assert conditions["Ready"] == ("False", reason)
    assert conditions["Progressing"] == ("False", reason)
    assert conditions["Degraded"] == ("True", reason)
    assert conditions["Available"] == ("True", "AsSeen")
    status = server.objects[RESOURCE]["status"]
    kept = ("replicas", "readyReplicas", "selector", "currentRevision", "queueDepth")
    assert {key: status[key] for key in kept} == {key: TOLD[key] for key in kept}
    assert status["observedGeneration"] == 2
    assert outcome.requeue_after == 60


async def test_what_keeps_failing_is_told_and_tried_on() -> None:
    """As where an admission webhook does not answer."""
    server = Server(body())
    server.refusals["apply", SERVICE_ACCOUNT] = ClusterError("failed calling webhook")
    for failures in range(5):
        with pytest.raises(ClusterError):
            await look(server, failures=failures)
        assert server.conditions() == {}, "it may pass"
    with pytest.raises(ClusterError, match="webhook"):
        await look(server, failures=5)
    assert server.conditions() == {"Degraded": ("True", "ClusterError")}
    server.refusals.clear()
    await look(server, failures=6)
    assert server.conditions()["Degraded"] == ("False", "AsExpected")


async def test_of_a_new_resource_that_nobody_may_look_at_all_conditions_are_there() -> None:
    server = Server(body())
    server.refusals["list", JOB] = ForbiddenError("may not")
    await look(server)
    assert len(server.conditions()) == 7
    assert server.conditions()["Ready"] == ("False", "Forbidden")


# ---------------------------------------------------------------------------------- what others do in between


@pytest.mark.parametrize(
    "later",
    [
        pytest.param(body(uid="uid-2"), id="namesake"),
        pytest.param(body(changed(SPEC, image="registry.test/server:9"), generation=2), id="newer-spec"),
    ],
)
async def test_what_was_found_out_is_not_told_of_a_later_resource(later: Manifest) -> None:
    server = Server(body())

    def replace() -> None:
        server.before_patch = lambda: None
        server.put(later)

    server.before_patch = replace
    outcome = await look(server)
    assert server.conditions() == {}
    assert outcome.requeue_after == 0
    await look(server)
    assert server.objects[RESOURCE]["status"]["observedGeneration"] == later["metadata"]["generation"]


async def test_a_resource_that_is_gone_by_then_is_told_nothing() -> None:
    server = Server(body())
    server.before_patch = lambda: server.objects.clear()
    await look(server)
    assert server.objects == {}


def served(replicas: int) -> Server:
    """More pods than are wanted."""
    pods = [serving_pod(f"chat-{number}") for number in range(replicas)]
    return Server(body(), deployment(replicas=replicas, namespace=NAMESPACE), *pods)


def replicas_of(server: Server) -> int:
    return int(server.objects["Deployment", NAMESPACE, NAME]["spec"]["replicas"])


async def test_fewer_pods_are_asked_for_while_that_is_still_wanted() -> None:
    server = served(3)
    await look(server)
    assert replicas_of(server) == 1


@pytest.mark.parametrize(
    ("spec", "refusal"),
    [
        pytest.param(changed(SPEC, image=""), None, id="invalid"),
        pytest.param(SPEC, RejectedError("no"), id="rejected"),
        pytest.param(SPEC, ForbiddenError("quota"), id="forbidden"),
    ],
)
@pytest.mark.parametrize("replicas", [0, 1, 5])
async def test_under_a_spec_that_cannot_be_followed_pods_are_scaled_all_the_same(
    spec: dict[str, Any], refusal: Exception | None, replicas: int
) -> None:
    server = served(3)
    server.put(body(changed(spec, replicas=replicas), generation=2))
    if refusal is not None:
        server.refusals["apply", SERVICE_ACCOUNT] = refusal
    await look(server)
    assert server.conditions()["Ready"][0] == "False"
    assert replicas_of(server) == replicas


@pytest.mark.parametrize(("asked", "replicas"), [(1, 2), (9, 4), (3, 3), (0, 0)])
async def test_under_an_invalid_spec_the_autoscalers_bounds_hold(asked: int, replicas: int) -> None:
    server = served(3)
    bounds = {"minReplicas": 2, "maxReplicas": 4}
    server.put(body(changed(SPEC, image="", replicas=asked, autoscaling=bounds), generation=2))
    await look(server)
    assert server.conditions()["Ready"] == ("False", "InvalidSpec")
    assert replicas_of(server) == replicas


async def test_what_stands_in_the_way_is_told_also_where_scaling_fails() -> None:
    server = served(3)
    server.put(body(changed(SPEC, image="", replicas=1), generation=2))
    server.refusals["patch", DEPLOYMENT] = ClusterError("failed calling webhook")
    outcome = await look(server)
    assert server.conditions()["Ready"] == ("False", "InvalidSpec")
    assert outcome.requeue_after == 1


async def test_no_pods_are_lost_where_more_are_wanted_again_in_the_meantime() -> None:
    server = served(3)

    async def scale_out(seconds: float) -> None:
        server.put(body(changed(SPEC, replicas=4), generation=2))

    outcome = await look(server, sleep=scale_out)
    assert replicas_of(server) == 3
    assert outcome.requeue_after == 0
    await look(server)
    assert replicas_of(server) == 4


# ---------------------------------------------------------------------------- one Job for a pair, or one more


async def test_a_job_that_was_made_since_the_jobs_were_listed_is_seen_before_another_is_made() -> None:
    server = Server(body(), body(name="other", uid="uid-of-other"))
    claims = PairClaims()
    await look(Interrupted(server, lambda: look(server, "other", claims=claims)), claims=claims)
    (job,) = server.jobs()
    assert job.startswith("other-")
    assert server.conditions()["ModelsVerified"] == ("Unknown", "PreflightRunning")


async def test_while_another_resource_is_about_to_make_the_job_none_is_made() -> None:
    server, claims = Server(body()), PairClaims()
    claims.take(NAMESPACE, pair_key(resource(SPEC), SETTINGS), "other")
    outcome = await look(server, claims=claims)
    assert server.jobs() == []
    assert outcome.requeue_after == 1
    claims.release(NAMESPACE, "other")
    await look(server, claims=claims)
    assert len(server.jobs()) == 1


@pytest.mark.parametrize(
    ("state", "num_jobs"),
    [
        pytest.param({"waiting": {"reason": "ImagePullBackOff"}}, 2, id="stuck"),
        pytest.param({"running": {"startedAt": NOW}}, 1, id="at-work"),
    ],
)
async def test_a_job_of_another_resource_that_is_stuck_holds_up_nobody(
    state: dict[str, Any], num_jobs: int
) -> None:
    job = check(owner="other")
    pod = preflight_pod(job, None)
    pod["kind"] = "Pod"
    revision = {REVISION_LABEL: pair_key(resource(SPEC), SETTINGS)}
    pod["metadata"] |= {
        "namespace": NAMESPACE,
        "uid": "uid-of-pod",
        "labels": job["metadata"]["labels"] | revision,
    }
    pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": "preflight", "state": state}]}
    server = Server(body(), job, pod)
    assert (MOMENT - datetime.datetime.fromisoformat(LONG_AGO)).total_seconds() > PATIENCE_SECONDS
    await look(server)
    assert len(server.jobs()) == num_jobs


@pytest.mark.parametrize(
    ("state", "is_made_anew"),
    [
        pytest.param({"waiting": {"reason": "ImagePullBackOff"}}, True, id="waits"),
        pytest.param({"running": {"startedAt": NOW}}, False, id="at-work"),
    ],
)
async def test_a_job_that_waits_for_what_the_spec_does_not_ask_for_any_more_is_made_anew(
    state: dict[str, Any], is_made_anew: bool
) -> None:
    """The pair is the same, so the Job has the same name."""
    server = Server(body())
    await look(server)
    (name,) = server.jobs()
    job = server.objects["Job", NAMESPACE, name]
    job["metadata"]["labels"] = check()["metadata"]["labels"]
    pod = preflight_pod(job, None)
    pod["kind"] = "Pod"
    pod["metadata"] |= {"namespace": NAMESPACE, "uid": "uid-of-pod", "labels": job["metadata"]["labels"]}
    pod["status"] = {"phase": "Pending", "containerStatuses": [{"name": "preflight", "state": state}]}
    server.put(pod)
    await look(server)
    assert server.jobs() == [name], "the same spec again"
    tolerant = changed(SPEC, podTemplate={"tolerations": [{"key": "gpu", "operator": "Exists"}]})
    server.put(body(tolerant, generation=2))
    await look(server)
    assert (server.jobs() == []) == is_made_anew
    await look(server)
    (found,) = [server.objects["Job", NAMESPACE, name] for name in server.jobs()]
    tolerations = found["spec"]["template"]["spec"].get("tolerations", [])
    assert any(toleration["key"] == "gpu" for toleration in tolerations) == is_made_anew


# ----------------------------------------------------------------------------- a check that is to be repeated

WITH_SECRET = changed(SPEC, target__model={"uri": "hf://org/target", "credentialsSecretRef": {"name": "hub"}})


async def test_a_repeat_that_is_due_while_a_secret_is_missing_is_no_hot_loop() -> None:
    server = Server(body(WITH_SECRET), check(WITH_SECRET, state="Failed"))
    await look(server)
    assert server.jobs() == [], "it waits for the Secret, not for the failed Job"
    outcome = await look(server)
    assert server.jobs() == []
    assert outcome.requeue_after == 60
    assert server.conditions()["Degraded"] == ("True", "SecretNotFound")


async def test_a_repeat_that_is_due_and_may_not_be_made_is_no_hot_loop() -> None:
    server = Server(body(), check(state="Failed"))
    server.refusals["delete", JOB] = ForbiddenError("may not")
    outcome = await look(server)
    assert len(server.jobs()) == 1
    assert outcome.requeue_after == 60


async def test_a_repeat_that_is_due_is_made_at_the_next_look() -> None:
    server = Server(body(), check(state="Failed"))
    outcome = await look(server)
    assert (server.jobs(), outcome.requeue_after) == ([], 1)
    await look(server)
    assert len(server.jobs()) == 1


# ----------------------------------------------------------------------------------------- what is remembered


class Watched(Server):
    """`asked` has kind and name, or labels, of each read; `tell` passes on what a watch would."""

    def __init__(self, *objects: Manifest) -> None:
        super().__init__(*objects)
        self.asked: list[tuple[str, str | None]] = []
        self.memory = ObjectMemory(watched_kinds(()))
        self.remembering = RememberingCluster(self, self.memory)
        self.remembered = RememberedCluster(self.remembering, self.memory)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        self.asked.append((kind.kind, name))
        return await super().get(kind, namespace, name)

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, is_cached: bool = False
    ) -> builtins.list[Object]:
        self.asked.append((kind.kind, labels))
        return await super().list(kind, namespace, labels=labels, is_cached=is_cached)

    def tell(self, event: str, found: Object) -> None:
        self.memory.saw(kind_of(found), event, found)

    async def look(self) -> Outcome:
        return await look(self.remembering, remembered=self.remembered)

    async def come_to_rest(self) -> None:
        """With a Job that runs."""
        for _ in range(3):
            await self.look()
        self.asked.clear()


async def test_a_look_that_finds_nothing_to_do_asks_for_nothing_that_is_known() -> None:
    server = Watched(body())
    await server.come_to_rest()
    before = dict(server.objects)
    await server.look()
    assert server.objects == before
    others = f"{MANAGED_BY_LABEL}!={FIELD_MANAGER}"
    missing = {("Deployment", NAME), ("ConfigMap", pair_record_name(pair_key(resource(SPEC), SETTINGS)))}
    assert set(server.asked) == {("HorizontalPodAutoscaler", others), *missing}


async def test_what_is_to_be_written_is_decided_on_what_the_api_server_says() -> None:
    """A child is gone, and a second one, of which no event has come yet, is somebody else's by now."""
    server = Watched(body())
    await server.come_to_rest()
    service = server.objects.pop(("Service", NAMESPACE, NAME))
    taken = foreign("PodDisruptionBudget", NAME)
    taken["metadata"]["namespace"] = NAMESPACE
    server.put(taken)
    server.tell("DELETED", service)
    await server.look()
    assert ("PodDisruptionBudget", NAME) in server.asked
    assert ("Service", NAMESPACE, NAME) not in server.objects, "nothing at all is written then"
    assert server.conditions()["Ready"] == ("False", "NameConflict")


async def test_a_child_that_is_gone_without_an_event_is_made_again_once_memory_is_gone() -> None:
    server = Watched(body())
    await server.come_to_rest()
    del server.objects["Service", NAMESPACE, NAME]
    await server.look()
    assert ("Service", NAMESPACE, NAME) not in server.objects
    server.memory.forget(NAMESPACE)
    await server.look()
    assert ("Service", NAMESPACE, NAME) in server.objects


async def test_a_new_spec_is_looked_at_once() -> None:
    server = Watched(body())
    await server.come_to_rest()
    changed_body = body(changed(SPEC, image="registry.test/server:9"), generation=2)
    server.tell("MODIFIED", server.put(changed_body | {"status": server.objects[RESOURCE]["status"]}))
    await server.look()
    reads = [asked for asked in server.asked if asked == ("PodDisruptionBudget", NAME)]
    assert len(reads) == 1
    assert server.objects[RESOURCE]["status"]["observedGeneration"] == 2


async def test_a_status_that_is_told_from_memory_is_not_told_of_a_later_resource() -> None:
    """The event of the new spec is on its way, that of a pod has come."""
    server = Watched(body())
    await server.come_to_rest()
    one_pod = deployment(replicas=1, updated=1, available=1, namespace=NAMESPACE, labels=OUR_LABELS)
    server.put(body(changed(SPEC, replicas=3), generation=2, status=server.objects[RESOURCE]["status"]))
    server.tell("ADDED", server.put(one_pod))
    await server.look()
    assert server.objects[RESOURCE]["status"]["observedGeneration"] == 2
    assert replicas_of(server) == 3


async def test_what_is_wrong_is_looked_at_as_it_is() -> None:
    """Leftovers of a namesake whose end no event tells are not waited for."""
    server = Watched(body())
    leftover = owned("Service", NAME, uid="uid-of-a-namesake")
    leftover["metadata"] |= {"namespace": NAMESPACE, "labels": dict(OUR_LABELS)}
    server.put(leftover)
    outcome = await server.look()
    assert (server.conditions()["Ready"], outcome.requeue_after) == (("False", "Replacing"), 1)
    del server.objects["Service", NAMESPACE, NAME]
    await server.look()
    assert ("Service", NAMESPACE, NAME) in server.objects
