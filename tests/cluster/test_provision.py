"""Where no cluster can be had, that is said, once and loudly, and nothing else happens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.pytest_runs import run_pytest

NODE_TEST = "tests/cluster/test_cluster.py::test_the_node_is_ready"


def lines_about_the_cluster(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("NO TEST CLUSTER")]


def test_without_a_cluster_its_tests_are_skipped_with_one_loud_line(tmp_path: Path) -> None:
    result = run_pytest(NODE_TEST, DRAFTLINE_TEST_KUBECONFIG=str(tmp_path / "missing"))
    assert result.returncode == 0
    assert "1 skipped" in result.stdout
    (line,) = lines_about_the_cluster(result.stdout)
    assert line.endswith(f"DRAFTLINE_TEST_KUBECONFIG names no file: {tmp_path / 'missing'}")


def test_where_a_cluster_is_required_its_tests_fail_without_one(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    result = run_pytest(NODE_TEST, DRAFTLINE_TEST_KUBECONFIG=missing, DRAFTLINE_REQUIRE_CLUSTER="1")
    assert result.returncode == 1
    assert "1 error" in result.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gets as far as the binaries")
def test_binaries_that_are_missing_are_named(tmp_path: Path) -> None:
    for name in ("etcd", "kube-apiserver", "kubectl"):  # what other projects' tests need
        (tmp_path / name).touch(mode=0o755)
    result = run_pytest(NODE_TEST, KUBEBUILDER_ASSETS=str(tmp_path))
    (line,) = lines_about_the_cluster(result.stdout)
    lacks = "lacks kube-controller-manager, kube-scheduler, kubelet, kube-proxy, coredns"
    assert line.endswith(f"KUBEBUILDER_ASSETS={tmp_path} {lacks}")
