"""One reconcile: read the cluster, decide, write what differs, tell it in the status.

Level-based: the same for a new resource, a changed one, an event of a child and the periodic look. All state
is what the API server holds, so it may be stopped after any write and started again from the top. Most looks
find nothing to do; these need not ask for what is remembered. As soon as something is to be done, the look
begins anew with what the API server says.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from draftline_operator.cluster.interface import Cluster
from draftline_operator.cluster.observe import (
    accelerator_memory,
    hash_secrets,
    observe,
    observe_checks,
    observe_jobs,
    observe_name,
    selector,
)
from draftline_operator.constants import SERVING
from draftline_operator.errors import (
    ClusterError,
    ConflictError,
    ForbiddenError,
    InvalidSpecError,
    NameConflictError,
    NotFromMemoryError,
    NotLeadingError,
    OperatorError,
    RejectedError,
)
from draftline_operator.log import log_event
from draftline_operator.models.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    SPECULATIVE_DEPLOYMENT,
    Kind,
    kind_of,
)
from draftline_operator.models.names import pair_record_name, serving_name, short_hash
from draftline_operator.models.observed import Object, Observed, is_terminating
from draftline_operator.models.quantity import parse_quantity
from draftline_operator.models.resource import Manifest, RenderSettings, Resource
from draftline_operator.models.spec import parse_spec
from draftline_operator.planning.api_service_ownership import MetricsApiState
from draftline_operator.planning.autoscaling import autoscaling_condition
from draftline_operator.planning.changes import changes_of, check_names, keep_selector, keys_of, superfluous
from draftline_operator.planning.conditions import Problem, Situation, decide_conditions
from draftline_operator.planning.gate import Gate, awaiting, checks_of_others, decide_gate
from draftline_operator.planning.pod_faults import find_fault
from draftline_operator.planning.replicas import replicas_of_invalid, replicas_to_fill_in, wanted_replicas
from draftline_operator.planning.rollout import read_rollout
from draftline_operator.planning.status import (
    failure_change,
    keep_what_was_seen,
    status_change,
    status_document,
)
from draftline_operator.resources.pair import pair_key
from draftline_operator.services.children import render_preflight, render_surroundings, render_workload
from draftline_operator.services.pair_records import PairClaims, find_record, keep_record, read_record
from draftline_operator.services.scaling import Loads, scale

_SOON_SECONDS = 1.0
_NAME_CONFLICT_SECONDS = 15.0
_REFUSED_SECONDS = 60.0
_SECRETS_SECONDS = 60.0
_OTHERS_JOB_SECONDS = 30.0
_TOLD_AFTER = 5
"""Failures in a row: some fifteen seconds."""
_STAMP = "%Y-%m-%dT%H:%M:%SZ"
_OF_THE_MOMENT = (ConflictError, NotLeadingError)

# What stands in the way of a spec is told by these reasons, and looked at again after so long.
_PROBLEMS: Final[Mapping[type[OperatorError], tuple[str, float | None]]] = {
    InvalidSpecError: ("InvalidSpec", None),
    NameConflictError: ("NameConflict", _NAME_CONFLICT_SECONDS),
    ForbiddenError: ("Forbidden", _REFUSED_SECONDS),
    RejectedError: ("Rejected", _REFUSED_SECONDS),
}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a reconcile needs beside the resource."""

    cluster: Cluster
    remembered: Cluster | None = None
    """The same as far as it is remembered: raises `NotFromMemoryError` where something is to be written."""
    loads: Loads
    settings: Callable[[], RenderSettings]
    """Asked each time: what the cluster offers may change."""
    optional_kinds: Callable[[], Collection[Kind]]
    """Of other projects' kinds those that are installed."""
    now: Callable[[], datetime.datetime]
    metrics_api: Callable[[], MetricsApiState | None] = lambda: None
    claims: PairClaims = field(default_factory=PairClaims)
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True, slots=True)
class Outcome:
    """When to look again, without any event; None: at the next periodic look."""

    requeue_after: float | None = None
    is_gone: bool = False


async def reconcile(namespace: str, name: str, surroundings: Surroundings, *, failures: int = 0) -> Outcome:
    """Raises `ClusterError` where a retry may help; whatever else stands in the way is told in the status.

    So is what has failed before, so many times in a row that it looks as if it would stay.
    """
    if surroundings.remembered is not None:
        with contextlib.suppress(NotFromMemoryError):
            return await _look(namespace, name, surroundings, surroundings.remembered, failures)
    return await _look(namespace, name, surroundings, surroundings.cluster, failures)


async def _look(
    namespace: str, name: str, surroundings: Surroundings, cluster: Cluster, failures: int
) -> Outcome:
    body = await cluster.get(SPECULATIVE_DEPLOYMENT, namespace, name)
    if body is None or is_terminating(body):
        return Outcome(is_gone=True)
    return await _Reconcile(body, surroundings, cluster, failures).run()


class _Reconcile:
    """The state of one pass."""

    def __init__(self, body: Object, surroundings: Surroundings, cluster: Cluster, failures: int) -> None:
        self._body = body
        self._failures = failures
        self._around = surroundings
        self._cluster = cluster
        self._settings = surroundings.settings()
        self._namespace: str = body["metadata"]["namespace"]
        self._name: str = body["metadata"]["name"]
        status = body.get("status") or {}
        self._observed = Observed(uid=body["metadata"]["uid"], name=self._name, status=status)
        self._has_observed = False
        self._gate: Gate | None = None
        self._problem: Problem | None = None
        self._warning: Problem | None = None
        self._wanted: int | None = None
        self._requeue_after: float | None = None

    async def run(self) -> Outcome:
        if self._observed.status.get("observedGeneration") != self._body["metadata"]["generation"]:
            self._leave_memory()  # a new spec: there will be something to write
        try:
            kinds = self._around.optional_kinds()
            self._observed = await observe(self._cluster, self._body, optional_kinds=kinds)
            self._has_observed = True
            await self._follow(self._read_resource())
        except (InvalidSpecError, NameConflictError, ForbiddenError, RejectedError) as error:
            reason, seconds = _PROBLEMS[type(error)]
            self._problem = Problem(reason, str(error))
            self._look_again(seconds)
            await self._scale_all_the_same()
        except ClusterError as error:
            await self._tell_of(error)
            raise
        finally:
            self._around.claims.release(self._namespace, self._name)
        if self._problem is not None:
            self._leave_memory()
        await self._tell()
        return Outcome(self._requeue_after)

    async def _follow(self, resource: Resource) -> None:
        """Nothing is written before all of it is known to be possible, nor before what it uses is there."""
        self._wanted = wanted_replicas(resource.spec, self._live_replicas())
        key = pair_key(resource, self._settings)
        gate, record = await self._decide_gate(key)
        secrets_hash = await self._hash_secrets(resource)
        pods = [] if self._is_held else await self._render_pods(resource, gate, secrets_hash)
        desired = [*render_surroundings(resource, self._settings), *pods]
        if not await self._names_are_free(desired):
            self._problem = Problem("Replacing", "children of a deleted namesake are about to go")
            self._look_again(_SOON_SECONDS)
            return
        await self._fill_in_replicas(resource)
        for manifest in changes_of(desired, self._observed):
            await self._apply(manifest)
        if await keep_record(self._cluster, resource, gate, record):
            self._log("recorded a verdict", CONFIG_MAP, pair_record_name(key))
            self._look_again(0.0)  # to clean up after the Job
        await self._scale()
        await self._clean_up(desired, gate)

    # ---------------------------------------------------------------------------------- reading and deciding

    def _read_resource(self) -> Resource:
        metadata = self._body["metadata"]
        return Resource(
            name=self._name,
            namespace=self._namespace,
            uid=metadata["uid"],
            generation=metadata["generation"],
            spec=parse_spec(self._body.get("spec") or {}),
            labels=metadata.get("labels") or {},
            annotations=metadata.get("annotations") or {},
        )

    async def _decide_gate(self, key: str) -> tuple[Gate, Object | None]:
        """And the pair's record. Whoever is to make a pair's Job first sees to it that nobody else does."""
        record = await find_record(self._cluster, self._namespace, key)
        gate = await self._judge(key, record)
        if gate.state == "missing":
            self._leave_memory()
            if self._around.claims.take(self._namespace, key, self._name):
                # Its last holder may have made one since the Jobs were listed, or deleted it again: but not
                # before the verdict was recorded, so that is looked for last.
                self._observed = await observe_jobs(self._cluster, self._observed, self._namespace)
                record = await find_record(self._cluster, self._namespace, key)
                gate = await self._judge(key, record)
            else:
                gate = awaiting(key, "another resource is about to check the same pair")
                self._look_again(_SOON_SECONDS)
        if gate.retry_after is not None and not gate.is_repeat_due:
            self._look_again(max(_SOON_SECONDS, gate.retry_after))
        self._gate = gate
        return gate, record

    async def _judge(self, key: str, record: Object | None) -> Gate:
        if checks_of_others(key, self._observed):
            self._observed = await observe_checks(self._cluster, self._observed, self._namespace, key)
        now = self._around.now()
        return decide_gate(key, record=read_record(record), observed=self._observed, now=now)

    async def _hash_secrets(self, resource: Resource) -> str | None:
        """Of its models' credentials; one that is missing holds whatever would need it."""
        references = (source.credentials_secret_ref for source in resource.spec.models.values())
        names = [reference.name for reference in references if reference is not None]
        if not names:
            return None
        self._look_again(_SECRETS_SECONDS)  # nobody tells when they change
        hashes = await hash_secrets(self._cluster, self._namespace, names)
        missing = next((name for name, found in hashes.items() if found is None), None)
        if missing is not None:
            self._warning = Problem("SecretNotFound", f"Secret {missing} does not exist")
        return short_hash(hashes)

    @property
    def _is_held(self) -> bool:
        """Whether pods that exist stay as they are, and no new ones are made."""
        return self._warning is not None

    async def _render_pods(self, resource: Resource, gate: Gate, secrets_hash: str | None) -> list[Manifest]:
        """The Deployment of an open gate, or the Job that may open it."""
        if gate.is_open and gate.result is not None:
            *others, deployment = render_workload(
                resource,
                self._settings,
                result=gate.result,
                replicas=max(self._wanted or 0, self._live_replicas() or 0),
                secrets_hash=secrets_hash,
            )
            return [*others, keep_selector(deployment, self._observed.deployment)]
        if gate.state == "failed":
            return []
        if gate.state == "running" and gate.job is None:  # another resource's
            self._look_again(_OTHERS_JOB_SECONDS)
            return []
        memory = await self._accelerator_memory(resource)
        return render_preflight(resource, self._settings, accelerator_memory_bytes=memory)

    async def _accelerator_memory(self, resource: Resource) -> int | None:
        accelerator = resource.spec.accelerator
        if accelerator is None:
            return None
        if accelerator.memory is not None:
            return int(parse_quantity(accelerator.memory))
        if not self._settings.knows_nodes:
            return None
        return await accelerator_memory(self._cluster, resource.spec.pod_template.node_selector)

    async def _names_are_free(self, desired: Sequence[Manifest]) -> bool:
        """The Deployment's, too, before there is one.

        Of what is listed by label, names are looked at one by one: without our labels it is not ours.
        """
        listed = {found["metadata"]["name"] for found in (*self._observed.config_maps, *self._observed.jobs)}
        keys = keys_of(desired) | {(DEPLOYMENT, serving_name(self._name))}
        for kind, name in keys:
            if kind in (CONFIG_MAP, JOB) and name not in listed:
                self._observed = await observe_name(
                    self._cluster, self._observed, self._namespace, kind, name
                )
        return check_names(keys, self._observed)

    def _leave_memory(self) -> None:
        """For a look that takes nothing from it, where this one did."""
        if self._cluster is self._around.remembered:
            raise NotFromMemoryError

    def _live_replicas(self) -> int | None:
        live = self._observed.deployment
        return int(live["spec"].get("replicas", 1)) if live is not None else None

    # ----------------------------------------------------------------------------------------------- writing

    async def _fill_in_replicas(self, resource: Resource) -> None:
        """Against the version that was read: somebody may have written it by now."""
        replicas = replicas_to_fill_in(resource.spec, self._wanted or 0)
        if replicas is not None:
            version = self._body["metadata"]["resourceVersion"]
            change = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
            body = await self._cluster.patch(SPECULATIVE_DEPLOYMENT, self._namespace, self._name, change)
            self._body = body or self._body

    async def _apply(self, manifest: Manifest) -> None:
        kind = kind_of(manifest)
        self._observed = self._observed.with_object(kind, await self._cluster.apply(manifest))
        self._log("applied a child", kind, manifest["metadata"]["name"])

    async def _scale(self) -> None:
        live = self._observed.deployment
        if live is None or self._wanted is None or self._live_replicas() == self._wanted:
            return
        self._leave_memory()
        scaled = await scale(
            self._cluster,
            live,
            self._wanted,
            pods=self._observed.serving_pods,
            loads=self._around.loads,
            is_still_wanted=self._is_current,
            sleep=self._around.sleep,
        )
        if scaled is None:
            self._look_again(0.0)
            return
        self._observed = self._observed.with_object(DEPLOYMENT, scaled)
        self._log("scaled", DEPLOYMENT, self._name, replicas=self._wanted)

    async def _scale_all_the_same(self) -> None:
        """Pods that serve follow the load also under a spec that nothing else of can be followed."""
        if self._wanted is None:
            self._wanted = replicas_of_invalid(self._body.get("spec") or {}, self._live_replicas())
        try:
            await self._scale()
        except ClusterError:
            self._look_again(_SOON_SECONDS)  # what stands in the way of the spec is to be told first
        except (ForbiddenError, RejectedError):
            pass

    async def _is_current(self) -> bool:
        """Whether the resource still says what this pass is about."""
        current = await self._cluster.get(SPECULATIVE_DEPLOYMENT, self._namespace, self._name)
        read = self._body["metadata"]
        return current is not None and all(
            current["metadata"][key] == read[key] for key in ("uid", "generation")
        )

    async def _clean_up(self, desired: Sequence[Manifest], gate: Gate) -> None:
        for deletion in superfluous(desired, self._observed, gate):
            if self._is_held and deletion.kind == CONFIG_MAP:  # what the pods will read is not rendered
                continue
            await self._cluster.delete(deletion.kind, self._namespace, deletion.name, uid=deletion.uid)
            self._log("deleted a child", deletion.kind, deletion.name)
            if deletion.kind == JOB and gate.is_repeat_due:
                self._look_again(_SOON_SECONDS)

    # ----------------------------------------------------------------------------------------------- telling

    async def _tell(self) -> None:
        deployment = self._observed.deployment
        rollout = read_rollout(deployment) if deployment is not None else None
        wanted = self._wanted if self._wanted is not None else self._live_replicas() or 0
        situation = Situation(
            wanted=wanted,
            rollout=rollout,
            gate=self._gate,
            problem=self._problem,
            warning=self._warning,
            fault=find_fault(self._observed.serving_pods),
            autoscaling=autoscaling_condition(
                self._observed,
                is_wanted=(self._body.get("spec") or {}).get("autoscaling") is not None,
                provider=self._settings.autoscaling_provider,
                has_keda=self._settings.has_keda,
                wanted_replicas=wanted,
                metrics_api=self._around.metrics_api(),
            ),
        )
        document = status_document(
            observed=self._observed,
            generation=self._body["metadata"]["generation"],
            conditions=decide_conditions(situation),
            gate=self._gate,
            rollout=rollout,
            selector=selector(SERVING, name=self._name),
            now=self._around.now().strftime(_STAMP),
        )
        if not self._has_observed:
            document = keep_what_was_seen(document, self._observed.status)
        if change := status_change(self._observed.status, document):
            await self._write_status(change)

    async def _tell_of(self, error: ClusterError) -> None:
        """What keeps failing, such as an admission webhook that does not answer, is for a person to see."""
        if self._failures < _TOLD_AFTER or not self._has_observed or isinstance(error, _OF_THE_MOMENT):
            return
        self._leave_memory()
        now = self._around.now().strftime(_STAMP)
        status, generation = self._observed.status, self._body["metadata"]["generation"]
        change = failure_change(status, str(error), generation=generation, now=now)
        with contextlib.suppress(OperatorError):
            if change:
                await self._write_status(change)

    async def _write_status(self, change: Mapping[str, Any]) -> None:
        """Only into what was read: a namesake that was made since, or a newer spec, is looked at first."""
        version = self._body["metadata"]["resourceVersion"]
        try:
            await self._cluster.patch(
                SPECULATIVE_DEPLOYMENT,
                self._namespace,
                self._name,
                {"metadata": {"resourceVersion": version}, "status": change},
                subresource="status",
            )
        except ConflictError:
            self._leave_memory()
            self._look_again(0.0)

    def _look_again(self, seconds: float | None) -> None:
        """The soonest of all wishes counts."""
        known = [wish for wish in (seconds, self._requeue_after) if wish is not None]
        self._requeue_after = min(known, default=None)

    def _log(self, message: str, kind: Kind, name: str, *, replicas: int | None = None) -> None:
        log_event(
            _logger,
            logging.INFO,
            message,
            namespace=self._namespace,
            resource=self._name,
            kind=kind.kind,
            name=name,
            replicas=replicas,
        )
