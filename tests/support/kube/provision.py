"""Which cluster the tests get: one that is named, else a local one, else none."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from support.kube import binaries
from support.kube.cluster import Cluster
from support.kube.components import Options
from support.kube.errors import ClusterFailed, ClusterUnavailable
from support.kube.host import Say
from support.kube.images import (
    OPERATOR,
    SERVER,
    SERVER_WITH_TORCH,
    BuiltImage,
    ensure_image,
    ensure_slim_archive,
)
from support.kube.local import ensure_prepared

PYTHON = "python"
IMAGES = {"operator": OPERATOR, "server": SERVER, "server_torch": SERVER_WITH_TORCH}
IMAGE_NAMES = [PYTHON, *IMAGES]

EXISTING = "DRAFTLINE_TEST_KUBECONFIG"
REQUIRED = "DRAFTLINE_REQUIRE_CLUSTER"


def is_required() -> bool:
    """Whether tests that need a cluster fail without one, rather than being skipped."""
    return os.environ.get(REQUIRED) == "1"


def existing_cluster(say: Say) -> Cluster | None:
    """The cluster of the kubeconfig that the environment names, if it names one."""
    named = os.environ.get(EXISTING)
    if not named:
        return None
    kubeconfig = Path(named).expanduser().resolve()
    if not kubeconfig.is_file():
        raise ClusterUnavailable(f"{EXISTING} names no file: {kubeconfig}")
    kubectl = shutil.which("kubectl")
    path = Path(kubectl) if kubectl else binaries.ensure_binaries(("kubectl",), say)["kubectl"]
    return Cluster(kubeconfig, path)


def prepare(images: Iterable[str], say: Say) -> str | None:
    """Does what takes minutes before any test's time runs; returns why there will be no cluster, if so."""
    try:
        if existing_cluster(say) is None:
            ensure_prepared(Options(), say)
            for image in images:
                with contextlib.suppress(ClusterFailed):  # which is for the test that needs the image to say
                    built_image(image, say)
    except ClusterUnavailable as reason:
        return str(reason)
    return None


def built_image(name: str, say: Say) -> BuiltImage:
    """One of the images that tests use, of the code as it is now."""
    if name == PYTHON:
        return ensure_slim_archive(say)
    return ensure_image(IMAGES[name], say)


def image_variable(name: str) -> str:
    """Says which image to use on a cluster that the tests did not start, where it has to be already."""
    return f"DRAFTLINE_TEST_{name.upper()}_IMAGE"


def image_of_existing_cluster(name: str) -> str | None:
    # Python's own image can be pulled from wherever the cluster pulls its images.
    return os.environ.get(image_variable(name), "python:3.11-slim" if name == PYTHON else None)
