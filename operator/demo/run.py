"""The demo behind `make demo`: the whole product on a Kubernetes of its own, on this machine.

Starts the cluster of the tests, builds and loads the images, installs the chart, applies a resource with the
demo's models, streams a completion through the Service from a pod, and scales up under a burst.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "tests"), str(ROOT / "server" / "demo")]

from prepare_models import PreparationError, prepare_head, prepare_target  # noqa: E402 (found through the line above)
from support.helm import CHART, helm  # noqa: E402
from support.kube.components import Options  # noqa: E402
from support.kube.errors import ClusterFailed, ClusterUnavailable  # noqa: E402
from support.kube.host import say_on_stderr  # noqa: E402
from support.kube.images import OPERATOR, SERVER, BuiltImage, ensure_image  # noqa: E402
from support.kube.local import LocalCluster, local_cluster  # noqa: E402
from support.serving_operator import image_values  # noqa: E402
from support.serving_pods import host_torch  # noqa: E402

SYSTEM, NAMESPACE, NAME = "draftline-system", "default", "chat"
PROMPT = "Explain in a few sentences why the sky is blue and sunsets are red."
BURST_CLIENTS = 24
BURST_REPLICAS = 2
READY_SECONDS, SCALE_SECONDS = 300, 180
# In a pod: so many streams at once, for ever; one that ends or is refused is followed by another.
BURST = """
import asyncio, sys
import grpc
from draftline.v1 import inference_pb2 as pb, inference_pb2_grpc

async def stream(stub):
    sampling = pb.SamplingParams(max_tokens=400, ignore_eos=True)
    request = pb.GenerateRequest(text="Once upon a time", sampling=sampling)
    while True:
        try:
            async for _ in stub.GenerateStream(request):
                pass
        except grpc.aio.AioRpcError:
            await asyncio.sleep(1)

async def main():
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*(stream(stub) for _ in range(int(sys.argv[2]))))

asyncio.run(main())
"""


class DemoError(Exception):
    """The demo did not go as it should; the message is for the person at the terminal."""


@dataclass(frozen=True)
class Images:
    """What runs in pods."""

    operator: BuiltImage
    server: BuiltImage


def resource(target: Path, head: Path, server: BuiltImage) -> dict[str, Any]:
    """What a user would apply, but for the last section: torch comes from this machine, not the image."""
    return {
        "apiVersion": "draftline.dev/v1alpha1",
        "kind": "SpeculativeDeployment",
        "metadata": {"name": NAME},
        "spec": {
            "image": server.reference,
            "target": {"model": {"uri": f"file://{target}"}, "dtype": "bfloat16"},
            "draft": {"model": {"uri": f"file://{head}"}},
            "speculation": {"methods": ["NGram", "DraftModel"], "numSpeculativeTokens": 5},
            "serving": {"maxConcurrentRequests": 4, "maxQueueLength": 64, "maxContextLength": 2048},
            "autoscaling": {
                "minReplicas": 1,
                "maxReplicas": 3,
                "queueDepth": {"highWatermark": 4, "lowWatermark": 1},
            },
            "podTemplate": host_torch(),
        },
    }


def step(text: str) -> None:
    print(f"\n== {text}", flush=True)


def install(cluster: LocalCluster, images: Images) -> None:
    """The chart, with the images that were just built."""
    values = {
        "image": image_values(images.operator.reference),
        "serving": {"image": image_values(images.server.reference), "allowHostPath": True},
    }
    command = ("install", "draftline", str(CHART), "--namespace", SYSTEM, "--create-namespace", "--wait")
    print(helm(*command, values=values, kubeconfig=cluster.kubeconfig))


def stream_completion(cluster: LocalCluster, server: BuiltImage) -> None:
    """A pod with the command line client, and its log as it comes."""
    arguments = ["generate", "--address", f"{NAME}:50051", "--chat", "--prompt", PROMPT, "--max-tokens", "96"]
    _run_client(cluster, "client", server, ["draftline-server", *arguments])
    cluster.wait("jsonpath={.status.phase}=Succeeded", "pod/client", seconds=120)
    print(cluster.kubectl("logs", "client"))


def burst(cluster: LocalCluster, server: BuiltImage) -> None:
    """More requests at once than one replica takes, for as long as it takes to scale."""
    _run_client(cluster, "burst", server, ["python", "-c", BURST, f"{NAME}:50051", str(BURST_CLIENTS)])
    try:
        wait_until(lambda: _ready_replicas(cluster) >= BURST_REPLICAS, cluster, SCALE_SECONDS, "scaled up")
    finally:
        cluster.kubectl("delete", "pod", "burst", "--grace-period=0", "--force")


def wait_until(holds: Callable[[], bool], cluster: LocalCluster, seconds: float, what: str) -> None:
    """Shows the resource's columns until something holds."""
    give_up_at = time.monotonic() + seconds
    while True:
        print(cluster.kubectl("get", "specdep", NAME, "--no-headers").rstrip(), flush=True)
        if holds():
            return
        if time.monotonic() > give_up_at:
            raise DemoError(f"{NAME} had not {what} after {seconds:g} s; see {cluster.logs}")
        time.sleep(3)


def _ready_replicas(cluster: LocalCluster) -> int:
    return int(cluster.get("specdep", NAME).get("status", {}).get("readyReplicas", 0))


def _run_client(cluster: LocalCluster, name: str, image: BuiltImage, command: list[str]) -> None:
    container = {
        "name": "client",
        "image": image.reference,
        "command": command,
        "env": [{"name": "HOME", "value": "/tmp"}],
    }
    spec = {"restartPolicy": "Never", "containers": [container], "automountServiceAccountToken": False}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--once", action="store_true", default=os.environ.get("ONCE") == "1", help="end after the proof"
    )
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        run(once=arguments.once)
    except KeyboardInterrupt:
        return 0
    except (DemoError, PreparationError, ClusterFailed, ClusterUnavailable, AssertionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run(*, once: bool) -> None:
    target, head = prepare_target(), prepare_head()
    images = Images(ensure_image(OPERATOR, say_on_stderr), ensure_image(SERVER, say_on_stderr))
    step("A Kubernetes with one node")
    with local_cluster(Options()) as cluster:
        for image in (images.operator, images.server):
            cluster.load_image(image.archive)
        print(cluster.kubectl("get", "nodes"))
        step("helm install")
        install(cluster, images)
        step(f"kubectl apply: {NAME}, served on CPUs from {target.name} and {head.name}")
        cluster.apply(resource(target, head, images.server))
        cluster.wait("condition=Ready", f"specdep/{NAME}", seconds=READY_SECONDS)
        print(cluster.kubectl("get", "specdep,pods,services,hpa,pdb"))
        step(f"A completion, streamed through the Service by a pod: {PROMPT}")
        stream_completion(cluster, images.server)
        step(f"A burst of {BURST_CLIENTS} clients")
        burst(cluster, images.server)
        print(cluster.kubectl("get", "specdep,hpa,pods"))
        if once:
            return
        step("Running until Ctrl-C")
        print(f"  export KUBECONFIG={cluster.kubeconfig} PATH={cluster.kubectl_path.parent}:$PATH")
        print(f"  kubectl get specdep {NAME} --watch", flush=True)
        while True:
            time.sleep(1)


if __name__ == "__main__":
    sys.exit(main())
