"""Reads the load of serving pods from their admin ports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from draftline_operator.constants import ADMIN_PORT, RUNNING_METRIC, WAITING_METRIC
from draftline_operator.errors import ClusterError
from draftline_operator.models.load import PodSample

SCRAPE_TIMEOUT_SECONDS: Final = 1.0
_MAX_CONCURRENT_SCRAPES: Final = 64
_CHUNK_BYTES, _MAX_BYTES = 2**16, 2**22
_MAX_VALUE = 2.0**53
_DRAFTED, _ACCEPTED = "draftline_draft_tokens_total", "draftline_accepted_tokens_total"
_SPECULATING, _DRAINING = "draftline_speculation_active", "draftline_draining"
_MODEL_INFO = "draftline_model_info"
_READ = (WAITING_METRIC, RUNNING_METRIC, _DRAFTED, _ACCEPTED, _SPECULATING, _DRAINING, _MODEL_INFO)


class PodScraper:
    """Close it at the end. Pods that hang cost a second each, of a limited number at a time."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        port: int = ADMIN_PORT,
        timeout: float = SCRAPE_TIMEOUT_SECONDS,
    ) -> None:
        self._clock = clock
        self._port = port
        self._timeout = timeout
        # Not the connector's limit: a pod's time begins when it is asked, not when it is to be.
        self._turns = asyncio.Semaphore(_MAX_CONCURRENT_SCRAPES)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout), connector=aiohttp.TCPConnector(limit=0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def scrape(self, address: str) -> PodSample:
        """Of the pod at this IP address; raises `ClusterError` where it does not tell."""
        assert self._session is not None
        host = f"[{address}]" if ":" in address else address
        try:
            async with self._turns, self._session.get(f"http://{host}:{self._port}/metrics") as response:
                if response.status != 200:
                    raise ClusterError(f"{address} answered /metrics with status {response.status}")
                text = await _read(response)
            return read_sample(text, sampled_at=self._clock())
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, ArithmeticError) as error:
            raise ClusterError(f"{address} does not tell its metrics: {type(error).__name__}") from error


async def _read(response: aiohttp.ClientResponse) -> str:
    """Pods run whatever image their resource names: none of them fills our memory."""
    page = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        page += chunk
        if len(page) > _MAX_BYTES:
            raise ValueError("more than a page of metrics")
    return page.decode(errors="replace")


def read_sample(text: str, *, sampled_at: float) -> PodSample:
    """The few figures that matter here, out of a page of metrics; raises ValueError for what is none."""
    # Most of the page is histograms; parsing only our lines is ten times cheaper.
    lines = [line for line in text.splitlines() if line.startswith(_READ)]
    try:
        families = text_string_to_metric_families("\n".join(lines) + "\n")
        samples = [sample for family in families for sample in family.samples]
    except Exception as error:  # the parser trusts its input
        raise ValueError(f"not a page of metrics: {error}") from error
    if not any(sample.name == RUNNING_METRIC for sample in samples):
        raise ValueError(f"{RUNNING_METRIC} is missing")
    speculating = _values(samples, _SPECULATING)
    return PodSample(
        sampled_at=sampled_at,
        waiting=int(sum(_values(samples, WAITING_METRIC))),
        running=int(sum(_values(samples, RUNNING_METRIC))),
        draft_tokens=sum(_values(samples, _DRAFTED)),
        accepted_tokens=sum(_values(samples, _ACCEPTED)),
        is_speculating=speculating[0] > 0 if speculating else None,
        is_draining=any(value > 0 for value in _values(samples, _DRAINING)),
        pair_digest=next((s.labels.get("pair_digest") for s in samples if s.name == _MODEL_INFO), None),
    )


def _values(samples: Iterable[Sample], name: str) -> list[float]:
    values = [sample.value for sample in samples if sample.name == name]
    for value in values:
        if not 0 <= value <= _MAX_VALUE:
            raise ValueError(f"{name} is {value}")
    return values
