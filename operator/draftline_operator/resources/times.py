"""How long a pod may take to come and to leave."""

from __future__ import annotations

import math
from typing import Final

from draftline_operator.models.spec import SpeculativeDeploymentSpec

# Scheduling, and pulling the image.
PREPARATION_SECONDS: Final = 600
# Bringing a model of any size into the cache.
FETCH_SECONDS: Final = 4 * 3600

# After deletion, before SIGTERM: endpoints and balancers need a moment to forget the pod.
PRE_STOP_SECONDS: Final = 5

# gRPC ends connections at up to 1.1 times their age; the server waits that long for clients to leave.
_AGE_JITTER = 1.1
_AGE_MARGIN_SECONDS = 1
# Of the server, for the statuses of calls that were ended to reach their clients.
_FAREWELL_SECONDS = 5
# The process itself, with memory of a GPU to give back.
_EXIT_SECONDS = 10


def termination_grace_period_seconds(spec: SpeculativeDeploymentSpec) -> int:
    """From deletion; after this the kubelet kills, and no drain takes as long."""
    serving = spec.serving
    last_connection = math.ceil(_AGE_JITTER * serving.max_connection_age_seconds) + _AGE_MARGIN_SECONDS
    leaving = max(serving.lame_duck_seconds, last_connection)
    drain = spec.disruption.drain_timeout_seconds
    return PRE_STOP_SECONDS + leaving + drain + _FAREWELL_SECONDS + _EXIT_SECONDS
