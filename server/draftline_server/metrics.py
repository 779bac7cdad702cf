"""Prometheus metrics: what the engine counts, read from its snapshot at scrape time, and what calls observe.

Names are fixed by the design: the operator and autoscaling read them. Everything lives in a registry of
its own. GPU gauges appear where NVML finds a driver; elsewhere they are left out without a word, since most
machines without one are meant to be without.

Latencies: time per output token is (end to end - time to first token) / (output tokens - 1), per request.
The inter-token latency is the time between two outputs of a request; with speculation one output may hold
several tokens, so its percentiles say how smooth a stream is, not how fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, get_args

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from draftline_server.config import Method
from draftline_server.core.generation import GenerationSummary
from draftline_server.core.served_pair import PairDescription
from draftline_server.core.stats import EngineStatistics

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_TOKENS = tuple(float(2**n) for n in range(18))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What a scrape shows besides the counts of calls."""

    statistics: EngineStatistics
    is_draining: bool
    description: PairDescription | None
    """None while the models load."""


class ServerMetrics:
    """All metrics of one server."""

    def __init__(self, *, version: str, read_state: Callable[[], ServerState]) -> None:
        """`read_state` is called once per scrape."""
        self._registry = CollectorRegistry()
        self._registry.register(StateCollector(version=version, read_state=read_state))
        ProcessCollector(registry=self._registry)
        nvml = load_nvml()
        if nvml is not None:
            self._registry.register(GpuCollector(nvml))
        self._queue_time = self._seconds("request_queue_time_seconds", "From arrival until first scheduled.")
        self._first_token = self._seconds("time_to_first_token_seconds", "From arrival to the first token.")
        self._end_to_end = self._seconds("e2e_request_latency_seconds", "From arrival to the last token.")
        self._per_token = self._seconds(
            "request_time_per_output_token_seconds",
            "Mean time of a request's tokens after its first.",
            buckets=_TOKEN_SECONDS,
        )
        self._gap = self._seconds(
            "inter_token_latency_seconds",
            "Between two outputs of a request, of one or more tokens each.",
            buckets=_TOKEN_SECONDS,
        )
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of a request.", _TOKENS
        )
        self._finished = self._counter(
            "requests_finished", "Requests that ended by themselves.", "finish_reason"
        )
        self._errors = self._counter("request_errors", "Calls that ended with another code than OK.", "code")
        self._aborts = self._counter("request_aborts", "Requests that their client cancelled.")
        self._timeouts = self._counter("request_timeouts", "Requests whose time ran out.")

    def observe_finish(self, summary: GenerationSummary) -> None:
        """Counts a request that ended by itself."""
        self._finished.labels(summary.finish_reason.value).inc()
        self._queue_time.observe(summary.queue_seconds)
        self._first_token.observe(summary.time_to_first_token_seconds)
        self._end_to_end.observe(summary.end_to_end_seconds)
        self._prompt_tokens.observe(summary.num_prompt_tokens)
        self._output_tokens.observe(summary.num_output_tokens)
        if summary.num_output_tokens > 1:
            decode_seconds = summary.end_to_end_seconds - summary.time_to_first_token_seconds
            self._per_token.observe(decode_seconds / (summary.num_output_tokens - 1))

    def observe_gap(self, seconds: float) -> None:
        """Counts the time between two outputs of a request."""
        self._gap.observe(seconds)

    def observe_error(self, code: str) -> None:
        """Counts a call that ended with `code`, a gRPC status name."""
        self._errors.labels(code).inc()
        if code == "CANCELLED":
            self._aborts.inc()
        elif code == "DEADLINE_EXCEEDED":
            self._timeouts.inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(_WithoutCreated(self._registry))

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"draftline_{name}", documentation, buckets=buckets, registry=self._registry)

    def _seconds(self, name: str, documentation: str, *, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return self._histogram(name, documentation, buckets)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"draftline_{name}", documentation, labels, registry=self._registry)


class StateCollector(Collector):
    """Renders the engine's own counters, so that nothing is counted twice."""

    def __init__(self, *, version: str, read_state: Callable[[], ServerState]) -> None:
        self._version = version
        self._read_state = read_state

    def collect(self) -> Iterator[Metric]:
        state = self._read_state()
        yield _gauge("draining", "1 from SIGTERM on.", state.is_draining)
        if state.description is not None:
            yield self._model(state.description)
        yield from _load(state.statistics)
        yield from _speculation(state.statistics)

    def _model(self, description: PairDescription) -> Metric:
        draft = description.draft
        labels = {
            "pair_digest": description.pair_digest,
            "target": description.target.name,
            "draft": draft.name if draft is not None else "",
            "draft_architecture": draft.architecture if draft is not None else "",
            "version": self._version,
        }
        family = GaugeMetricFamily("draftline_model_info", "The loaded pair; always 1.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family


def _load(s: EngineStatistics) -> Iterator[Metric]:
    yield _gauge("requests_running", "Requests that hold a seat in the engine.", s.num_running)
    yield _gauge("requests_waiting", "Accepted requests that wait for a seat.", s.num_waiting)
    yield _gauge("kv_usage_ratio", "Share of the KV cache held by running requests.", s.kv_usage_ratio)
    yield _gauge("kv_blocks_used", "Blocks of the KV cache held by running requests.", s.kv_blocks_used)
    yield _gauge("kv_blocks", "Blocks of the KV cache.", s.kv_blocks_total)
    yield _of_step("batch_size", "Sequences in the last step.", s.last_batch_size, s)
    yield _of_step("batch_tokens", "Tokens in the last step, drafts included.", s.last_batch_tokens, s)
    yield _counter("engine_steps", "Steps of the engine.", s.num_steps)
    yield _counter("preemptions", "Requests put back to waiting for want of blocks.", s.num_preemptions)
    yield _counter("prompt_tokens", "Prompt tokens of requests that started.", s.prompt_tokens)
    yield _counter("generation_tokens", "Output tokens.", s.generation_tokens)
    yield _counter(
        "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prefix_cache_queries
    )
    yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", s.prefix_cache_hits)


def _speculation(s: EngineStatistics) -> Iterator[Metric]:
    yield _gauge("speculation_active", "1 while any proposer is on.", s.speculation_active)
    yield _gauge("speculation_speedup", "Measured speed over that without drafts.", s.speculation_speedup)
    yield _of_step("draft_length", "Mean draft length in the last step.", s.draft_length, s)
    yield _labelled("speculation_fallbacks", "Times that speculation went off.", "reason", s.fallbacks)
    yield _counter("draft_seconds", "Time spent on drafting.", s.draft_seconds)
    yield _counter("verify_seconds", "Time spent on target forwards and verification.", s.verify_seconds)
    yield _by_proposer("drafts", "Drafts that were verified.", s.drafts)
    yield _by_proposer("draft_tokens", "Tokens of verified drafts.", s.draft_tokens)
    yield _by_proposer("accepted_tokens", "Draft tokens that became output.", s.accepted_tokens)
    positions = CounterMetricFamily(
        "draftline_accepted_tokens_per_position",
        "Drafts whose token at this position, from 0, became output.",
        labels=["proposer", "position"],
    )
    for proposer, counts in sorted(s.accepted_tokens_per_position.items()):
        for position, count in enumerate(counts):
            positions.add_metric([proposer, str(position)], count)
    yield positions


def _of_step(name: str, documentation: str, value: float, s: EngineStatistics) -> Metric:
    """An idle engine's last step is long past."""
    return _gauge(name, f"{documentation} 0 while idle.", value if s.num_running else 0.0)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(f"draftline_{name}", documentation, value=float(value))


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(f"draftline_{name}", documentation, value=float(value))


def _by_proposer(name: str, documentation: str, values: Mapping[str, int]) -> Metric:
    """From 0 for all of them: a series that begins with its first draft has no rate of it."""
    return _labelled(name, documentation, "proposer", dict.fromkeys(get_args(Method), 0) | dict(values))


def _labelled(name: str, documentation: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"draftline_{name}", documentation, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


class _WithoutCreated(Collector):
    """Drops the time of creation that the client adds to each series: it doubles the size for nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [s for s in metric.samples if not s.name.endswith("_created")]
            yield metric


# --------------------------------------------------------------------------------------------------- GPUs


def load_nvml() -> Any | None:
    """The initialised module `pynvml`, or None where it is not installed or finds no driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


class GpuCollector(Collector):
    """What NVML says of each GPU that this process can see. What a GPU does not report is left out."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def collect(self) -> Iterator[Metric]:
        nvml = self._nvml
        devices = self._devices()
        readings: dict[tuple[str, str], Callable[[Any], float]] = {
            ("gpu_utilization_ratio", "Share of time in which the GPU computed."): (
                lambda device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
            ),
            ("gpu_memory_used_bytes", "Memory in use."): (
                lambda device: nvml.nvmlDeviceGetMemoryInfo(device).used
            ),
            ("gpu_memory_bytes", "Memory."): lambda device: nvml.nvmlDeviceGetMemoryInfo(device).total,
            ("gpu_temperature_celsius", "Temperature."): (
                lambda device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
            ),
            ("gpu_power_watts", "Power draw."): lambda device: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
        }
        for (name, documentation), read in readings.items():
            family = GaugeMetricFamily(f"draftline_{name}", documentation, labels=["gpu"])
            for index, device in devices.items():
                try:
                    family.add_metric([str(index)], float(read(device)))
                except nvml.NVMLError:
                    continue  # this GPU, or its driver, does not report it
            yield family

    def _devices(self) -> dict[int, Any]:
        """Handles by index. A GPU that was lost has none, and a lost driver knows of none."""
        nvml = self._nvml
        devices: dict[int, Any] = {}
        with suppress(nvml.NVMLError):
            for index in range(nvml.nvmlDeviceGetCount()):
                with suppress(nvml.NVMLError):
                    devices[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        return devices
