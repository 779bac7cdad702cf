"""The operator may do what its code does, in both scopes, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from draftline_operator.models import kinds
from support.helm import NAMESPACE, Manifest, of_kind, only, template

Right = tuple[str, str, str, str]
"""API group, resource, name or empty for all, verb."""

NAMESPACED = {"scope": "namespaced", "watchNamespaces": ["team-a", "team-b"]}
BUILTIN = {"autoscaling": {"provider": "builtin"}}

_STAYS = ("get", "list", "watch", "create", "patch")
_COMES_AND_GOES = (*_STAYS, "delete")
WORKLOADS: dict[tuple[str, str], tuple[str, ...]] = {
    ("draftline.dev", "speculativedeployments"): ("get", "list", "watch", "patch"),
    ("draftline.dev", "speculativedeployments/status"): ("patch",),
    # For admission: owner references that block the owner's deletion.
    ("draftline.dev", "speculativedeployments/finalizers"): ("update",),
    ("", "services"): _STAYS,
    ("", "serviceaccounts"): _STAYS,
    ("apps", "deployments"): _STAYS,
    ("", "configmaps"): _COMES_AND_GOES,
    ("batch", "jobs"): _COMES_AND_GOES,
    ("policy", "poddisruptionbudgets"): _STAYS,
    ("networking.k8s.io", "networkpolicies"): _COMES_AND_GOES,
    ("autoscaling", "horizontalpodautoscalers"): ("list", "watch", "create", "patch", "delete"),
    ("monitoring.coreos.com", "servicemonitors"): _COMES_AND_GOES,
    ("keda.sh", "scaledobjects"): _COMES_AND_GOES,
    ("", "pods"): ("list", "watch", "patch"),
    ("", "secrets"): ("get",),
}
API_SERVICES = ("v1beta1.custom.metrics.k8s.io", "v1beta2.custom.metrics.k8s.io")


def rights(rules: Iterable[Mapping[str, Any]]) -> set[Right]:
    return {
        (group, resource, name, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }


def expected(table: Mapping[tuple[str, str], Iterable[str]]) -> set[Right]:
    return {(group, resource, "", verb) for (group, resource), verbs in table.items() for verb in verbs}


def granted(manifests: list[Manifest]) -> dict[str | None, set[Right]]:
    """What the operator's ServiceAccount may do, by namespace; None is everywhere. Built-in roles by name."""
    account = only(manifests, "ServiceAccount")["metadata"]["name"]
    roles = {
        (role["kind"], role["metadata"].get("namespace"), role["metadata"]["name"]): rights(role["rules"])
        for kind in ("Role", "ClusterRole")
        for role in of_kind(manifests, kind)
    }
    found: dict[str | None, set[Right]] = {}
    for binding in of_kind(manifests, "RoleBinding") + of_kind(manifests, "ClusterRoleBinding"):
        (subject,) = binding["subjects"]
        assert subject == {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
        namespace, reference = binding["metadata"].get("namespace"), binding["roleRef"]
        builtin = {("", reference["name"], "", "bound")}
        key = (reference["kind"], namespace, reference["name"])
        found.setdefault(namespace, set()).update(roles.get(key, builtin))
    return found


def own(name: str = "draftline", *, metrics_api: bool) -> set[Right]:
    lease = {("coordination.k8s.io", "leases", name, verb) for verb in ("get", "update")}
    secret = {("", "secrets", f"{name}-metrics-api", verb) for verb in ("get", "patch")}
    return lease | {("coordination.k8s.io", "leases", "", "create")} | (secret if metrics_api else set())


def test_in_cluster_scope_the_operator_may_do_exactly_this() -> None:
    found = granted(template(BUILTIN))
    registration = {
        ("apiregistration.k8s.io", "apiservices", name, verb)
        for name in API_SERVICES
        for verb in ("get", "patch", "delete")
    }
    cluster_only = {("", "nodes"): ("list",), ("authorization.k8s.io", "subjectaccessreviews"): ("create",)}
    assert found == {
        None: expected(WORKLOADS) | expected(cluster_only) | registration,
        NAMESPACE: own(metrics_api=True),
        "kube-system": {("", "extension-apiserver-authentication-reader", "", "bound")},
    }


def test_in_namespaced_scope_the_operator_may_do_exactly_this_in_each_namespace() -> None:
    assert granted(template(NAMESPACED)) == {
        "team-a": expected(WORKLOADS),
        "team-b": expected(WORKLOADS),
        NAMESPACE: own(metrics_api=False),
    }


def test_every_kind_that_the_operator_knows_is_one_that_it_may_touch() -> None:
    found = {
        (group, resource) for every in granted(template(BUILTIN)).values() for group, resource, _, _ in every
    }
    known = {
        (kind.api_version.rpartition("/")[0], kind.plural)
        for kind in vars(kinds).values()
        if isinstance(kind, kinds.Kind)
    }
    assert known <= found


def test_rights_over_the_api_group_follow_what_is_switched_on() -> None:
    kept = granted(template({"autoscaling": {"provider": "builtin", "metricsApi": {"preDeleteHook": False}}}))
    assert {right[3] for right in kept[None] if right[1] == "apiservices"} == {"get", "patch"}
    other = granted(template({"autoscaling": {"provider": "keda"}}))
    assert other == {
        None: expected({**WORKLOADS, ("", "nodes"): ("list",)}),
        NAMESPACE: own(metrics_api=False),
    }


@pytest.mark.parametrize("values", [BUILTIN, NAMESPACED])
def test_nothing_is_granted_by_wildcard_and_no_list_of_secrets(values: Mapping[str, Any]) -> None:
    manifests = template(values)
    every = {right for found in granted(manifests).values() for right in found}
    assert not [right for right in every if "*" in right]
    assert {verb for _, resource, _, verb in every if resource == "secrets"} <= {"get", "patch"}
    assert not {verb for _, _, _, verb in every} & {"escalate", "bind", "impersonate", "deletecollection"}


def test_without_rbac_nothing_is_bound() -> None:
    manifests = template({**BUILTIN, "rbac": {"create": False}})
    kinds = {manifest["kind"] for manifest in manifests}
    assert not kinds & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}


def test_people_who_may_edit_a_namespace_may_edit_its_resources() -> None:
    roles = {role["metadata"]["name"]: role for role in of_kind(template(), "ClusterRole")}
    view, edit = roles[f"{NAMESPACE}-draftline-view"], roles[f"{NAMESPACE}-draftline-edit"]
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert {right[3] for right in rights(view["rules"])} == {"get", "list", "watch"}
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert ("draftline.dev", "speculativedeployments", "", "create") in rights(edit["rules"])
    assert ("draftline.dev", "speculativedeployments/scale", "", "patch") in rights(edit["rules"])
    assert not [right for right in rights(edit["rules"]) if right[1].endswith("/status")]
