"""The server's file, as the operator writes it, is read by the server itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from draftline_operator.resources.config_map import config_hash, render_config_map
from draftline_operator.resources.server_config import server_config
from draftline_server.config import Config, parse_config
from support.speculative_deployments import (
    FULL,
    MINIMAL,
    PAIR,
    PAIR_DIGEST,
    changed,
    deployment,
    pod_of,
    preflight_job,
    resource,
    server_of,
)


def read_by_the_server(spec: dict[str, Any]) -> Config:
    config_map = render_config_map(resource(spec), pair_digest=PAIR_DIGEST)
    return parse_config(yaml.safe_load(config_map["data"]["config.yaml"]))


def test_the_server_reads_every_value_of_the_spec() -> None:
    config = read_by_the_server(FULL)
    assert (config.service_name, config.device) == ("chat", "cuda")
    server = config.server
    assert (server.grpc_port, server.admin_port) == (50051, 9090)
    assert (server.max_concurrent_requests, server.max_queue_length) == (16, 100)
    assert (server.request_timeout_seconds, server.queue_timeout_seconds) == (60, 10)
    assert (server.drain_timeout_seconds, server.lame_duck_seconds) == (90, 7)
    assert server.max_connection_age_seconds == 20
    models = config.models
    assert models.target_model.dtype == "bfloat16"
    assert models.expected_pair_digest == PAIR_DIGEST
    inference = config.inference
    assert (inference.max_context_length, inference.context_overflow) == (4096, "truncate_left")
    assert (inference.max_tokens_per_request, inference.max_batched_tokens) == (512, 1024)
    assert (inference.memory_fraction, inference.kv_cache_memory) == (0.8, 4 * 2**30)
    speculation = config.speculative_decoding
    assert speculation.methods == ("draft_model", "ngram")
    assert (speculation.num_speculative_tokens, speculation.max_batch_size) == (6, 4)
    assert (speculation.adaptive, speculation.fallback_to_standard_decoding) == (False, False)
    assert speculation.min_acceptance_rate == 0.4


@pytest.mark.parametrize(
    "spec",
    [
        MINIMAL,
        PAIR,
        changed(PAIR, speculation__enabled=False),
        changed(MINIMAL, speculation={"enabled": False, "methods": ["DraftModel"]}),
        changed(PAIR, speculation__numSpeculativeTokens=0),
        changed(MINIMAL, serving={"maxBatchedTokens": 16, "maxConcurrentRequests": 16}),
    ],
)
def test_the_server_takes_whatever_the_resource_allows(spec: dict[str, Any]) -> None:
    config = read_by_the_server(spec)
    assert config.device == "cpu"
    assert config.uses_draft_model is resource(spec).spec.uses_draft_model


def test_the_defaults_of_resource_and_server_are_the_same() -> None:
    written, own = read_by_the_server(PAIR), parse_config({"models": {"target_model": {"path": "/models"}}})
    assert written.server == own.server
    assert written.inference == own.inference
    assert written.speculative_decoding == own.speculative_decoding


def test_models_are_where_the_pods_mount_them() -> None:
    for spec in (PAIR, FULL):
        models = read_by_the_server(spec).models
        assert models.draft_model is not None
        mounts = [Path(mount["mountPath"]) for mount in server_of(deployment(resource(spec)))["volumeMounts"]]
        for path in (models.target_model.path, models.draft_model.path):
            assert any(path.is_relative_to(mount) for mount in mounts)


def test_fetched_models_are_where_the_fetching_step_puts_them() -> None:
    models = read_by_the_server(FULL).models
    fetches = pod_of(deployment(resource(FULL)))["initContainers"]
    assert models.draft_model is not None
    assert [fetch["args"][-1] for fetch in fetches] == [
        str(models.target_model.path),
        str(models.draft_model.path),
    ]


def test_a_draft_that_never_runs_need_not_be_there() -> None:
    config = server_config(resource(changed(PAIR, speculation__enabled=False)), pair_digest=None)
    assert "draft_model" not in config["models"]
    assert "expected_pair_digest" not in config["models"]


def test_the_file_is_immutable_and_pods_read_the_one_they_were_made_for() -> None:
    for manifest, pair_digest in (
        (deployment(resource(FULL)), PAIR_DIGEST),
        (preflight_job(resource(FULL)), None),
    ):
        config_map = render_config_map(resource(FULL), pair_digest=pair_digest)
        assert config_map["immutable"] is True
        volumes = {volume["name"]: volume for volume in pod_of(manifest)["volumes"]}
        assert volumes["config"]["configMap"] == {"name": config_map["metadata"]["name"]}


def test_a_change_of_configuration_alone_rolls_out() -> None:
    one, other = resource(FULL), resource(changed(FULL, serving__maxQueueLength=7))
    annotations = [deployment(item)["spec"]["template"]["metadata"]["annotations"] for item in (one, other)]
    hashes = [item["draftline.dev/config-hash"] for item in annotations]
    assert hashes == [config_hash(item, pair_digest=PAIR_DIGEST) for item in (one, other)]
    assert hashes[0] != hashes[1]


def test_a_change_of_secrets_rolls_out_and_only_their_hash_is_told() -> None:
    def annotations(secrets_hash: str | None) -> dict[str, str]:
        metadata = deployment(resource(FULL), secrets_hash=secrets_hash)["spec"]["template"]["metadata"]
        return dict(metadata["annotations"])

    assert annotations("1234abcd")["draftline.dev/secrets-hash"] == "1234abcd"
    assert "draftline.dev/secrets-hash" not in annotations(None)


def test_what_serves_elsewhere_changes_neither_file_nor_pods() -> None:
    before = deployment(resource(FULL))["spec"]["template"]
    for path, value in (("replicas", 7), ("autoscaling__maxReplicas", 9), ("disruption__maxUnavailable", 2)):
        assert deployment(resource(changed(FULL, **{path: value})))["spec"]["template"] == before
