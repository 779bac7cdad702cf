"""The cluster of the tests, for a person: `python -m support.kube`, with tests/ on Python's path."""

from __future__ import annotations

import argparse
import signal
import sys
import time

from support.kube.components import Options
from support.kube.errors import ClusterFailed, ClusterUnavailable
from support.kube.host import say_on_stderr
from support.kube.images import import_image
from support.kube.local import LocalCluster, local_cluster
from support.kube.provision import IMAGE_NAMES, built_image
from support.kube.sandbox import CLUSTERS, INIT_PID, command_inside


def main() -> int:
    """Starts a cluster until Ctrl-C, or brings images into one that runs."""
    arguments = _parser().parse_args()
    try:
        if arguments.command == "load":
            _load(arguments.cluster, arguments.image)
        else:
            _up(arguments)
    except (ClusterUnavailable, ClusterFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m support.kube", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="starts a cluster, and stops it at Ctrl-C")
    up.add_argument("--control-plane-only", action="store_true", help="no node: nothing will run")
    up.add_argument("--hpa-sync-seconds", type=float, default=Options.hpa_sync_seconds, metavar="S")
    up.add_argument(
        "--gpus", type=int, default=Options.gpus, metavar="N", help="GPUs the node pretends to have"
    )
    up.add_argument(
        "--image", action="append", default=[], choices=IMAGE_NAMES, help="to build and load; repeatable"
    )
    load = commands.add_parser("load", help="builds images and loads them into a running cluster")
    load.add_argument("cluster", help="its name, as `up` prints it")
    load.add_argument("image", nargs="+", choices=IMAGE_NAMES)
    return parser


def _up(arguments: argparse.Namespace) -> None:
    options = Options(
        hpa_sync_seconds=arguments.hpa_sync_seconds,
        gpus=arguments.gpus,
        node=not arguments.control_plane_only,
    )
    images = [built_image(name, say_on_stderr) for name in arguments.image]
    # Also where a shell that started this in the background has them ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    started = time.monotonic()
    with local_cluster(options) as cluster:
        for image in images:
            cluster.load_image(image.archive)
            say_on_stderr(f"loaded {image.reference}")
        print(_how_to_use(cluster, time.monotonic() - started), flush=True)
        while True:
            time.sleep(1)
            for component in cluster.components.values():
                component.fail_if_ended()


def _load(name: str, images: list[str]) -> None:
    directory = CLUSTERS / name
    if not (directory / INIT_PID).exists():
        raise ClusterUnavailable(f"no cluster of this name runs: {name}")
    init_pid = int((directory / INIT_PID).read_text())
    for image in [built_image(image, say_on_stderr) for image in images]:
        import_image(lambda *command: command_inside(init_pid, *command), image.archive)
        print(image.reference)


def _how_to_use(cluster: LocalCluster, seconds: float) -> str:
    return f"""\
The cluster {cluster.sandbox.name} runs, after {seconds:.1f} s.

  export KUBECONFIG={cluster.kubeconfig}
  export PATH={cluster.kubectl_path.parent}:$PATH
  kubectl get nodes

Pods and Services have addresses inside only. A shell on the node:
  {" ".join(cluster.sandbox.command("bash"))}
A command with the node's network, and everything else of the host:
  {" ".join(cluster.command_inside("COMMAND"))}

Logs of the components and the audit log: {cluster.logs}
Ctrl-C stops it and removes everything."""


if __name__ == "__main__":
    sys.exit(main())
