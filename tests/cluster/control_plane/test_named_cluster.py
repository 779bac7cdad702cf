"""Where the environment names a cluster, the tests use it as far as it goes, and never start another one."""

from __future__ import annotations

from support.kube.local import LocalCluster
from support.kube.provision import EXISTING
from support.pytest_runs import run_pytest

HERE = "tests/cluster/control_plane"
OF_THE_OPERATOR_ALONE = f"{HERE}/test_operator_replicas.py::test_zero_is_zero_and_no_failure"
OF_OTHER_USERS = (
    f"{HERE}/test_operator_faults.py::test_a_right_that_is_missing_is_a_condition_and_no_hot_loop"
)
OF_CLUSTERS_OF_THEIR_OWN = [
    f"{HERE}/test_operator_rights.py::test_in_namespaced_scope_it_asks_for_all_that_it_may_and_nothing_else",
    "tests/cluster/test_serving_scaling.py"
    "::test_a_queue_adds_pods_in_time_where_the_autoscaler_looks_every_fifteen_seconds",
    "tests/cluster/test_cluster_ends.py::test_two_clusters_at_once_do_not_meet",
]


def test_without_nodes_it_serves_for_what_needs_none_and_the_rest_says_why_not(
    local_control_plane: LocalCluster,
) -> None:
    tests = [OF_THE_OPERATOR_ALONE, OF_OTHER_USERS, *OF_CLUSTERS_OF_THEIR_OWN]
    result = run_pytest(*tests, **{EXISTING: str(local_control_plane.kubeconfig)})
    assert result.returncode == 0, result.stdout
    assert "1 passed, 4 skipped" in result.stdout
    assert "starts a cluster of its own, and the environment names one" in result.stdout
    assert "needs a local cluster" in result.stdout


def test_with_nodes_it_is_left_alone_by_tests_that_play_the_kubelet(
    local_control_plane: LocalCluster,
) -> None:
    spec = {"unschedulable": True}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "somebodys"}, "spec": spec}
    local_control_plane.apply(node)
    try:
        result = run_pytest(OF_THE_OPERATOR_ALONE, **{EXISTING: str(local_control_plane.kubeconfig)})
    finally:
        local_control_plane.delete(node)
    assert result.returncode == 0, result.stdout
    assert "1 skipped" in result.stdout
    assert "needs a control plane without nodes" in result.stdout
