"""Whether a caller may read a metric, asked of the API server and remembered for a moment."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from draftline_operator.cluster.interface import Cluster
from draftline_operator.planning.front_proxy import Caller, access_review

REMEMBERED_SECONDS: Final = 10.0
"""As long as the API server remembers a webhook's answers; a right taken away works on until then."""
MAX_REMEMBERED: Final = 1024


class AccessReviews:
    """The autoscaler asks for the same metrics all the time; so few reviews reach the API server."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._remembered: OrderedDict[tuple[Caller, tuple[tuple[str, str], ...]], tuple[float, bool]]
        self._remembered = OrderedDict()

    async def allows(self, caller: Caller, attributes: Mapping[str, str]) -> bool:
        key = (caller, tuple(sorted(attributes.items())))
        remembered = self._remembered.get(key)
        if remembered is not None and self._clock() < remembered[0]:
            return remembered[1]
        review = await self._cluster.create(access_review(caller, attributes))
        is_allowed = bool(review["status"]["allowed"])
        self._remembered[key] = (self._clock() + REMEMBERED_SECONDS, is_allowed)
        self._remembered.move_to_end(key)
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return is_allowed
