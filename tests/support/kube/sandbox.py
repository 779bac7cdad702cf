"""Namespaces of its own for one cluster: processes, mounts and network, and control groups under one name.

No name and no address of a sandbox is visible outside, so two of them cannot meet, and nothing of them leaves
the machine. They live as long as their process 1, which lives as long as this process holds the other end of
its input. What then stays behind, a directory and empty control groups, is removed by `stop`, or else by the
next start.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from support.kube.cache import exclusive
from support.kube.control_groups import create_control_groups, remove_control_groups
from support.kube.errors import ClusterFailed
from support.kube.host import SEARCH_PATH

CLUSTERS = Path("/var/lib/draftline/clusters")
INIT_PID = "init.pid"
HERE = Path(__file__).parent

NODE_ADDRESS = "10.99.0.2"

# Programs write to fixed places as well: there each cluster has a directory of its own mounted.
PRIVATE_DIRECTORIES = {"/var/log": "var-log", "/var/lib/kubelet": "kubelet", "/var/lib/cni": "cni-state"}

# Both ends of the link stay inside: there is a default route, as Kubernetes wants it, and it leads nowhere.
SET_UP = f"""
set -e
mount --make-rshared /
mount -t tmpfs tmpfs /run
ip link set lo up
ip link add eth0 type veth peer name nowhere
ip link set nowhere up
ip address add {NODE_ADDRESS}/24 dev eth0
ip link set eth0 up
ip route add default via 10.99.0.1
echo 1 > /proc/sys/net/ipv4/ip_forward
if [ -e /proc/sys/net/bridge/bridge-nf-call-iptables ]; then
    echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables
fi
"""


@dataclass
class Component:
    """A process inside, with a log of its own."""

    name: str
    arguments: list[str]
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Of the process itself, as the host counts: nsenter only waits for it."""
        return _only_child_of(self.process.pid)

    def kill(self) -> None:
        """Ends it at once."""
        if self.process.poll() is None:
            os.kill(self.pid, 9)
            self.process.wait()

    def fail_if_ended(self) -> None:
        if (code := self.process.poll()) is not None:
            last_lines = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
            raise ClusterFailed(f"{self.name} ended with {code}, log in {self.log}:\n{last_lines}")


class Sandbox:
    """The namespaces, the directory and the control groups of one cluster."""

    def __init__(self) -> None:
        with exclusive(CLUSTERS / ".lock"):
            _remove_what_killed_runs_left()
            self.name = f"draftline-{secrets.token_hex(4)}"
            self.directory = CLUSTERS / self.name
            self.logs = self.directory / "logs"
            self.logs.mkdir(parents=True)
            self._claim = _claim(self.directory)
        self._init: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            create_control_groups(self.name)
            self._init = _start_init()
            self.init_pid = _only_child_of(self._init.pid)
            (self.directory / INIT_PID).write_text(f"{self.init_pid}\n")
            self._set_up()
        except BaseException:
            self.stop()
            raise

    def command(self, *arguments: str, only_network: bool = False) -> list[str]:
        """The command line that runs another one inside."""
        return command_inside(self.init_pid, *arguments, only_network=only_network)

    def run(self, *arguments: str, **options: Any) -> str:
        """Runs a command inside, and returns what it prints; a failure raises with what it says."""
        command = self.command(*arguments)
        result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        if result.returncode != 0:
            raise ClusterFailed(
                f"{' '.join(arguments)} failed: {result.stderr.strip() or result.stdout.strip()}"
            )
        return str(result.stdout)

    def start(self, name: str, *arguments: str) -> Component:
        """Starts a process inside that lasts; its log is appended to, should there be one of the name."""
        log = self.logs / f"{name}.log"
        with log.open("ab") as output:
            process = self._popen(self.command(*arguments), stdout=output, stderr=subprocess.STDOUT)
        return Component(name, list(arguments), log, process)

    def forward(self, address: str, port: int) -> int:
        """A port of the host's loopback that leads to an address inside, as long as the sandbox lasts."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            descriptor = listener.fileno()
            arguments = [sys.executable, str(HERE / "forward.py"), str(descriptor), address, str(port)]
            log = self.logs / f"forward-{address}-{port}.log"
            with log.open("ab") as output:
                self._popen(
                    self.command(*arguments), stdout=output, stderr=subprocess.STDOUT, pass_fds=[descriptor]
                )
            return int(listener.getsockname()[1])

    def stop(self) -> None:
        """Ends everything and removes it; may be called again."""
        if self._init is not None:
            assert self._init.stdin is not None
            self._init.stdin.close()
            self._init.wait()
        for process in self._processes:
            process.wait()
        remove_control_groups(self.name)
        shutil.rmtree(self.directory, ignore_errors=True)
        if self._claim is not None:
            self._claim.close()

    def _set_up(self) -> None:
        self.run("sh", "-c", SET_UP)
        for place, name in PRIVATE_DIRECTORIES.items():
            (self.directory / name).mkdir()
            Path(place).mkdir(parents=True, exist_ok=True)
            self.run("mount", "--bind", str(self.directory / name), place)

    def _popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PATH": SEARCH_PATH},
            start_new_session=True,
            **options,
        )
        self._processes.append(process)
        return process


def _start_init() -> subprocess.Popen[bytes]:
    namespaces = ["--fork", "--pid", "--mount-proc", "--net", "--propagation", "private"]
    process = subprocess.Popen(
        ["unshare", *namespaces, "--kill-child", sys.executable, "-I", str(HERE / "init.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the owner, which then stops it
    )
    assert process.stdout is not None
    with process.stdout:
        if process.stdout.readline() != b"ready\n":
            raise ClusterFailed(f"unshare ended with {process.wait()}: are namespaces allowed here?")
    return process


def command_inside(init_pid: int, *arguments: str, only_network: bool = False) -> list[str]:
    """The command line that runs another one in the namespaces of a process.

    With the network alone it would outlive the cluster, and hold its network: so it ends with the thread that
    starts it, as the rest does with process 1.
    """
    bound = ["setpriv", "--pdeathsig", "KILL"] if only_network else []
    namespaces = ["--net"] if only_network else ["--net", "--mount", "--pid"]
    # Not `ip netns exec`, which mounts another /sys, where the kubelet finds no control groups.
    return [*bound, "nsenter", "--target", str(init_pid), *namespaces, "--", *arguments]


def _only_child_of(pid: int) -> int:
    """Of a process that forks once, which may be about to."""
    give_up = time.monotonic() + 5
    while time.monotonic() < give_up:
        if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(children[0])
        time.sleep(0.01)
    raise ClusterFailed(f"process {pid} has no child")


def _claim(directory: Path) -> IO[str] | None:
    """A lock on a directory that goes when this process does; none if another process has it."""
    lock = (directory / "owner.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _remove_what_killed_runs_left() -> None:
    for directory in CLUSTERS.iterdir():
        if directory.is_dir() and (claim := _claim(directory)) is not None:
            with claim:
                remove_control_groups(directory.name)
                shutil.rmtree(directory, ignore_errors=True)
