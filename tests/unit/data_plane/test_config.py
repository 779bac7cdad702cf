"""Every fault of the configuration is one line that names the key, what it holds and what it may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline_server.config import Config, load_config, parse_config
from draftline_server.errors import ConfigError

MINIMAL = "models: {target_model: {path: /models/target}}\n"
PAIR = "models: {target_model: {path: /models/target}, draft_model: {path: /models/draft}}\n"

FAULTS = [
    # (id, document, the whole message, or its beginning where it ends with "…")
    ("empty", "", "(the file): is empty; at least models.target_model.path must be set"),
    ("only-a-comment", "# nothing\n", "(the file): is empty; at least models.target_model.path must be set"),
    ("list", "- models\n", "(the file): must be a mapping of keys, not a list"),
    ("scalar", "models\n", '(the file): must be a mapping of keys, not "models"'),
    ("number", "7\n", "(the file): must be a mapping of keys, not 7"),
    ("not-yaml", "models: [\n", "not valid YAML: …"),
    (
        "value-of-another-type",
        f"{MINIMAL}service_name: 2029-13-45\n",
        'not valid YAML: "2029-13-45" is no timestamp …',
    ),
    (
        "tag-that-does-not-fit",
        f"{MINIMAL}service_name: !!bool perhaps\n",
        'not valid YAML: "perhaps" is no bool …',
    ),
    (
        "number-of-too-many-digits",
        f"{MINIMAL}server: {{grpc_port: {'9' * 5000}}}\n",
        'not valid YAML: "9999…',
    ),
    ("nested-without-end", "[" * 1000, "not valid YAML: nested too deeply"),
    ("two-documents", f"{MINIMAL}---\n{MINIMAL}", "not valid YAML: expected a single document …"),
    ("no-models", "device: cpu\n", "models: missing; it must be a mapping of keys"),
    ("no-target", "models: {}\n", "models.target_model: missing; it must be a mapping of keys"),
    (
        "no-path",
        "models: {target_model: {dtype: float32}}\n",
        "models.target_model.path: missing; it must be the path of a directory",
    ),
    (
        "path-is-a-number",
        "models: {target_model: {path: 7}}\n",
        "models.target_model.path: must be the path of a directory, not 7",
    ),
    (
        "path-is-empty",
        "models: {target_model: {path: ''}}\n",
        'models.target_model.path: must be the path of a directory, not ""',
    ),
    (
        "section-is-a-list",
        f"{MINIMAL}server: [1]\n",
        "server: must be a mapping of keys, not a list",
    ),
    ("section-is-empty", f"{MINIMAL}server:\n", "server: must be a mapping of keys, not empty"),
    (
        "duplicate-key",
        f"{MINIMAL}server:\n  grpc_port: 1\n  grpc_port: 2\n",
        "server.grpc_port: given twice, in lines 3 and 4",
    ),
    (
        "text-too-long",
        f"{MINIMAL}service_name: {'n' * 254}\n",
        f'service_name: must be text of 1 to 253 characters, not "{"n" * 56}...',
    ),
    (
        "host-with-a-control-character",
        f'{MINIMAL}server: {{host: "\\0"}}\n',
        'server.host: must be text that matches ^[!-~]+$, not "\\u0000"',
    ),
    (
        "queue-beyond-what-the-api-can-say",
        f"{MINIMAL}server: {{max_queue_length: 2147483648}}\n",
        "server.max_queue_length: must be an integer at least 0 and at most 2147483647, not 2147483648",
    ),
    ("duplicate-section", f"{MINIMAL}{MINIMAL}", "models: given twice, in lines 1 and 2"),
    (
        "misspelt-section",
        "modles: {target_model: {path: /models/target}}\n",
        "modles: unknown key; did you mean models?",
    ),
    (
        "misspelt-key",
        f"{MINIMAL}inference: {{max_batch_sizes: 4}}\n",
        "inference.max_batch_sizes: unknown key; did you mean max_batch_size?",
    ),
    (
        "key-of-another-section",
        f"{MINIMAL}inference: {{ngram_min: 4}}\n",
        "inference.ngram_min: unknown key; did you mean speculative_decoding.ngram_min?",
    ),
    (
        "key-like-nothing",
        f"{MINIMAL}observability: {{zzz: 4}}\n",
        "observability.zzz: unknown key; known here: enable_metrics, log_format, log_level",
    ),
    ("key-is-a-number", f"{MINIMAL}8: 4\n", "8: unknown key; every key is text"),
    (
        "planned-but-not-there",
        f"{MINIMAL}server: {{http_port: 8080}}\n",
        "server.http_port: unknown key; did you mean grpc_port?",
    ),
    ("planned-section", f"{MINIMAL}security: {{}}\n", "security: unknown key; …"),
    (
        "device",
        f"{MINIMAL}device: tpu\n",
        'device: must be one of auto, cpu, cuda, not "tpu"',
    ),
    (
        "dtype",
        "models: {target_model: {path: /m, dtype: int8}}\n",
        'models.target_model.dtype: must be one of auto, float32, bfloat16, float16, not "int8"',
    ),
    (
        "tensor-parallel",
        "models: {target_model: {path: /m, tensor_parallel_size: 2}}\n",
        "models.target_model.tensor_parallel_size: must be an integer equal to 1, not 2",
    ),
    (
        "port-too-high",
        f"{MINIMAL}server: {{grpc_port: 70000}}\n",
        "server.grpc_port: must be an integer at least 0 and at most 65535, not 70000",
    ),
    (
        "port-is-text",
        f"{MINIMAL}server: {{grpc_port: '50051'}}\n",
        'server.grpc_port: must be an integer at least 0 and at most 65535, not "50051"',
    ),
    (
        "ports-collide",
        f"{MINIMAL}server: {{grpc_port: 9090}}\n",
        "server.admin_port: 9090 is server.grpc_port too",
    ),
    (
        "seconds-nan",
        f"{MINIMAL}server: {{queue_timeout_seconds: .nan}}\n",
        "server.queue_timeout_seconds: must be a number above 0 and at most 86400, not nan",
    ),
    (
        "seconds-infinite",
        f"{MINIMAL}server: {{queue_timeout_seconds: .inf}}\n",
        "server.queue_timeout_seconds: must be a number above 0 and at most 86400, not inf",
    ),
    (
        "seconds-true",
        f"{MINIMAL}server: {{queue_timeout_seconds: true}}\n",
        "server.queue_timeout_seconds: must be a number above 0 and at most 86400, not true",
    ),
    (
        "fraction-nan",
        f"{MINIMAL}inference: {{memory_fraction: .nan}}\n",
        "inference.memory_fraction: must be a number above 0 and at most 1, not nan",
    ),
    (
        "fraction-too-high",
        f"{MINIMAL}inference: {{memory_fraction: 90}}\n",
        "inference.memory_fraction: must be a number above 0 and at most 1, not 90",
    ),
    (
        "bytes-unit",
        f"{MINIMAL}inference: {{kv_cache_memory: 4 gigs}}\n",
        'inference.kv_cache_memory: must be a number of bytes, or text such as 512MiB or 4GiB, not "4 gigs"',
    ),
    (
        "bytes-true",
        f"{MINIMAL}inference: {{kv_cache_memory: true}}\n",
        "inference.kv_cache_memory: must be a number of bytes, or text such as 512MiB or 4GiB "
        "above 0, not true",
    ),
    (
        "bytes-negative",
        f"{MINIMAL}inference: {{kv_cache_memory: -4GiB}}\n",
        "inference.kv_cache_memory: must be a number of bytes, or text such as 512MiB or 4GiB "
        'above 0, not "-4GiB"',
    ),
    (
        "boolean-is-text",
        f"{MINIMAL}speculative_decoding: {{enabled: 'true'}}\n",
        'speculative_decoding.enabled: must be true or false, not "true"',
    ),
    (
        "header-name",
        f"{MINIMAL}server: {{request_id_header: X Y}}\n",
        'server.request_id_header: must be text that matches ^[a-z0-9_.-]{1,64}$, not "X Y"',
    ),
    (
        "digest",
        "models: {target_model: {path: /m}, expected_pair_digest: abc}\n",
        'models.expected_pair_digest: must be text that matches ^sha256:[0-9a-f]{64}$, not "abc"',
    ),
    *(
        (
            f"draft-tokens-{shown}",
            f"{MINIMAL}speculative_decoding: {{num_speculative_tokens: {value}}}\n",
            "speculative_decoding.num_speculative_tokens: must be an integer at least 0 and at most 64, "
            f"not {shown}",
        )
        for value, shown in [("-1", "-1"), ("1000", "1000"), ("1.9", "1.9"), ("true", "true"), ("'5'", '"5"')]
    ),
    (
        "draft-tokens-above-the-budget",
        f"{MINIMAL}inference: {{max_batched_tokens: 16, max_batch_size: 8}}\n"
        "speculative_decoding: {num_speculative_tokens: 16}\n",
        "speculative_decoding.num_speculative_tokens: 16 and one more token do not fit into "
        "inference.max_batched_tokens (16)",
    ),
    (
        "batch-above-the-budget",
        f"{MINIMAL}inference: {{max_batched_tokens: 16, max_batch_size: 17}}\n",
        "inference.max_batched_tokens: 16 is below inference.max_batch_size (17); each sequence needs one "
        "token of a step",
    ),
    (
        "default-batch-above-the-budget",
        f"{MINIMAL}inference: {{max_batched_tokens: 16}}\n",
        "inference.max_batched_tokens: 16 is below server.max_concurrent_requests (32); …",
    ),
    (
        "drain-shorter-than-a-request",
        f"{MINIMAL}server: {{drain_timeout_seconds: 100}}\n",
        "server.drain_timeout_seconds: 100 is below server.request_timeout_seconds (120); …",
    ),
    (
        "ngram-range",
        f"{MINIMAL}speculative_decoding: {{ngram_min: 4, ngram_max: 3}}\n",
        "speculative_decoding.ngram_min: 4 is above speculative_decoding.ngram_max (3)",
    ),
    (
        "method-unknown",
        f"{MINIMAL}speculative_decoding: {{methods: [ngram, eagle]}}\n",
        'speculative_decoding.methods[1]: must be one of ngram, draft_model, not "eagle"',
    ),
    (
        "method-is-no-list",
        f"{MINIMAL}speculative_decoding: {{methods: ngram}}\n",
        'speculative_decoding.methods: must be a list; each item one of ngram, draft_model, not "ngram"',
    ),
    (
        "method-twice",
        f"{MINIMAL}speculative_decoding: {{methods: [ngram, ngram]}}\n",
        "speculative_decoding.methods: names a method twice",
    ),
    (
        "no-method",
        f"{MINIMAL}speculative_decoding: {{methods: []}}\n",
        "speculative_decoding.methods: is empty; …",
    ),
    (
        "only-a-draft-model-that-is-not-there",
        f"{MINIMAL}speculative_decoding: {{methods: [draft_model]}}\n",
        "speculative_decoding.methods: names only draft_model, but models.draft_model is not set",
    ),
]


@pytest.mark.parametrize(("document", "message"), [pytest.param(*case, id=name) for name, *case in FAULTS])
def test_a_fault_is_one_line_that_names_the_key(tmp_path: Path, document: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(document)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    assert "\n" not in text
    file, _, fault = text.partition(": ")
    assert file == str(path)
    if message.endswith("…"):
        assert fault.startswith(message[:-1])
    else:
        assert fault == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda path: None, "No such file or directory", id="missing"),
        pytest.param(lambda path: path.mkdir(), "Is a directory", id="directory"),
        pytest.param(lambda path: path.write_bytes(b"a: \xff"), "not UTF-8 text (byte 3)", id="bytes"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, make, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "config.yaml"
    make(path)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f"{path}: {message}"


def test_the_defaults_of_the_smallest_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    config = load_config(path)
    assert config.max_batch_size == config.server.max_concurrent_requests == 32
    assert config.num_speculative_tokens == 5
    assert not config.uses_draft_model


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        ({}, True),
        ({"enabled": False}, False),
        ({"num_speculative_tokens": 0}, False),
        ({"methods": ["ngram"]}, False),
        ({"methods": ["draft_model"]}, True),
    ],
)
def test_the_draft_model_is_used_only_where_speculation_may_run_it(
    speculation: dict[str, object], expected: bool
) -> None:
    models = {"target_model": {"path": "/t"}, "draft_model": {"path": "/d"}}
    assert parse_config({"models": models, "speculative_decoding": speculation}).uses_draft_model is expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("4GiB", 4 * 2**30), ("1.5 MiB", 3 * 2**19), ("4Gi", 4 * 2**30), (4096, 4096), ("4096", 4096)],
)
def test_sizes_are_numbers_or_have_a_unit(value: object, expected: int) -> None:
    document = {"models": {"target_model": {"path": "/m"}}, "inference": {"kv_cache_memory": value}}
    assert parse_config(document).inference.kv_cache_memory == expected


def test_a_seconds_key_takes_an_integer_and_anchors_merge(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "models:\n  target_model: &model {path: /t, dtype: float32}\n"
        "  draft_model: {<<: *model, path: /d}\nserver: {queue_timeout_seconds: 3}\n"
    )
    config = load_config(path)
    assert config.server.queue_timeout_seconds == 3.0
    assert config.models.draft_model is not None
    assert (config.models.draft_model.path, config.models.draft_model.dtype) == (Path("/d"), "float32")


def test_the_default_configuration_is_consistent() -> None:
    Config.model_validate({"models": {"target_model": {"path": "/m"}}})
