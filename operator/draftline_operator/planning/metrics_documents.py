"""The documents of custom.metrics.k8s.io as the aggregator and the horizontal pod autoscaler read them. Pure.

The autoscaler gets one metric of one object by name and never looks at the resource list; that list only has
to be there and not to be empty, or every kubectl command complains about it.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import Any, Final, Literal

from draftline_operator.constants import API_VERSION, GROUP, KIND, PLURAL, RUNNING_METRIC, WAITING_METRIC

Document = dict[str, Any]
MetricsVersion = Literal["v1beta2", "v1beta1"]

METRICS_GROUP: Final = "custom.metrics.k8s.io"
METRICS_VERSIONS: Final[tuple[MetricsVersion, ...]] = ("v1beta2", "v1beta1")
"""In order of preference."""
METRICS_RESOURCE: Final = f"{PLURAL}.{GROUP}"
"""How the API names our kind in its paths: plural and group."""
METRICS: Final = (WAITING_METRIC, RUNNING_METRIC)

StatusReason = Literal[
    "Unauthorized", "Forbidden", "NotFound", "MethodNotAllowed", "InternalError", "ServiceUnavailable"
]
_CODES: Final[Mapping[StatusReason, int]] = {
    "Unauthorized": 401,
    "Forbidden": 403,
    "NotFound": 404,
    "MethodNotAllowed": 405,
    "InternalError": 500,
    "ServiceUnavailable": 503,
}


def api_service_name(version: MetricsVersion) -> str:
    """Of the APIService that brings a version of the group to us."""
    return f"{version}.{METRICS_GROUP}"


def api_group() -> Document:
    """GET /apis/custom.metrics.k8s.io."""
    versions = [
        {"groupVersion": f"{METRICS_GROUP}/{version}", "version": version} for version in METRICS_VERSIONS
    ]
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": METRICS_GROUP,
        "versions": versions,
        "preferredVersion": versions[0],
    }


def api_group_list() -> Document:
    """GET /apis."""
    group = {key: value for key, value in api_group().items() if key not in ("kind", "apiVersion")}
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}


def resource_list(version: MetricsVersion) -> Document:
    """GET /apis/custom.metrics.k8s.io/VERSION, which is also how the aggregator asks whether we are alive."""
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{METRICS_GROUP}/{version}",
        "resources": [
            {
                "name": f"{METRICS_RESOURCE}/{metric}",
                "singularName": "",
                "namespaced": True,
                "kind": "MetricValueList",
                "verbs": ["get"],
            }
            for metric in METRICS
        ],
    }


def metric_value_list(
    version: MetricsVersion, *, namespace: str, name: str, metric: str, value: float, sampled_at: float
) -> Document:
    """The list with exactly one item that an Object metric has to be; `sampled_at` is in Unix seconds."""
    item: Document = {
        "describedObject": {"kind": KIND, "namespace": namespace, "name": name, "apiVersion": API_VERSION}
    }
    timestamp, quantity = _timestamp(sampled_at), _quantity(value)
    if version == "v1beta2":
        item |= {
            "metric": {"name": metric, "selector": None},
            "timestamp": timestamp,
            "windowSeconds": 0,
            "value": quantity,
        }
    else:
        item |= {
            "metricName": metric,
            "timestamp": timestamp,
            "window": 0,
            "value": quantity,
            "selector": None,
        }
    return {
        "kind": "MetricValueList",
        "apiVersion": f"{METRICS_GROUP}/{version}",
        "metadata": {},
        "items": [item],
    }


def failure(reason: StatusReason, message: str) -> Document:
    """The Status that says why there is no answer; clients of Kubernetes print its message."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": _CODES[reason],
    }


def _timestamp(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(math.floor(seconds), tz=datetime.UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _quantity(value: float) -> str:
    """A Kubernetes quantity: whole where it can be, else in thousandths, as fine as the autoscaler reads."""
    thousandths = round(value * 1000)
    return str(thousandths // 1000) if thousandths % 1000 == 0 else f"{thousandths}m"
