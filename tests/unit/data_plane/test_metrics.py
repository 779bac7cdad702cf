"""The exposition: fixed names, counters that are the engine's own, latencies of requests."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftline_server.core.generation import FinishReason, GenerationSummary, SpeculationStats
from draftline_server.core.served_pair import PairDescription
from draftline_server.core.stats import EngineStatistics
from draftline_server.metrics import GpuCollector, ServerMetrics, ServerState
from draftline_server.testing import describe_scripted_pair

STATISTICS = EngineStatistics(
    num_running=3,
    num_waiting=5,
    kv_usage_ratio=0.25,
    kv_blocks_used=16,
    kv_blocks_total=64,
    num_steps=100,
    num_preemptions=2,
    prefix_cache_queries=500,
    prefix_cache_hits=100,
    prompt_tokens=1000,
    generation_tokens=2000,
    drafts={"ngram": 10, "draft_model": 20},
    draft_tokens={"ngram": 40, "draft_model": 80},
    accepted_tokens={"ngram": 15, "draft_model": 60},
    accepted_tokens_per_position={"ngram": (9, 6), "draft_model": (19, 18, 23)},
    speculation_active=True,
    speculation_speedup=1.75,
    draft_length=3.5,
    fallbacks={"acceptance": 4},
    draft_seconds=1.5,
    verify_seconds=6.0,
    last_batch_size=8,
    last_batch_tokens=40,
)

EXPECTED = {
    "draftline_requests_running": 3,
    "draftline_requests_waiting": 5,
    "draftline_kv_usage_ratio": 0.25,
    "draftline_kv_blocks_used": 16,
    "draftline_kv_blocks": 64,
    "draftline_draining": 1,
    "draftline_engine_steps_total": 100,
    "draftline_preemptions_total": 2,
    "draftline_prefix_cache_queries_total": 500,
    "draftline_prefix_cache_hits_total": 100,
    "draftline_prompt_tokens_total": 1000,
    "draftline_generation_tokens_total": 2000,
    'draftline_drafts_total{proposer="ngram"}': 10,
    'draftline_draft_tokens_total{proposer="ngram"}': 40,
    'draftline_draft_tokens_total{proposer="draft_model"}': 80,
    'draftline_accepted_tokens_total{proposer="draft_model"}': 60,
    'draftline_accepted_tokens_per_position_total{position="1",proposer="ngram"}': 6,
    'draftline_accepted_tokens_per_position_total{position="2",proposer="draft_model"}': 23,
    "draftline_speculation_active": 1,
    "draftline_speculation_speedup": 1.75,
    "draftline_draft_length": 3.5,
    'draftline_speculation_fallbacks_total{reason="acceptance"}': 4,
    "draftline_draft_seconds_total": 1.5,
    "draftline_verify_seconds_total": 6,
    "draftline_batch_size": 8,
    "draftline_batch_tokens": 40,
}


def make_metrics(
    *, statistics: EngineStatistics = STATISTICS, description: PairDescription | None = None
) -> ServerMetrics:
    state = ServerState(statistics=statistics, is_draining=True, description=description)
    return ServerMetrics(version="1.2.3", read_state=lambda: state)


def samples_of(metrics: ServerMetrics) -> dict[str, float]:
    samples = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def make_summary(*, num_output_tokens: int = 5) -> GenerationSummary:
    return GenerationSummary(
        request_id="x",
        finish_reason=FinishReason.LENGTH,
        matched_stop=None,
        num_prompt_tokens=10,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=0,
        num_truncated_prompt_tokens=0,
        queue_seconds=0.5,
        time_to_first_token_seconds=1.0,
        end_to_end_seconds=3.0,
        speculation=SpeculationStats(),
    )


def test_snapshot_is_exposed_by_its_fixed_names() -> None:
    samples = samples_of(make_metrics())
    assert {name: samples.get(name) for name in EXPECTED} == EXPECTED


def test_counters_of_proposers_that_never_drafted_are_zero() -> None:
    samples = samples_of(make_metrics(statistics=EngineStatistics()))
    for proposer in ("ngram", "draft_model"):
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            assert samples[f'draftline_{name}_total{{proposer="{proposer}"}}'] == 0


def test_an_idle_engine_has_no_batch() -> None:
    samples = samples_of(make_metrics(statistics=replace(STATISTICS, num_running=0)))
    for name in ("batch_size", "batch_tokens", "draft_length"):
        assert samples[f"draftline_{name}"] == 0


def test_models_are_described_once_they_are_loaded() -> None:
    assert not any(name.startswith("draftline_model_info") for name in samples_of(make_metrics()))
    alone = describe_scripted_pair()
    head = replace(alone.target, name="small", architecture="Eagle3DraftHead")
    for description, draft, architecture in (
        (alone, "", ""),
        (replace(alone, draft=head), "small", "Eagle3DraftHead"),
    ):
        names = [n for n in samples_of(make_metrics(description=description)) if "model_info" in n]
        labels = f'draft="{draft}",draft_architecture="{architecture}",pair_digest="{alone.pair_digest}"'
        assert names == [f'draftline_model_info{{{labels},target="scripted",version="1.2.3"}}']


def test_label_values_are_escaped() -> None:
    samples = samples_of(make_metrics(statistics=EngineStatistics(fallbacks={'a "b"\n': 1})))
    assert [value for name, value in samples.items() if "fallbacks" in name] == [1]


def test_request_latencies_are_observed() -> None:
    metrics = make_metrics()
    metrics.observe_finish(make_summary())
    metrics.observe_gap(0.02)
    samples = samples_of(metrics)
    assert samples["draftline_request_queue_time_seconds_sum"] == 0.5
    assert samples["draftline_time_to_first_token_seconds_sum"] == 1.0
    assert samples["draftline_e2e_request_latency_seconds_sum"] == 3.0
    assert samples["draftline_request_time_per_output_token_seconds_sum"] == 0.5
    assert samples["draftline_inter_token_latency_seconds_count"] == 1
    assert samples["draftline_request_prompt_tokens_sum"] == 10
    assert samples["draftline_request_generation_tokens_sum"] == 5
    assert samples['draftline_requests_finished_total{finish_reason="length"}'] == 1


def test_one_token_has_no_time_per_token() -> None:
    metrics = make_metrics()
    metrics.observe_finish(make_summary(num_output_tokens=1))
    assert samples_of(metrics)["draftline_request_time_per_output_token_seconds_count"] == 0


def test_errors_are_counted_by_code() -> None:
    metrics = make_metrics()
    for code in ("CANCELLED", "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"):
        metrics.observe_error(code)
    samples = samples_of(metrics)
    assert samples['draftline_request_errors_total{code="DEADLINE_EXCEEDED"}'] == 2
    assert samples["draftline_request_aborts_total"] == 1
    assert samples["draftline_request_timeouts_total"] == 2


def test_two_servers_share_nothing() -> None:
    first, second = make_metrics(), make_metrics()
    first.observe_gap(1.0)
    assert samples_of(second)["draftline_inter_token_latency_seconds_count"] == 0


class NVMLError(Exception):
    pass


def make_nvml() -> SimpleNamespace:
    """One GPU that reports everything but its power."""

    def refuse(_: int) -> int:
        raise NVMLError

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=75),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=10, total=40),
        nvmlDeviceGetTemperature=lambda _device, _sensor: 60,
        nvmlDeviceGetPowerUsage=refuse,
    )


def test_gpus_are_reported_as_far_as_they_report() -> None:
    families = {family.name: family.samples for family in GpuCollector(make_nvml()).collect()}
    values = {name: [s.value for s in samples] for name, samples in families.items()}
    assert values == {
        "draftline_gpu_utilization_ratio": [0.75],
        "draftline_gpu_memory_used_bytes": [10.0],
        "draftline_gpu_memory_bytes": [40.0],
        "draftline_gpu_temperature_celsius": [60.0],
        "draftline_gpu_power_watts": [],
    }


def test_a_lost_gpu_takes_nothing_with_it_but_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = make_nvml()

    def find(index: int) -> int:
        if index == 0:
            raise NVMLError
        return index

    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = find
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    samples = samples_of(make_metrics())
    assert samples["draftline_requests_running"] == 3
    assert [name for name in samples if "gpu_temperature" in name] == [
        'draftline_gpu_temperature_celsius{gpu="1"}'
    ]


def test_without_a_driver_all_other_numbers_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = make_nvml()

    def fail() -> int:
        raise NVMLError

    nvml.nvmlInit = lambda: None
    nvml.nvmlDeviceGetCount = fail
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    samples = samples_of(make_metrics())
    assert samples["draftline_requests_running"] == 3
    assert not any("gpu" in name for name in samples)


@pytest.mark.parametrize("has_package", [True, False])
def test_no_gpu_is_no_fault(monkeypatch: pytest.MonkeyPatch, has_package: bool) -> None:
    nvml = make_nvml()

    def fail() -> None:
        raise NVMLError

    nvml.nvmlInit = fail
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml if has_package else None)
    assert not any("gpu" in name for name in samples_of(make_metrics()))
