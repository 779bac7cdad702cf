"""Pods: security, volumes, placement, times, and what users may add to them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from draftline_operator.errors import InvalidSpecError
from draftline_operator.models.resource import Manifest, RenderSettings
from draftline_operator.resources.model_volumes import model_volumes
from support.speculative_deployments import (
    FULL,
    MINIMAL,
    PAIR,
    SETTINGS,
    changed,
    deployment,
    pod_of,
    preflight_job,
    resource,
    server_of,
)

GPU = changed(MINIMAL, accelerator={})
WITH_HOST_PATH = dataclasses.replace(SETTINGS, allow_host_path=True)


def both(spec: dict[str, Any], settings: RenderSettings = SETTINGS) -> list[Manifest]:
    """The two kinds of objects that have pods."""
    return [deployment(resource(spec), settings), preflight_job(resource(spec), settings)]


def containers(manifest: Manifest) -> list[dict[str, Any]]:
    pod = pod_of(manifest)
    return [*pod.get("initContainers", []), *pod["containers"]]


def env_of(container: dict[str, Any]) -> dict[str, Any]:
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def refusal(spec: dict[str, Any], settings: RenderSettings = SETTINGS) -> InvalidSpecError:
    """The fault, which must be the same for both kinds of pods."""
    with pytest.raises(InvalidSpecError) as of_serving:
        deployment(resource(spec), settings)
    with pytest.raises(InvalidSpecError) as of_preflight:
        preflight_job(resource(spec), settings)
    assert str(of_serving.value) == str(of_preflight.value)
    return of_serving.value


# --------------------------------------------------------------------------------------------------- security


@pytest.mark.parametrize("spec", [MINIMAL, FULL], ids=["minimal", "full"])
def test_pods_keep_to_the_restricted_standard(spec: dict[str, Any]) -> None:
    for manifest in both(spec):
        pod = pod_of(manifest)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in containers(manifest):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize("spec", [MINIMAL, PAIR, FULL], ids=["minimal", "pair", "full"])
def test_every_mount_has_its_volume_and_every_volume_a_mount(spec: dict[str, Any]) -> None:
    for manifest in both(spec):
        volumes = [volume["name"] for volume in pod_of(manifest)["volumes"]]
        mounted = [mount["name"] for container in containers(manifest) for mount in container["volumeMounts"]]
        assert len(set(volumes)) == len(volumes)
        assert set(volumes) == set(mounted)
        for container in containers(manifest):
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(set(paths)) == len(paths)


def test_libraries_write_to_volumes_although_the_root_is_read_only() -> None:
    for manifest in both(FULL):
        for container in containers(manifest):
            writable = {
                mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly", False)
            }
            env = env_of(container)
            for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
                assert any(env[name].startswith(path) for path in writable)
            assert "/tmp" in writable


def test_shared_memory_is_larger_than_the_default_of_64_mib() -> None:
    volumes = {volume["name"]: volume for volume in pod_of(deployment(resource(GPU)))["volumes"]}
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in server_of(deployment(resource(GPU)))[
        "volumeMounts"
    ]


def test_credentials_reach_only_the_steps_that_fetch() -> None:
    for manifest in both(FULL):
        fetches = pod_of(manifest)["initContainers"]
        secrets = [container["envFrom"] for container in fetches]
        assert secrets == [[{"secretRef": {"name": "hub"}}], [{"secretRef": {"name": "bucket"}}]]
        assert "envFrom" not in server_of(manifest)
        assert env_of(server_of(manifest))["HF_HUB_OFFLINE"] == "1"
        assert all("HF_HUB_OFFLINE" not in env_of(container) for container in fetches)


# ----------------------------------------------------------------------------------------------- accelerators


def test_accelerators_are_those_of_tensor_parallelism_with_requests_equal_to_limits() -> None:
    resources = server_of(deployment(resource(GPU)))["resources"]
    assert resources == {"limits": {"nvidia.com/gpu": "1"}, "requests": {"nvidia.com/gpu": "1"}}


def test_a_slice_of_a_gpu_is_requested_by_its_own_name_and_tolerates_the_taint_of_gpus() -> None:
    manifest = deployment(resource(changed(MINIMAL, accelerator={"resourceName": "nvidia.com/mig-1g.10gb"})))
    assert server_of(manifest)["resources"]["limits"] == {"nvidia.com/mig-1g.10gb": "1"}
    assert [toleration["key"] for toleration in pod_of(manifest)["tolerations"]] == [
        "nvidia.com/gpu",
        "nvidia.com/mig-1g.10gb",
    ]


def test_without_accelerator_nothing_of_gpus_is_there() -> None:
    manifest = deployment(resource(MINIMAL))
    assert "resources" not in server_of(manifest)
    assert "tolerations" not in pod_of(manifest)
    assert "NVIDIA_DRIVER_CAPABILITIES" not in env_of(server_of(manifest))


@pytest.mark.parametrize("key", ["limits", "requests"])
@pytest.mark.parametrize("spec", [MINIMAL, GPU], ids=["cpu", "gpu"])
def test_accelerators_beside_those_of_the_spec_are_refused(spec: dict[str, Any], key: str) -> None:
    error = refusal(changed(spec, podTemplate__resources={key: {"nvidia.com/gpu": 4}}))
    assert str(error) == (
        f"spec.podTemplate.resources.{key}.nvidia.com/gpu: accelerators are requested by spec.accelerator"
    )


def test_preflight_asks_for_no_accelerator_but_goes_where_serving_pods_go() -> None:
    job, served = preflight_job(resource(FULL), memory=80 * 2**30), deployment(resource(FULL))
    assert "nvidia.com/gpu" not in str([container["resources"] for container in containers(job)])
    for key in (
        "affinity",
        "tolerations",
        "nodeSelector",
        "volumes",
        "priorityClassName",
        "imagePullSecrets",
    ):
        if key == "volumes":
            assert pod_of(job)[key][1:] == pod_of(served)[key][1:]  # all but the configuration
        else:
            assert pod_of(job)[key] == pod_of(served)[key]
    assert server_of(job)["args"][-2:] == ["--accelerator-memory", str(80 * 2**30)]


# -------------------------------------------------------------------------------------------------- resources


@pytest.mark.parametrize(
    ("cpu", "memory"),
    [("1000m", "2048Mi"), (1, "2Gi"), ("1", 2 * 2**30), ("1.0", "2147483648"), (1.0, "2097152Ki")],
)
def test_equal_quantities_give_equal_pods(cpu: str | float, memory: str | int) -> None:
    def limits(cpu: str | float, memory: str | int) -> dict[str, Any]:
        return changed(MINIMAL, podTemplate__resources={"limits": {"cpu": cpu, "memory": memory}})

    assert both(limits(cpu, memory)) == both(limits("1", "2Gi"))


def test_an_equal_size_of_a_users_volume_gives_equal_pods() -> None:
    def sized(size: str) -> dict[str, Any]:
        volumes = [{"name": "scratch", "emptyDir": {"sizeLimit": size}}]
        return changed(MINIMAL, podTemplate__volumes=volumes)

    assert both(sized("1Gi")) == both(sized("1024Mi"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"limits": {"memory": "1.5 Gi"}},
            "limits.memory: '1.5 Gi' is not a quantity, such as 500m, 1.5Gi or 2",
        ),
        ({"limits": {"cpu": True}}, "limits.cpu: must be a quantity, such as 500m, 1.5Gi or 2"),
        ({"limits": {"cpu": None}}, "limits.cpu: must be a quantity, such as 500m, 1.5Gi or 2"),
        ({"requests": {"cpu": "-1"}}, "requests.cpu: must not be negative"),
        (
            {"requests": {"cpu": "3"}, "limits": {"cpu": "2000m"}},
            "requests.cpu: is above spec.podTemplate.resources.limits.cpu",
        ),
        ({"limits": ["cpu"]}, "limits: must be an object"),
        ({"claims": [{"name": "gpu"}]}, "claims: is not supported; set requests and limits"),
    ],
)
def test_resources_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    error = refusal(changed(MINIMAL, podTemplate__resources=given))
    assert str(error) == f"spec.podTemplate.resources.{message}"


def test_threads_follow_the_cpu_limit_and_the_user_goes_first() -> None:
    limited = changed(MINIMAL, podTemplate__resources={"limits": {"cpu": "2500m"}})
    assert env_of(server_of(deployment(resource(limited))))["OMP_NUM_THREADS"] == "3"
    own = changed(limited, podTemplate__env=[{"name": "OMP_NUM_THREADS", "value": "1"}])
    variables = server_of(deployment(resource(own)))["env"]
    assert [v["value"] for v in variables if v["name"] == "OMP_NUM_THREADS"] == ["1"]
    assert "OMP_NUM_THREADS" not in env_of(server_of(deployment(resource(MINIMAL))))


# ------------------------------------------------------------------------------------------------------ times


def test_the_startup_budget_is_the_one_of_the_spec() -> None:
    for seconds in (30, 601, 1800, 86_400):
        server = server_of(deployment(resource(changed(MINIMAL, serving__startupTimeoutSeconds=seconds))))
        startup = server["startupProbe"]
        budget = startup["failureThreshold"] * startup["periodSeconds"]
        assert seconds <= budget < seconds + startup["periodSeconds"]


def test_probes_ask_the_engine_and_not_just_the_port() -> None:
    server = server_of(deployment(resource(MINIMAL)))
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    for probe, path in (
        ("startupProbe", "/readyz"),
        ("readinessProbe", "/readyz"),
        ("livenessProbe", "/healthz"),
    ):
        assert server[probe]["httpGet"] == {"path": path, "port": "admin"}
    assert ports == {"grpc": 50051, "admin": 9090}


@pytest.mark.parametrize("spec", [MINIMAL, FULL, GPU], ids=["minimal", "full", "gpu"])
def test_a_rollout_is_not_called_failed_before_a_pod_had_its_time(spec: dict[str, Any]) -> None:
    manifest = deployment(resource(spec))
    startup = server_of(manifest)["startupProbe"]
    leaving = pod_of(manifest)["terminationGracePeriodSeconds"]
    budget = startup["failureThreshold"] * startup["periodSeconds"]
    assert manifest["spec"]["progressDeadlineSeconds"] > budget + leaving


@pytest.mark.parametrize(
    ("lame_duck", "age", "drain", "leaving"),
    [(5, 30, 150, 34 + 150 + 5), (60, 30, 150, 60 + 150 + 5), (0, 1, 120, 3 + 120 + 5)],
)
def test_the_grace_period_covers_pre_stop_and_the_longest_drain(
    lame_duck: int, age: int, drain: int, leaving: int
) -> None:
    spec = changed(
        MINIMAL,
        serving={"lameDuckSeconds": lame_duck, "maxConnectionAgeSeconds": age},
        disruption={"drainTimeoutSeconds": drain},
    )
    manifest = deployment(resource(spec))
    pre_stop = server_of(manifest)["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = pod_of(manifest)["terminationGracePeriodSeconds"]
    assert pre_stop + leaving <= grace <= pre_stop + leaving + 15


# -------------------------------------------------------------------------------------------------- placement


def test_pods_spread_softly_over_hosts_and_zones_by_revision() -> None:
    constraints = pod_of(deployment(resource(MINIMAL)))["topologySpreadConstraints"]
    assert [constraint["topologyKey"] for constraint in constraints] == [
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    ]
    assert {constraint["whenUnsatisfiable"] for constraint in constraints} == {"ScheduleAnyway"}
    assert all(constraint["matchLabelKeys"] == ["pod-template-hash"] for constraint in constraints)


def test_the_users_constraints_replace_the_operators() -> None:
    constraints = pod_of(deployment(resource(FULL)))["topologySpreadConstraints"]
    assert [constraint["topologyKey"] for constraint in constraints] == ["rack"]


def terms_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    node_affinity = pod_of(deployment(resource(spec)))["affinity"]["nodeAffinity"]
    terms: list[dict[str, Any]] = node_affinity["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    return terms


def test_affinity_is_anded_into_every_alternative() -> None:
    keys = [[expression["key"] for expression in term["matchExpressions"]] for term in terms_of(FULL)]
    assert keys == [["kubernetes.io/os", "zone"], ["kubernetes.io/os", "zone"]]
    assert [term["matchExpressions"][1]["values"] for term in terms_of(FULL)] == [["a"], ["b"]]


def test_affinity_of_pods_and_preferences_are_passed_through() -> None:
    preferred = [{"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}]
    affinity = {
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "rack"}]},
    }
    spec = changed(MINIMAL, podTemplate__affinity=affinity)
    combined = pod_of(deployment(resource(spec)))["affinity"]
    assert combined["podAntiAffinity"] == affinity["podAntiAffinity"]
    assert combined["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] == preferred
    assert len(terms_of(spec)) == len(terms_of(MINIMAL)) == 1


def test_fields_of_nodes_stay_beside_the_operators_requirement() -> None:
    fields = [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}]
    required = {"nodeSelectorTerms": [{"matchFields": fields, "matchExpressions": None}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    (term,) = terms_of(changed(MINIMAL, podTemplate__affinity=affinity))
    assert term["matchFields"] == fields
    assert [expression["key"] for expression in term["matchExpressions"]] == ["kubernetes.io/os"]


@pytest.mark.parametrize(
    ("affinity", "field"),
    [
        ({"nodeSelectorTerms": [{}]}, ".nodeSelectorTerms[0]: must have matchExpressions or matchFields"),
        ({"nodeSelectorTerms": {}}, ".nodeSelectorTerms: must be a list of at least one term"),
        ({"nodeSelectorTerms": []}, ".nodeSelectorTerms: must be a list of at least one term"),
        ({}, ".nodeSelectorTerms: must be a list of at least one term"),
        ({"nodeSelectorTerms": ["zone"]}, ".nodeSelectorTerms[0]: must be an object"),
        (
            {"nodeSelectorTerms": [{"matchExpressions": {"key": "zone"}}]},
            ".nodeSelectorTerms[0].matchExpressions: must be a list",
        ),
        ([], ": must be an object"),
    ],
)
def test_node_terms_that_match_nothing_are_not_turned_into_ones_that_match_all(
    affinity: Any, field: str
) -> None:
    required = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": affinity}}
    error = refusal(changed(MINIMAL, podTemplate__affinity=required))
    path = "spec.podTemplate.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
    assert str(error) == f"{path}{field}"


def test_tolerations_are_added_to_the_accelerators_own_and_none_is_there_twice() -> None:
    own = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    other = {"key": "dedicated", "operator": "Exists"}
    spec = changed(GPU, podTemplate__tolerations=[own, other])
    assert pod_of(deployment(resource(spec)))["tolerations"] == [own, other]


# -------------------------------------------------------------------------------------------------- additions


def test_additions_reach_every_container_of_both_kinds_of_pods() -> None:
    for manifest in both(FULL):
        template = manifest["spec"]["template"]
        assert template["metadata"]["labels"]["team"] == "nlp"
        assert template["metadata"]["annotations"]["example.com/note"] == "hello"
        assert pod_of(manifest)["runtimeClassName"] == "nvidia"
        for container in containers(manifest):
            mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert "/certificates" in mounts


def test_the_environment_keeps_the_users_order_after_the_operators_own() -> None:
    names = [variable["name"] for variable in server_of(deployment(resource(FULL)))["env"]]
    assert names[-2:] == ["SECOND", "FIRST"]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("env", [{"name": "HOME", "value": "/"}], "env[0].name: HOME is set by the operator"),
        (
            "env",
            [{"name": "A", "value": "1"}, {"name": "HF_HUB_OFFLINE", "value": "0"}],
            "env[1].name: HF_HUB_OFFLINE is set by the operator",
        ),
        ("env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}], "env[1].name: A is there twice"),
        ("env", [{"name": "A=B"}], "env[0].name: 'A=B' cannot be the name of an environment variable"),
        (
            "labels",
            {"app.kubernetes.io/instance": "other"},
            "labels.app.kubernetes.io/instance: is set by the operator",
        ),
        ("labels", {"draftline.dev/revision": "1"}, "labels.draftline.dev/revision: is set by the operator"),
        (
            "annotations",
            {"draftline.dev/config-hash": "1"},
            "annotations.draftline.dev/config-hash: is set by the operator",
        ),
        (
            "annotations",
            {"controller.kubernetes.io/pod-deletion-cost": "1"},
            "annotations.controller.kubernetes.io/pod-deletion-cost: is set by the operator",
        ),
        ("volumes", [{"name": "tmp"}], "volumes[0].name: tmp is a volume of the operator's own"),
        (
            "volumes",
            [{"name": "models-0123abcd"}],
            "volumes[0].name: models-0123abcd is a volume of the operator's own",
        ),
        ("volumes", [{"name": "a"}, {"name": "a"}], "volumes[1].name: a is there twice"),
        (
            "volumes",
            [{"name": "a", "hostPath": {"path": "/"}}],
            "volumes[0].hostPath: this installation of the operator does not allow the node's disk",
        ),
        (
            "volumes",
            [{"name": "a", "emptyDir": {"sizeLimit": "1.5 Gi"}}],
            "volumes[0].emptyDir.sizeLimit: '1.5 Gi' is not a quantity, such as 500m, 1.5Gi or 2",
        ),
        (
            "volumeMounts",
            [{"name": "a", "mountPath": "/a"}],
            "volumeMounts[0].name: a is not in spec.podTemplate.volumes",
        ),
    ],
)
def test_what_is_the_operators_own_is_refused_by_field(path: str, value: Any, message: str) -> None:
    error = refusal(changed(MINIMAL, **{f"podTemplate__{path}": value}))
    assert str(error) == f"spec.podTemplate.{message}"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/models",
        "/models/mine",
        "/etc",
        "/etc/draftline/",
        "/tmp/a",
        "/dev",
        "/dev/shm",
        "/var",
        "/models/../tmp",
    ],
)
def test_mounts_over_or_under_the_operators_own_paths_are_refused(path: str) -> None:
    mount = {"name": "a", "mountPath": path}
    error = refusal(
        changed(MINIMAL, podTemplate={"volumes": [{"name": "a", "emptyDir": {}}], "volumeMounts": [mount]})
    )
    assert error.field == "spec.podTemplate.volumeMounts[0].mountPath"
    assert "the operator's own" in error.reason


@pytest.mark.parametrize("path", ["/modelsx", "/etc/draftline2", "/opt/a", "/tmpfs"])
def test_mounts_beside_them_are_fine(path: str) -> None:
    mount = {"name": "a", "mountPath": path}
    spec = changed(MINIMAL, podTemplate={"volumes": [{"name": "a", "emptyDir": {}}], "volumeMounts": [mount]})
    assert mount in server_of(deployment(resource(spec)))["volumeMounts"]


@pytest.mark.parametrize(
    ("paths", "message"),
    [(["relative"], "relative is not an absolute path"), (["/a", "/a/"], "/a is there twice")],
)
def test_mount_paths_that_cannot_be_are_refused(paths: list[str], message: str) -> None:
    mounts = [{"name": "a", "mountPath": path} for path in paths]
    error = refusal(
        changed(MINIMAL, podTemplate={"volumes": [{"name": "a", "emptyDir": {}}], "volumeMounts": mounts})
    )
    assert str(error) == f"spec.podTemplate.volumeMounts[{len(paths) - 1}].mountPath: {message}"


def test_a_null_of_the_users_is_left_out() -> None:
    spec = changed(
        MINIMAL, podTemplate__volumes=[{"name": "a", "emptyDir": {"sizeLimit": None}, "secret": None}]
    )
    assert {"name": "a", "emptyDir": {}} in pod_of(deployment(resource(spec)))["volumes"]


# ----------------------------------------------------------------------------------------------------- models


def arguments(spec: dict[str, Any]) -> list[list[str]]:
    return [container["args"] for container in pod_of(deployment(resource(spec))).get("initContainers", [])]


def test_models_of_a_claim_are_read_where_they_are_through_one_mount() -> None:
    models = model_volumes(resource(PAIR), SETTINGS)
    (volume,) = models.volumes
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    assert models.mounts == ({"name": volume["name"], "mountPath": "/models/pvc/models", "readOnly": True},)
    assert models.fetches == ()


def test_a_claim_that_is_the_cache_too_is_mounted_once() -> None:
    spec = changed(PAIR, modelCache={"persistentVolumeClaim": "models"}, draft__model__uri="hf://org/draft")
    models = model_volumes(resource(spec), SETTINGS)
    assert models.volumes == ({"name": "model-cache", "persistentVolumeClaim": {"claimName": "models"}},)
    assert models.mounts == ({"name": "model-cache", "mountPath": "/models/cache", "readOnly": True},)


def test_a_nodes_folder_is_mounted_only_where_the_installation_allows_it() -> None:
    spec = {"target": {"model": {"uri": "file:///srv/models//target/"}}}
    assert refusal(spec).field == "spec.target.model.uri"
    models = model_volumes(resource(spec), WITH_HOST_PATH)
    assert models.volumes == (
        {"name": "target-model", "hostPath": {"path": "/srv/models/target", "type": "Directory"}},
    )
    assert models.mounts == ({"name": "target-model", "mountPath": "/models/target", "readOnly": True},)


def test_a_folder_of_a_draft_that_never_runs_is_nobodys_business() -> None:
    spec = changed(PAIR, draft__model__uri="file:///srv/draft", speculation__enabled=False)
    assert (
        model_volumes(resource(spec), SETTINGS).volumes == model_volumes(resource(MINIMAL), SETTINGS).volumes
    )


def test_models_are_fetched_into_a_folder_for_each_uri_and_revision() -> None:
    def folder(**values: Any) -> str:
        (args,) = arguments(changed({"target": {"model": {"uri": "hf://org/name"}}}, **values))
        return args[-1]

    folders = [
        folder(),
        folder(target__model__revision="main"),
        folder(target__model__revision="v2"),
        folder(target__model__uri="s3://org/name"),
        folder(target__model__uri="hf://other/name"),
    ]
    assert len(set(folders)) == len(folders)
    assert all(path.startswith("/models/cache/name-") for path in folders)
    assert folder(target__model__digest=f"sha256:{'2' * 64}") == folder()
    assert folder(target__dtype="float32") == folder()


def test_the_fetching_step_gets_all_that_identifies_the_files() -> None:
    target, draft = arguments(FULL)
    assert target[:6] == ["fetch", "hf://org/target", "--revision", "main", "--digest", f"sha256:{'1' * 64}"]
    assert draft[:3] == ["fetch", "s3://bucket/models/draft", "--out"]


def test_only_the_fetching_step_can_write_the_cache() -> None:
    for manifest in both(FULL):
        mounts = [
            (container["name"], mount.get("readOnly", False))
            for container in containers(manifest)
            for mount in container["volumeMounts"]
            if mount["name"] == "model-cache"
        ]
        assert [is_read_only for _, is_read_only in mounts] == [False, False, True]


def test_the_cache_of_a_pod_has_the_size_of_the_spec() -> None:
    spec = changed(
        {"target": {"model": {"uri": "hf://org/name"}}}, modelCache={"emptyDir": {"sizeLimit": "20Gi"}}
    )
    volumes = {volume["name"]: volume for volume in pod_of(deployment(resource(spec)))["volumes"]}
    assert volumes["model-cache"] == {"name": "model-cache", "emptyDir": {"sizeLimit": str(20 * 2**30)}}
    unlimited = pod_of(deployment(resource({"target": {"model": {"uri": "hf://org/name"}}})))["volumes"]
    assert {"name": "model-cache", "emptyDir": {}} in unlimited
