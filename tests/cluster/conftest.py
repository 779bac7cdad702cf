"""The cluster that the tests here run on. One for all of them: each test keeps to a namespace of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.kept_logs import kept_logs, recorded_cluster
from support.kube import provision
from support.kube.cluster import Cluster
from support.kube.local import LocalCluster

why_none = pytest.StashKey[str | None]()


@pytest.hookimpl(tryfirst=True)  # before marks are selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("cluster")


def pytest_collection_finish(session: pytest.Session) -> None:
    # Here, where no test's time limit runs: the first time on a machine this builds Kubernetes and images.
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if "needs_cluster" in fixtures and not session.config.option.collectonly:
        images = [name for name in provision.IMAGE_NAMES if f"{name}_image" in fixtures]
        session.config.stash[why_none] = provision.prepare(images, lambda line: _say(session.config, line))


def _say(config: pytest.Config, line: str) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(line)


@pytest.fixture(scope="session")
def needs_cluster(pytestconfig: pytest.Config) -> None:
    """Ends the test where no cluster can be had: as a failure where one is required, else as skipped."""
    if reason := pytestconfig.stash.get(why_none, None):
        if provision.is_required():
            pytest.fail(f"NO TEST CLUSTER: {reason}", pytrace=False)
        pytest.skip(f"NO TEST CLUSTER: {reason}")


@pytest.fixture(scope="session")
def named_cluster(needs_cluster: None, pytestconfig: pytest.Config) -> Cluster | None:
    """The cluster that the environment names. Where it names one, no other is started beside it."""
    return provision.existing_cluster(lambda line: _say(pytestconfig, line))


@pytest.fixture(scope="session")
def starts_clusters(named_cluster: Cluster | None) -> None:
    """For tests that start clusters of their own."""
    if named_cluster is not None:
        pytest.skip("starts a cluster of its own, and the environment names one")


@pytest.fixture(scope="session")
def cluster(named_cluster: Cluster | None, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The cluster that the environment names, or else a local one."""
    if named_cluster is not None:
        yield named_cluster
        return
    with recorded_cluster(request.session) as local:
        yield local


@pytest.fixture(scope="session")
def local_cluster(cluster: Cluster) -> LocalCluster:
    """The same, for tests of what only a local one can do."""
    if not isinstance(cluster, LocalCluster):
        pytest.skip("needs a local cluster")
    return cluster


@pytest.fixture(scope="session")
def python_image(cluster: Cluster) -> str:
    """An image with Python and nothing else."""
    return _image("python", cluster)


@pytest.fixture(scope="session")
def operator_image(cluster: Cluster) -> str:
    """The operator's image, of the code as it is."""
    return _image("operator", cluster)


@pytest.fixture(scope="session")
def server_image(cluster: Cluster) -> str:
    """The server's image, of the code as it is, without torch: the pods of tests mount that from the host."""
    return _image("server", cluster)


def _image(name: str, cluster: Cluster) -> str:
    """What a pod names an image by that is now in the cluster."""
    if not isinstance(cluster, LocalCluster):
        reference = provision.image_of_existing_cluster(name)
        if reference is None:
            pytest.skip(f"{provision.image_variable(name)} does not say which image of the cluster to use")
        return reference
    image = provision.built_image(name, lambda _: None)
    cluster.load_image(image.archive)
    return image.reference


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own, deleted after it."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace", name, "--timeout=30s")
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if reason := config.stash.get(why_none, None):
        terminalreporter.write_line(f"NO TEST CLUSTER, its tests did not run: {reason}", red=True, bold=True)
    for directory in config.stash.get(kept_logs, []):
        terminalreporter.write_line(f"logs of the test cluster: {directory}")
