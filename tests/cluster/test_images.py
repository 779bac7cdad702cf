"""The images that the Dockerfiles make have what they need, nothing of each other, and are not root."""

from __future__ import annotations

import json
import sysconfig
from typing import Any

from support.kube.cluster import Cluster
from support.kube.local import LocalCluster

HOST_LIBRARIES = sysconfig.get_paths()["purelib"]
MOUNTED = "/host-libraries"

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}

# Prints what the image is like, as seen by a process in it.
REPORT = """
import importlib, importlib.metadata, json, os, pkgutil, sys
package = importlib.import_module(sys.argv[1])
modules = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for module in modules:
    if not module.endswith(".__main__"):
        importlib.import_module(module)
own = [p for p in sys.path if "/opt/draftline/" in p]
print(json.dumps({
    "user": os.getuid(),
    "modules": modules,
    "installed": {d.name.lower(): d.version for d in importlib.metadata.distributions(path=own)},
}))
"""


def job_pod(name: str, image: str, **container: Any) -> dict[str, Any]:
    main = {"name": "main", "image": image, "securityContext": RESTRICTED, **container}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [main]},
    }


def output_of(pod: dict[str, Any], cluster: Cluster, namespace: str) -> str:
    """What a pod prints that ends well."""
    name = pod["metadata"]["name"]
    cluster.apply(pod, namespace=namespace)
    terminated = "{.status.containerStatuses[0].state.terminated.exitCode}"
    cluster.wait(f"jsonpath={terminated}", f"pod/{name}", namespace=namespace, seconds=120)
    code = cluster.kubectl("get", "pod", name, "--namespace", namespace, f"--output=jsonpath={terminated}")
    output = cluster.kubectl("logs", name, "--namespace", namespace)
    assert code == "0", output
    return output


def with_host_libraries(pod: dict[str, Any]) -> dict[str, Any]:
    """Mounts the libraries of the environment that the tests run in, torch among them."""
    spec = pod["spec"]
    spec["volumes"] = [
        {"name": "libraries", "hostPath": {"path": HOST_LIBRARIES}},
        {"name": "tmp", "emptyDir": {}},  # torch does not import without one
    ]
    (container,) = spec["containers"]
    container["volumeMounts"] = [
        {"name": "libraries", "mountPath": MOUNTED, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    container["env"] = [{"name": "PYTHONPATH", "value": MOUNTED}]
    return pod


def test_the_operators_image_has_all_it_imports_and_nothing_of_the_servers(
    cluster: Cluster, namespace: str, operator_image: str
) -> None:
    pod = job_pod("report", operator_image, command=["python", "-c", REPORT, "draftline_operator"])
    report = json.loads(output_of(pod, cluster, namespace))
    assert report["user"] == 65532
    assert "draftline_operator.main" in report["modules"]
    assert not {"torch", "transformers"} & set(report["installed"])


def test_the_operators_image_starts_as_the_operator(
    cluster: Cluster, namespace: str, operator_image: str
) -> None:
    assert "usage: draftline-operator" in output_of(
        job_pod("help", operator_image, args=["--help"]), cluster, namespace
    )


def test_the_servers_image_has_all_it_imports_and_nothing_of_the_operators(
    local_cluster: LocalCluster, namespace: str, server_image: str
) -> None:
    pod = job_pod("report", server_image, command=["python", "-c", REPORT, "draftline_server"])
    report = json.loads(output_of(with_host_libraries(pod), local_cluster, namespace))
    assert report["user"] == 65532
    assert "draftline_server.engine" in report["modules"]
    assert not {"kopf", "kubernetes-asyncio", "torch"} & set(report["installed"])


def test_the_servers_image_starts_as_the_server(cluster: Cluster, namespace: str, server_image: str) -> None:
    assert "usage: draftline-server" in output_of(
        job_pod("help", server_image, args=["--help"]), cluster, namespace
    )


NATIVE = """
import shutil
from draftline_server.model.native_library import AMX_LINEAR, AVX512_LINEAR, CPU_KERNELS, load
print(shutil.which("cc"), [load(source) is not None for source in (CPU_KERNELS, AMX_LINEAR, AVX512_LINEAR)])
"""


def test_the_servers_image_brings_its_kernels_since_it_has_no_compiler(
    cluster: Cluster, namespace: str, server_image: str
) -> None:
    pod = job_pod("native", server_image, command=["python", "-c", NATIVE])
    assert output_of(pod, cluster, namespace).strip() == "None [True, True, True]"
