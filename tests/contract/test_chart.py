"""The chart, as Helm renders it."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import draftline_server
from draftline_operator.constants import APP_NAME, COMPONENT_LABEL, INSTANCE_LABEL, NAME_LABEL, SERVING
from draftline_operator.models.resource import RenderSettings, Resource
from draftline_operator.models.spec import parse_spec
from draftline_operator.planning.metrics_documents import METRICS
from draftline_operator.resources.service_monitor import render_service_monitor
from draftline_operator.settings import ENVIRONMENT_PREFIX, Settings, load_settings
from support.helm import CHART, NAMESPACE, RELEASE, ROOT, Manifest, helm, of_kind, only, refusal, template

BUILTIN = {"autoscaling": {"provider": "builtin"}}
NAMESPACED = {"scope": "namespaced", "watchNamespaces": ["team-a", "team-b"]}
EVERYTHING = {
    **BUILTIN,
    "replicas": 2,
    "monitoring": {"kind": "PodMonitor"},
    "imagePullSecrets": [{"name": "pull"}],
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "priorityClassName": "system-cluster-critical",
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "infra", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "ml"},
    "serviceAccount": {"annotations": {"cloud/identity": "x"}},
}
EXAMPLES: dict[str, Mapping[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "namespaced": NAMESPACED,
    "keda": {"autoscaling": {"provider": "keda"}},
    "no operator": {"replicas": 0},
    "nothing of the cluster's": {**NAMESPACED, "crds": {"enabled": False}},
}
every_example = pytest.mark.parametrize("values", EXAMPLES.values(), ids=EXAMPLES)

CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "APIService"}


def operator_environment(manifests: Iterable[Manifest]) -> dict[str, Any]:
    (container,) = only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def pods_of(manifests: Iterable[Manifest]) -> list[Manifest]:
    """Metadata and spec of every pod that the chart makes, hooks and tests too."""
    manifests = list(manifests)
    made = [
        manifest["spec"]["template"] for manifest in manifests if manifest["kind"] in ("Deployment", "Job")
    ]
    return made + of_kind(manifests, "Pod")


def matches(selector: Mapping[str, str], pod: Manifest) -> bool:
    return bool(selector.items() <= pod["metadata"]["labels"].items())


@every_example
def test_helm_finds_nothing_to_complain_about(values: Mapping[str, Any]) -> None:
    output = helm("lint", "--strict", str(CHART), values=values)
    assert "[WARNING]" not in output
    assert "1 chart(s) linted, 0 chart(s) failed" in output


def test_the_chart_is_of_the_version_that_it_installs() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == draftline_server.__version__


def test_a_kubernetes_without_the_fields_that_are_needed_is_refused() -> None:
    # 1.30 is the first that has preStop sleep on by default.
    assert "incompatible with Kubernetes" in refusal({}, "--kube-version", "v1.29.9")
    assert template({}, "--kube-version", "v1.30.0")


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"replicas": 3}, r"/replicas.*maximum"),
        ({"replicas": -1}, r"/replicas.*minimum"),
        ({"replicas": "1"}, r"/replicas.*want integer"),
        ({"replica": 1}, r"additional properties 'replica' not allowed"),
        ({"autoscaling": {"provider": "prometheus"}}, r"/autoscaling/provider.*value must be one of"),
        ({"autoscaling": {"metricsApi": {"prot": 1}}}, r"/autoscaling/metricsApi.*'prot' not allowed"),
        ({"autoscaling": {"metricsApi": {"port": 443}}}, r"/autoscaling/metricsApi/port.*minimum"),
        ({"scope": "Cluster"}, r"/scope.*value must be one of"),
        ({"serving": {"allowHostPath": "yes"}}, r"/serving/allowHostPath.*want boolean"),
        ({"image": {"registry": "registry/team"}}, r"/image/registry.*pattern"),
        ({"image": {"digest": "latest"}}, r"/image/digest.*pattern"),
        ({"monitoring": {"kind": "prometheus"}}, r"/monitoring/kind.*value must be one of"),
        ({"watchNamespaces": ["Team"]}, r"/watchNamespaces/0.*pattern"),
        ({"env": [{"name": "DRAFTLINE_OPERATOR_NAMESPACE", "value": "x"}]}, r"/env/0/name.*'not' failed"),
        ({"watchNamespaces": ["team"]}, r"watchNamespaces needs scope: namespaced"),
        ({**NAMESPACED, **BUILTIN}, r"autoscaling.provider: builtin needs scope: cluster"),
        ({"serviceAccount": {"create": False}}, r"serviceAccount.name is needed"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(values: Mapping[str, Any], complaint: str) -> None:
    assert re.search(complaint, refusal(values), re.DOTALL)


def test_every_value_is_in_the_schema_and_every_entry_of_the_schema_is_a_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(path: str, part: Mapping[str, Any], node: Mapping[str, Any]) -> None:
        properties = node.get("properties")
        if properties is None:
            return
        assert node["additionalProperties"] is False, path
        optional = {"global", "claims"}
        assert set(part) | optional >= set(properties), f"{path}: without a default"
        assert set(part) <= set(properties), f"{path}: without a schema"
        for key, value in part.items():
            if isinstance(value, dict):
                compare(f"{path}.{key}", value, properties[key])

    compare("values", values, schema)


def test_every_value_is_used() -> None:
    text = "\n".join(path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    whole = {"resources", "podSecurityContext", "securityContext", "image"}  # passed on as they are
    unused = []
    for key, value in values.items():
        paths = (
            [f"{key}.{inner}" for inner in value] if isinstance(value, dict) and key not in whole else [key]
        )
        unused += [path for path in paths if f".Values.{path}" not in text]
    assert unused == []


def test_the_operator_understands_every_variable_and_none_of_the_charts_is_missing() -> None:
    known = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in Settings.model_fields}
    told = set()
    labelled = {"serving": {"serviceMonitorLabels": {"release": "prometheus"}}}
    for values in (BUILTIN, {"autoscaling": {"provider": "keda"}}, NAMESPACED, labelled):
        environment = operator_environment(template(values))
        assert {name for name in environment if name.startswith(ENVIRONMENT_PREFIX)} <= known
        told |= set(environment)
    # These are for people who run the operator by hand, and for tests.
    by_hand = {"KUBECONFIG", "HEALTH_HOST", "METRICS_API_HOST", "RESYNC_SECONDS", "SCRAPE_SECONDS"}
    by_hand |= {"FIGURES_SECONDS", "LEASE_SECONDS", "CONCURRENCY"}
    assert known - told == {f"{ENVIRONMENT_PREFIX}{name}" for name in by_hand}


@every_example
def test_the_operator_starts_with_what_the_chart_tells_it(values: Mapping[str, Any]) -> None:
    environment = operator_environment(template(values))
    given = {name: value for name, value in environment.items() if value is not None}
    settings = load_settings({}, given)
    assert settings.default_image == f"draftline/server:{draftline_server.__version__}"
    watched = tuple(values.get("watchNamespaces", ()))
    assert settings.watch_namespaces == watched


def test_images_can_come_from_another_registry_and_be_pinned() -> None:
    digest = "sha256:" + "0" * 64
    mirror = {"registry": "mirror:5000", "tag": "edge"}
    manifests = template({"image": mirror, "serving": {"image": {"digest": digest}}})
    images = {container["image"] for pod in pods_of(manifests) for container in pod["spec"]["containers"]}
    assert images == {"mirror:5000/draftline/operator:edge"}
    assert operator_environment(manifests)["DRAFTLINE_OPERATOR_DEFAULT_IMAGE"] == f"draftline/server@{digest}"


# -------------------------------------------------------------------------------------------------- replicas


def test_one_operator_is_replaced_before_the_next_one_starts() -> None:
    spec = only(template(), "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert of_kind(template(), "PodDisruptionBudget") == []


def test_two_operators_are_replaced_one_by_one_and_one_of_them_is_always_there() -> None:
    manifests = template({"replicas": 2})
    deployment, budget = only(manifests, "Deployment"), only(manifests, "PodDisruptionBudget")
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]


def test_no_operator_means_none_and_takes_its_metrics_api_out_of_the_cluster() -> None:
    manifests = template({"replicas": 0, **BUILTIN})
    assert only(manifests, "Deployment")["spec"]["replicas"] == 0
    assert of_kind(manifests, "APIService") == []


# ------------------------------------------------------------------------------------------------------ CRDs


def generator() -> Any:
    specification = importlib.util.spec_from_file_location("generate_crds", ROOT / "helm/generate_crds.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_charts_crds_are_generated_from_the_canonical_ones() -> None:
    expected = generator().expected_templates()
    folder = CHART / "templates/crds"
    assert {path.name: path.read_text() for path in folder.iterdir()} == expected
    assert expected, "there is at least one"


def test_the_crds_that_are_installed_are_the_canonical_ones() -> None:
    canonical = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]
    installed = of_kind(template(), "CustomResourceDefinition")
    assert [crd["spec"] for crd in installed] == [crd["spec"] for crd in canonical]
    assert [crd["metadata"]["name"] for crd in installed] == [crd["metadata"]["name"] for crd in canonical]


def test_braces_in_a_description_stay_what_they_are(tmp_path: Path) -> None:
    crd = {"apiVersion": "apiextensions.k8s.io/v1", "metadata": {"name": "x"}, "spec": {"d": "a {{ b }} c"}}
    text = generator().render_template("x.yaml", crd)
    assert "{{ b" not in text.replace('{{ "{{" }}', "")
    with pytest.raises(ValueError, match="metadata"):
        generator().render_template("x.yaml", {**crd, "metadata": {"name": "x", "labels": {}}})


def test_crds_survive_the_release_unless_told_otherwise() -> None:
    def policy(values: Mapping[str, Any]) -> Any:
        metadata = only(template(values), "CustomResourceDefinition")["metadata"]
        return metadata.get("annotations", {}).get("helm.sh/resource-policy")

    assert policy({}) == "keep"
    assert policy({"crds": {"keep": False}}) is None
    assert of_kind(template({"crds": {"enabled": False}}), "CustomResourceDefinition") == []


# ----------------------------------------------------------------------------------------------- metrics API


def test_the_metrics_api_is_registered_for_the_service_that_leads_to_the_operator() -> None:
    manifests = template(BUILTIN)
    by_name = {service["metadata"]["name"]: service for service in of_kind(manifests, "Service")}
    services = of_kind(manifests, "APIService")
    assert {service["metadata"]["name"] for service in services} == {
        "v1beta1.custom.metrics.k8s.io",
        "v1beta2.custom.metrics.k8s.io",
    }
    for api_service in services:
        spec = api_service["spec"]
        reference = spec["service"]
        service = by_name[reference["name"]]
        assert (reference["namespace"], reference["port"]) == (NAMESPACE, service["spec"]["ports"][0]["port"])
        # The bundle is the operator's: set here, each upgrade would take it away.
        assert not {"caBundle", "insecureSkipTLSVerify"} & set(spec)
    environment = operator_environment(manifests)
    assert environment["DRAFTLINE_OPERATOR_METRICS_API_SERVICE"] in by_name
    secrets = {secret["metadata"]["name"]: secret for secret in of_kind(manifests, "Secret")}
    assert "data" not in secrets[environment["DRAFTLINE_OPERATOR_METRICS_API_SECRET"]]


def test_newer_versions_are_preferred() -> None:
    priority = {
        service["spec"]["version"]: service["spec"]["versionPriority"]
        for service in of_kind(template(BUILTIN), "APIService")
    }
    assert priority["v1beta2"] > priority["v1beta1"] > 0


@pytest.mark.parametrize("provider", ["keda", "prometheus-adapter", "none"])
def test_with_another_provider_nothing_of_the_api_group_is_touched(provider: str) -> None:
    manifests = template({"autoscaling": {"provider": provider}})
    environment = operator_environment(manifests)
    assert environment["DRAFTLINE_OPERATOR_AUTOSCALING_PROVIDER"] == provider
    assert not [name for name in environment if "METRICS_API" in name]
    assert of_kind(manifests, "APIService") + of_kind(manifests, "Secret") + of_kind(manifests, "Job") == []
    assert "custom.metrics.k8s.io" not in str(
        [m for m in manifests if m["kind"] != "CustomResourceDefinition"]
    )


@pytest.mark.parametrize(
    ("values", "flags", "provider"),
    [
        ({}, [], "builtin"),
        (NAMESPACED, [], "none"),
        (NAMESPACED, ["--api-versions", "keda.sh/v1alpha1"], "keda"),
        (NAMESPACED, ["--api-versions", "custom.metrics.k8s.io/v1beta1"], "prometheus-adapter"),
    ],
)
def test_auto_takes_what_is_there(values: Mapping[str, Any], flags: list[str], provider: str) -> None:
    environment = operator_environment(template(values, *flags))
    assert environment["DRAFTLINE_OPERATOR_AUTOSCALING_PROVIDER"] == provider


def test_the_hook_takes_the_registration_away_before_anything_else_goes() -> None:
    job = only(template(BUILTIN), "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["unregister-metrics-api"]
    operator = only(template(BUILTIN), "Deployment")["spec"]["template"]["spec"]
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == operator["serviceAccountName"]
    assert container["image"] == operator["containers"][0]["image"]
    assert of_kind(template({"autoscaling": {"metricsApi": {"preDeleteHook": False}}}), "Job") == []


def test_the_readmes_rules_for_prometheus_adapter_name_what_servers_export() -> None:
    readme = (CHART / "README.md").read_text()
    (block,) = (
        block for block in re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL) if "seriesQuery" in block
    )
    (rule,) = yaml.safe_load(block)["rules"]["custom"]
    pattern = re.search(r'__name__=~"([^"]*)"', rule["seriesQuery"])
    assert pattern is not None
    assert all(re.fullmatch(pattern.group(1), metric) for metric in METRICS)
    exported = (ROOT / "server/draftline_server/metrics.py").read_text()
    assert all(metric.removeprefix("draftline_") in exported for metric in METRICS)
    spec = parse_spec({"target": {"model": {"uri": "pvc://models/target"}}})
    resource = Resource(name="chat", namespace="team", uid="u", generation=1, spec=spec)
    (endpoint,) = render_service_monitor(resource, RenderSettings(default_image="x"))["spec"]["endpoints"]
    labels = {relabeling["targetLabel"] for relabeling in endpoint["relabelings"]}
    assert set(rule["resources"]["overrides"]) == labels | {"namespace"}
    assert rule["resources"]["overrides"]["speculativedeployment"] == {
        "group": "draftline.dev",
        "resource": "speculativedeployments",
    }


# ------------------------------------------------------------------------------------------- shape and scope


@every_example
def test_selectors_match_the_operator_and_nothing_else(values: Mapping[str, Any]) -> None:
    manifests = template(values)
    operator = only(manifests, "Deployment")["spec"]
    others = [pod for pod in pods_of(manifests) if pod is not operator["template"]]
    serving = {
        "metadata": {"labels": {NAME_LABEL: APP_NAME, INSTANCE_LABEL: RELEASE, COMPONENT_LABEL: SERVING}}
    }
    selectors = [service["spec"]["selector"] for service in of_kind(manifests, "Service")]
    for kind in ("PodDisruptionBudget", "PodMonitor", "Deployment"):
        selectors += [manifest["spec"]["selector"]["matchLabels"] for manifest in of_kind(manifests, kind)]
    selectors += [
        policy["spec"]["podSelector"]["matchLabels"] for policy in of_kind(manifests, "NetworkPolicy")
    ]
    for selector in selectors:
        assert set(selector) == {NAME_LABEL, INSTANCE_LABEL, COMPONENT_LABEL}
        assert matches(selector, operator["template"])
        assert not [pod for pod in [*others, serving] if matches(selector, pod)]


@every_example
def test_ports_that_are_named_exist(values: Mapping[str, Any]) -> None:
    manifests = template(values)
    (container,) = only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    for service in of_kind(manifests, "Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for policy in of_kind(manifests, "NetworkPolicy"):
        assert {port["port"] for port in policy["spec"]["ingress"][0]["ports"]} == ports
    assert {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} <= ports


@every_example
def test_pods_keep_to_the_restricted_pod_security_standard(values: Mapping[str, Any]) -> None:
    for pod in pods_of(template(values)):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert all(set(volume) == {"name", "emptyDir"} for volume in spec.get("volumes", []))
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]


def test_only_current_api_versions_are_written() -> None:
    written = {manifest["apiVersion"] for values in EXAMPLES.values() for manifest in template(values)}
    assert written == {
        "apiextensions.k8s.io/v1",
        "apiregistration.k8s.io/v1",
        "apps/v1",
        "batch/v1",
        "coordination.k8s.io/v1",
        "monitoring.coreos.com/v1",
        "networking.k8s.io/v1",
        "policy/v1",
        "rbac.authorization.k8s.io/v1",
        "v1",
    }


@every_example
def test_everything_has_a_namespace_or_needs_none(values: Mapping[str, Any]) -> None:
    for manifest in template(values):
        is_cluster_wide = manifest["kind"] in CLUSTER_WIDE
        assert ("namespace" in manifest["metadata"]) != is_cluster_wide, manifest["kind"]


def test_a_namespaced_release_has_nothing_of_the_clusters_but_the_crd() -> None:
    manifests = template(NAMESPACED)
    assert {manifest["kind"] for manifest in manifests} & CLUSTER_WIDE == {"CustomResourceDefinition"}
    namespaces = {manifest["metadata"].get("namespace") for manifest in manifests} - {None}
    assert namespaces == {NAMESPACE, "team-a", "team-b"}
    without = template({**NAMESPACED, "crds": {"enabled": False}})
    assert {manifest["kind"] for manifest in without} & CLUSTER_WIDE == set()


def test_a_namespaced_release_watches_its_own_namespace_unless_told_otherwise() -> None:
    manifests = template({"scope": "namespaced"})
    assert operator_environment(manifests)["DRAFTLINE_OPERATOR_WATCH_NAMESPACES"] == NAMESPACE
    assert {role["metadata"]["namespace"] for role in of_kind(manifests, "Role")} == {NAMESPACE}
    assert operator_environment(template())["DRAFTLINE_OPERATOR_WATCH_NAMESPACES"] == ""


def test_releases_in_different_namespaces_do_not_meet() -> None:
    def cluster_wide(namespace: str) -> set[tuple[str, str]]:
        manifests = template(
            {"autoscaling": {"provider": "none"}, "crds": {"enabled": False}}, namespace=namespace
        )
        return {(m["kind"], m["metadata"]["name"]) for m in manifests if m["kind"] in CLUSTER_WIDE}

    assert cluster_wide("one")
    assert not cluster_wide("one") & cluster_wide("two")


@pytest.mark.parametrize("release", ["r", "r" * 53, "x" * 39 + "-tail"])
def test_names_are_valid_however_long_the_releases_is(release: str) -> None:
    for manifest in template(EVERYTHING, release=release):
        name = manifest["metadata"]["name"]
        if manifest["kind"] not in CLUSTER_WIDE:
            assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name), name
        for value in manifest["metadata"].get("labels", {}).values():
            assert len(value) <= 63


def test_the_operator_is_found_by_prometheus_where_that_is_wanted() -> None:
    assert [m for m in template() if m["apiVersion"].startswith("monitoring")] == []
    pod_monitor = only(
        template({"monitoring": {"kind": "PodMonitor", "labels": {"release": "p"}}}), "PodMonitor"
    )
    assert pod_monitor["metadata"]["labels"]["release"] == "p"
    assert pod_monitor["spec"]["podMetricsEndpoints"][0]["port"] == "http"
    manifests = template({"monitoring": {"kind": "ServiceMonitor"}})
    selector = only(manifests, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    scraped = [
        s for s in of_kind(manifests, "Service") if selector.items() <= s["metadata"]["labels"].items()
    ]
    named = [s for s in scraped if any(port["name"] == "http" for port in s["spec"]["ports"])]
    assert len(named) == 1, "each pod is scraped once"


def test_the_notes_say_what_was_decided_and_what_comes_next() -> None:
    notes = helm("install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--dry-run=client", values=BUILTIN)
    assert "Autoscaling metrics come from: builtin" in notes
    assert "kubectl wait speculativedeployment/chat --for=condition=Ready" in notes
    none = helm("install", RELEASE, str(CHART), "--dry-run=client", values={"replicas": 0, **NAMESPACED})
    assert "There is no operator" in none
    assert "Autoscaling metrics come from: none" in none
