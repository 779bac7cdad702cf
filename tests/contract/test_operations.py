"""The operations guide names every reason of a condition and every metric, and none that does not exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftline_operator.metrics import OperatorMetrics
from draftline_operator.models.status import ConditionType
from draftline_server.core.stats import EngineStatistics
from draftline_server.metrics import GpuCollector, ServerMetrics, ServerState
from draftline_server.testing import describe_scripted_pair

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")

OPERATOR = ROOT / "operator" / "draftline_operator"
# The metrics API answers with reasons of its own, which are no conditions of ours.
WITHOUT_CONDITIONS = {"metrics_documents.py"}
MODULES = [
    *(path for path in (OPERATOR / "planning").glob("*.py") if path.name not in WITHOUT_CONDITIONS),
    OPERATOR / "services" / "reconcile.py",
    ROOT / "server" / "draftline_server" / "preflight.py",
]
# Names in these modules that look like reasons. A new one has to be listed here, or in the guide.
NO_REASONS = {
    # statuses of conditions
    "True",
    "False",
    "Unknown",
    # what other objects are asked for
    "AbleToScale",
    "Available",
    "Complete",
    "Deployment",
    "Failed",
    "PodScheduled",
    "Progressing",
    "Ready",
    "ScalingActive",
    "Succeeded",
    # reasons of other objects, which go into messages
    "Error",
    "FailedGetScale",
    "FailedUpdateScale",
    "Unavailable",
    # told as ImagePullBackOff
    "ErrImageNeverPull",
    "ErrImagePull",
    # of status.speculationState
    "Active",
    "Mixed",
    "Off",
}

_NAME = re.compile(r"[A-Z][A-Za-z0-9]+")
_TYPE = re.compile(r"^# TYPE (\w+) \w+$", re.MULTILINE)
_HISTOGRAM_SERIES = re.compile(r"_(bucket|sum|count)$")


def names_in_code() -> set[str]:
    """All strings of the modules that could be the reason of a condition."""
    return {
        node.value
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value)
    }


def metrics_on(page: bytes) -> set[str]:
    """As they are queried: counters with their _total. When a series was made is no metric of ours."""
    return {name for name in _TYPE.findall(page.decode()) if not name.endswith("_created")}


def server_metrics() -> set[str]:
    state = ServerState(
        statistics=EngineStatistics(), is_draining=False, description=describe_scripted_pair()
    )
    metrics = metrics_on(ServerMetrics(version="1.2.3", read_state=lambda: state).render())
    no_gpu = SimpleNamespace(NVMLError=Exception, nvmlDeviceGetCount=lambda: 0)
    return metrics | {family.name for family in GpuCollector(no_gpu).collect()}


def operator_metrics() -> set[str]:
    return metrics_on(OperatorMetrics().render())


def first_column(heading: str) -> list[str]:
    """What stands in backticks in the first column of the tables that `heading` begins."""
    found: list[str] = []
    current: str | None = None
    for line in GUIDE.splitlines():
        if not line.startswith("|"):
            current = None
            continue
        cell = line.split("|")[1].strip()
        if current is None:
            current = cell
        elif current == heading:
            found += re.findall(r"`([^`]+)`", cell)
    return found


def test_every_reason_of_a_condition_is_in_the_guide() -> None:
    reasons = names_in_code() - NO_REASONS
    assert len(reasons) > 30
    assert sorted(reasons - set(first_column("Reason"))) == []


def test_the_guide_has_no_reason_that_nothing_gives() -> None:
    assert sorted(set(first_column("Reason")) - (names_in_code() - NO_REASONS)) == []


def test_names_that_are_no_reasons_are_still_in_the_code() -> None:
    assert sorted(NO_REASONS - names_in_code()) == []


def test_the_guide_has_every_condition() -> None:
    assert first_column("Condition") == [str(condition) for condition in ConditionType]


@pytest.mark.parametrize("metrics", [server_metrics, operator_metrics], ids=["server", "operator"])
def test_every_metric_is_in_the_guide(metrics: Callable[[], set[str]]) -> None:
    assert sorted(metrics() - set(first_column("Metric"))) == []


def test_the_guide_has_no_metric_that_nobody_exports() -> None:
    exported = server_metrics() | operator_metrics()
    assert sorted(set(first_column("Metric")) - exported) == []
    queried = {_HISTOGRAM_SERIES.sub("", name) for name in re.findall(r"\bdraftline_\w+", GUIDE)}
    assert sorted(queried - exported) == []


@pytest.mark.parametrize("heading", ["Reason", "Metric"])
def test_nothing_is_in_two_tables(heading: str) -> None:
    names = first_column(heading)
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
