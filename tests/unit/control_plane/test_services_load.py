"""Loads come from real HTTP: pods that answer, hang, fail and leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import web

from draftline_operator.cluster.interface import Cluster
from draftline_operator.cluster.pods import SCRAPE_TIMEOUT_SECONDS, PodScraper, read_sample
from draftline_operator.errors import ClusterError, ForbiddenError
from draftline_operator.metrics import OperatorMetrics
from draftline_operator.models.kinds import Kind
from draftline_operator.models.load import PodSample
from draftline_operator.models.observed import Object
from draftline_operator.services.load import FRESH_SECONDS, LoadCache
from support.observations import serving_pod

PAGE = """\
# HELP draftline_requests_running Requests that run.
# TYPE draftline_requests_running gauge
draftline_requests_running 3.0
# TYPE draftline_requests_waiting gauge
draftline_requests_waiting 2.0
# TYPE draftline_draft_tokens_total counter
draftline_draft_tokens_total{proposer="ngram"} 100.0
draftline_draft_tokens_total{proposer="draft_model"} 300.0
# TYPE draftline_accepted_tokens_total counter
draftline_accepted_tokens_total{proposer="ngram"} 50.0
draftline_accepted_tokens_total{proposer="draft_model"} 250.0
# TYPE draftline_accepted_tokens_per_position_total counter
draftline_accepted_tokens_per_position_total{proposer="ngram",position="1"} 9999.0
# TYPE draftline_speculation_active gauge
draftline_speculation_active 1.0
# TYPE draftline_draining gauge
draftline_draining 0.0
# TYPE draftline_model_info gauge
draftline_model_info{pair_digest="sha256:abc",target="a",draft="b",version="1"} 1.0
"""


def page(*, drafted: int, accepted: int) -> str:
    """With other counters of the draft model, which begin with 300 and 250."""
    changed = PAGE.replace('draft_model"} 300.0', f'draft_model"}} {drafted}.0')
    return changed.replace('draft_model"} 250.0', f'draft_model"}} {accepted}.0')


PATIENCE_SECONDS = 30.0
"""For what is to succeed, on any machine."""


class Pods:
    """One address on loopback that answers /metrics as it is told to."""

    def __init__(self) -> None:
        self.page: str | None = PAGE
        self.seconds = 0.0
        self.num_hanging = 0
        """The first so many requests get no answer."""
        self.requests = 0
        self.port = 0

    async def metrics(self, request: web.Request) -> web.Response:
        self.requests += 1
        await asyncio.sleep(30.0 if self.requests <= self.num_hanging else self.seconds)
        if self.page is None:
            return web.Response(status=500)
        return web.Response(text=self.page)


@pytest.fixture
async def pods() -> AsyncIterator[Pods]:
    answering = Pods()
    application = web.Application()
    application.add_routes([web.get("/metrics", answering.metrics)])
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    answering.port = runner.addresses[0][1]
    yield answering
    await runner.cleanup()


class PodList:
    """The one call that the cache makes of a cluster; nobody may list the namespaces that are `refused`."""

    def __init__(self, *pods: Object) -> None:
        self.pods = list(pods)
        self.refused: set[str] = set()

    async def list(self, kind: Kind, namespace: str | None, **_: Any) -> list[Object]:
        if namespace in self.refused:
            raise ForbiddenError(f"pods of {namespace} may not be listed")
        return [pod for pod in self.pods if namespace in (None, pod["metadata"]["namespace"])]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def scraper(pods: Pods) -> AsyncIterator[PodScraper]:
    async with PodScraper(Clock(), port=pods.port, timeout=PATIENCE_SECONDS) as opened:
        yield opened


def cache(
    scraper: PodScraper,
    *pods: Object,
    clock: Clock | None = None,
    listed: PodList | None = None,
    namespaces: Sequence[str] = (),
) -> LoadCache:
    source: Any = listed or PodList(*pods)
    cluster: Cluster = source
    return LoadCache(
        cluster, scraper, namespaces=namespaces, clock=clock or Clock(), metrics=OperatorMetrics()
    )


def test_a_page_of_metrics_is_read_over_all_proposers() -> None:
    sample = read_sample(PAGE, sampled_at=1.0)
    assert (sample.waiting, sample.running, sample.in_flight) == (2, 3, 5)
    assert (sample.draft_tokens, sample.accepted_tokens) == (400.0, 300.0)
    assert sample.is_speculating is True
    assert not sample.is_draining
    assert sample.pair_digest == "sha256:abc"


def test_a_page_without_our_metrics_is_no_sample() -> None:
    with pytest.raises(ValueError, match="draftline_requests_running is missing"):
        read_sample("up 1\n", sampled_at=1.0)


@pytest.mark.parametrize(
    "page",
    [
        "draftline_requests_running +Inf\n",
        "draftline_requests_running x\n",
        "draftline_requests_running -1\n",
        "draftline_requests_running NaN\n",
        f"draftline_requests_running {'9' * 300}\n",
        'draftline_model_info{a="1", ="x"} 1\ndraftline_requests_running 1\n',
        "\x00",
    ],
)
async def test_a_page_that_makes_no_sense_is_the_pods_failure(
    scraper: PodScraper, pods: Pods, page: str
) -> None:
    pods.page = page
    with pytest.raises(ClusterError):
        await scraper.scrape("127.0.0.1")


async def test_a_page_without_end_is_given_up(scraper: PodScraper, pods: Pods) -> None:
    pods.page = "x 1\n" * 2_000_000
    with pytest.raises(ClusterError, match=r"ValueError|TimeoutError"):
        await scraper.scrape("127.0.0.1")


async def test_loads_of_ready_pods_are_added_up(scraper: PodScraper) -> None:
    leaving = serving_pod("c", is_leaving=True)
    loads = cache(scraper, serving_pod("a"), serving_pod("b"), serving_pod("d", is_ready=False), leaving)
    await loads.sample()
    load = loads.of("models", "chat")
    assert load is not None
    assert (load.waiting, load.running, load.sampled_at) == (4, 6, 1000.0)
    assert loads.of("models", "other") is None


async def test_a_pod_that_fails_is_asked_ever_more_seldom(scraper: PodScraper, pods: Pods) -> None:
    clock = Clock()
    loads = cache(scraper, serving_pod("a"), clock=clock)
    pods.page = None
    for _ in range(3):
        await loads.sample()
    assert pods.requests == 1
    clock.now += 2.0
    await loads.sample()
    assert pods.requests == 2
    assert loads.of("models", "chat") is None


async def test_a_pod_that_answers_again_is_soon_known_again(pods: Pods) -> None:
    clock = Clock()
    async with PodScraper(clock, port=pods.port, timeout=PATIENCE_SECONDS) as scraper:
        loads = cache(scraper, serving_pod("a"), clock=clock)
        pods.page = None
        for _ in range(20):
            await loads.sample()
            clock.now += 60.0
        await loads.sample()
        pods.page = PAGE
        clock.now += FRESH_SECONDS / 2
        await loads.sample()
        assert loads.of("models", "chat") is not None


async def test_a_namespace_that_is_gone_leaves_the_loads_of_others_alone(pods: Pods) -> None:
    clock = Clock()
    listed = PodList(serving_pod("a"), serving_pod("b", metadata={"namespace": "gone"}))
    async with PodScraper(clock, port=pods.port, timeout=PATIENCE_SECONDS) as scraper:
        loads = cache(scraper, clock=clock, listed=listed, namespaces=("gone", "models"))
        await loads.sample()
        assert loads.of("gone", "chat") is not None
        listed.refused = {"gone"}
        clock.now += FRESH_SECONDS + 1
        await loads.sample()
        load = loads.of("models", "chat")
        assert load is not None
        assert (load.running, load.sampled_at) == (3, clock.now)
        assert loads.of("gone", "chat") is None
        listed.refused = set()
        await loads.sample()
        assert loads.of("gone", "chat") is not None


async def test_a_load_that_was_seen_too_long_ago_is_not_known(scraper: PodScraper, pods: Pods) -> None:
    clock = Clock()
    loads = cache(scraper, serving_pod("a"), clock=clock)
    await loads.sample()
    clock.now += 16.0
    assert loads.of("models", "chat") is None


async def test_a_pod_that_hangs_costs_a_second(pods: Pods) -> None:
    pods.seconds = 30.0
    async with PodScraper(Clock(), port=pods.port) as scraper, asyncio.timeout(10 * SCRAPE_TIMEOUT_SECONDS):
        with pytest.raises(ClusterError, match="TimeoutError"):
            await scraper.scrape("127.0.0.1")


async def test_a_pod_that_waits_for_others_that_hang_has_its_own_second(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftline_operator.cluster.pods._MAX_CONCURRENT_SCRAPES", 2)
    pods.num_hanging = 2
    async with PodScraper(Clock(), port=pods.port, timeout=3.0) as scraper:
        scrapes = [scraper.scrape("127.0.0.1") for _ in range(3)]
        *hanging, answered = await asyncio.gather(*scrapes, return_exceptions=True)
    assert [type(outcome) for outcome in hanging] == [ClusterError, ClusterError]
    assert isinstance(answered, PodSample)


async def test_single_pods_are_asked_at_the_moment_of_a_scale_in(scraper: PodScraper, pods: Pods) -> None:
    loads = cache(scraper)
    unready = serving_pod("b", is_ready=False)
    assert await loads.refresh("models", [serving_pod("a"), unready]) == {"a": 5}
    pods.page = None
    assert await loads.refresh("models", [serving_pod("a")]) == {"a": None}


async def test_acceptance_is_told_since_the_last_time(scraper: PodScraper, pods: Pods) -> None:
    loads = cache(scraper, serving_pod("a"))
    await loads.sample()
    first = loads.figures("models", "chat")
    assert (first.acceptance_rate, first.queue_depth, first.speculation_state) == (None, 2, "Active")
    pods.page = page(drafted=500, accepted=400)
    await loads.sample()
    assert loads.figures("models", "chat").acceptance_rate == 0.75, "the pod is older than we are"
    pods.page = page(drafted=700, accepted=400).replace("speculation_active 1.0", "speculation_active 0.0")
    await loads.sample()
    second = loads.figures("models", "chat")
    assert (second.acceptance_rate, second.speculation_state) == (0.0, "Off")
    assert loads.figures("models", "chat") == second, "without new tokens it stays"


async def test_what_a_new_pod_did_before_the_first_figures_counts(scraper: PodScraper, pods: Pods) -> None:
    loads = cache(scraper, serving_pod("a"))
    for page_now in (page(drafted=300, accepted=250), page(drafted=500, accepted=350)):
        pods.page = page_now
        await loads.sample()
    assert loads.figures("models", "chat").acceptance_rate == 0.5


@pytest.mark.parametrize(
    ("forgotten", "rate"),
    [
        pytest.param("other", 1.0, id="another-namespace"),
        pytest.param("models", 0.2, id="its-namespace"),
        pytest.param(None, 0.2, id="all"),
    ],
)
async def test_of_a_namespace_that_was_not_listed_nothing_is_forgotten(
    scraper: PodScraper, pods: Pods, forgotten: str | None, rate: float
) -> None:
    loads = cache(scraper, serving_pod("a"))
    await loads.sample()
    pods.page = page(drafted=700, accepted=250)
    await loads.sample()
    loads.figures("models", "chat")
    loads.forget(forgotten, [])
    pods.page = page(drafted=800, accepted=350)
    await loads.sample()
    assert loads.figures("models", "chat").acceptance_rate == rate
