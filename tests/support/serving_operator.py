"""The operator on a test cluster, installed by its chart, with real serving pods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.kube.local import LocalCluster
from support.release import Release, release_of

_READY_FLAGS = ("--wait", "--timeout", "120s")


def image_values(reference: str) -> dict[str, str]:
    """As the chart names an image."""
    name, _, tag = reference.rpartition(":")
    registry, _, repository = name.partition("/")
    return {"registry": registry, "repository": repository, "tag": tag}


@contextmanager
def serving_operator(cluster: LocalCluster, operator_image: str, server_image: str) -> Iterator[Release]:
    """Serves models from the node's disk, where tests make them."""
    values: dict[str, Any] = {
        "image": image_values(operator_image),
        "serving": {"image": image_values(server_image), "allowHostPath": True},
        "autoscaling": {"provider": "builtin"},
    }
    with release_of(cluster) as release:
        release.install(values, *_READY_FLAGS)
        yield release
