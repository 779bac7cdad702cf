"""Control groups of one cluster: one of its name in every hierarchy, for the kubelet to put pods under."""

from __future__ import annotations

import os
import time
from pathlib import Path

MOUNTS = Path("/proc/self/mounts")


def hierarchies(mounts: str) -> list[Path]:
    """Where control groups are mounted: once in version 2, once for each controller in version 1."""
    fields = (line.split() for line in mounts.splitlines())
    return [Path(point) for _, point, kind, *_ in fields if kind in ("cgroup", "cgroup2")]


def create_control_groups(name: str) -> None:
    for hierarchy in hierarchies(MOUNTS.read_text()):
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        # Version 1: no process may enter a cpuset before it has these.
        for setting in ("cpuset.mems", "cpuset.cpus"):
            if (hierarchy / setting).exists():
                (group / setting).write_text((hierarchy / setting).read_text())
        # Version 2: what a group's children may use has to be handed down.
        if (hierarchy / "cgroup.subtree_control").exists() and (controllers := _controllers(hierarchy)):
            (hierarchy / "cgroup.subtree_control").write_text(controllers)
            (group / "cgroup.subtree_control").write_text(controllers)


def remove_control_groups(name: str, *, patience_seconds: float = 10.0) -> None:
    """Removes the groups with all that is under them; what ended just now may take a moment to leave them."""
    give_up = time.monotonic() + patience_seconds
    for hierarchy in hierarchies(MOUNTS.read_text()):
        for directory, _, _ in os.walk(hierarchy / name, topdown=False):
            while True:
                try:
                    os.rmdir(directory)
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > give_up:
                        raise
                    time.sleep(0.05)
                else:
                    break


def control_groups_of(name: str) -> list[Path]:
    """Those that are there."""
    return [hierarchy / name for hierarchy in hierarchies(MOUNTS.read_text()) if (hierarchy / name).exists()]


def _controllers(hierarchy: Path) -> str:
    return " ".join(f"+{name}" for name in (hierarchy / "cgroup.controllers").read_text().split())
