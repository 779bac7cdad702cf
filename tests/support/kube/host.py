"""What the machine has to have: Linux, root, and programs of Debian packages, which root may install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from support.kube.errors import ClusterUnavailable

Say = Callable[[str], None]

# Which package has a program, or a file.
CONTROL_PLANE = {
    "ip": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "openssl": "openssl",
}
NODE = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
IMAGES = {
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "gcc": "gcc",
    "/usr/lib/x86_64-linux-gnu/libc.a": "libc6-dev",
}

# Where Debian keeps what only root calls; a login shell of another user may not have it in its path.
SEARCH_PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def require_root() -> None:
    """A cluster needs namespaces, mounts and control groups."""
    if sys.platform != "linux":
        raise ClusterUnavailable(f"a local cluster needs Linux, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise ClusterUnavailable("a local cluster needs root")


def ensure_programs(programs: dict[str, str], say: Say) -> None:
    """Installs the packages of the programs that are missing, or names them."""
    packages = sorted({programs[program] for program in _missing(programs)})
    if not packages:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterUnavailable(f"missing Debian packages: {' '.join(packages)}")
    say(f"installing Debian packages: {' '.join(packages)}")
    _apt_get("update")
    _apt_get("install", "--yes", "--no-install-recommends", *packages)
    if missing := _missing(programs):
        raise ClusterUnavailable(
            f"missing after the installation of {' '.join(packages)}: {' '.join(missing)}"
        )


def _missing(programs: Iterable[str]) -> list[str]:
    return [
        program
        for program in programs
        if not (Path(program).exists() if "/" in program else shutil.which(program, path=SEARCH_PATH))
    ]


def _apt_get(*arguments: str) -> None:
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-qq", *arguments]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        last_line = (result.stderr.strip() or "no output").splitlines()[-1]
        raise ClusterUnavailable(f"{' '.join(command)} failed: {last_line}")
