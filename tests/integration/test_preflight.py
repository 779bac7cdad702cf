"""`draftline-server preflight` and `plan` on real files: every outcome, and that a start agrees with it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftline_server import __main__ as command_line
from draftline_server.config import parse_config
from draftline_server.core.digest import Origin, write_manifest
from draftline_server.model import device, startup
from draftline_server.model.device import DeviceMemory
from draftline_server.model.startup import inspect_models
from support.tiny_models import make_tiny_model
from support.zoo import ModelZoo

pytestmark = pytest.mark.usefixtures("root_logger_as_it_was")

MIB = 2**20


@dataclass
class Job:
    """A pair, the file that configures it, and the commands over both."""

    directory: Path
    document: dict[str, Any]

    @property
    def target(self) -> Path:
        return self.directory / "target"

    @property
    def draft(self) -> Path:
        return self.directory / "draft"

    @property
    def result_file(self) -> Path:
        return self.directory / "result"

    def preflight(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        self.write_config()
        config = str(self.directory / "config.yaml")
        code = command_line.main(
            ["preflight", "--config", config, "--result", str(self.result_file), *arguments]
        )
        result: dict[str, Any] = json.loads(self.result_file.read_text())
        return code, result

    def plan(self, *arguments: str) -> int:
        self.write_config()
        return command_line.main(["plan", "--config", str(self.directory / "config.yaml"), *arguments])

    def write_config(self) -> None:
        (self.directory / "config.yaml").write_text(yaml.safe_dump(self.document))

    def set(self, section: str, **values: object) -> None:
        self.document.setdefault(section, {}).update(values)


@pytest.fixture(scope="module")
def healthy(zoo: ModelZoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("healthy")
    make_tiny_model(root / "target", dtype=torch.float16)
    make_tiny_model(root / "draft", layers=1, seed=1, vocab_size=400)
    return root


@pytest.fixture
def job(healthy: Path, tmp_path: Path) -> Job:
    shutil.copytree(healthy, tmp_path, dirs_exist_ok=True)
    models = {
        "target_model": {"path": str(tmp_path / "target"), "dtype": "float32"},
        "draft_model": {"path": str(tmp_path / "draft")},
    }
    document = {"device": "cpu", "models": models, "inference": {"max_context_length": 512}}
    return Job(tmp_path, document)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of 4 GiB, without a GPU, whatever runs the tests."""
    monkeypatch.setattr(device, "read_memory", lambda _: DeviceMemory(2**32, 2**32, "the container's limit"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_healthy_pair_may_be_served_and_a_start_computes_the_same_digest(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = job.preflight()
    inspected = inspect_models(parse_config(job.document))
    assert code == 0
    assert result["error"] is None
    assert result["pairDigest"] == inspected.pair_digest
    assert result["target"]["digest"] == inspected.target.digest.model
    assert result["memory"]["fits"] is True
    assert result["memory"]["kvPoolBytes"] == inspected.plan.pool_bytes
    assert result["memory"]["availableBytes"] == 2**32
    total = sum(result["memory"][key] for key in ("weightsBytes", "activationBytes", "kvPoolBytes"))
    assert total + inspected.plan.headroom_bytes == 2**32
    output = capsys.readouterr()
    assert "it fits" in output.out
    assert inspected.pair_digest in output.out
    assert "error" not in output.err


def test_a_gpu_plan_needs_no_gpu(job: Job) -> None:
    job.document["device"] = "cuda"
    for model in job.document["models"].values():
        model["dtype"] = "float16"  # which a CPU would refuse
    code, result = job.preflight("--accelerator-memory", "8GiB")
    assert code == 0
    memory = result["memory"]
    assert memory["fits"] is True
    assert memory["availableBytes"] == int(0.9 * 8 * 2**30)
    assert memory["kvBytesPerToken"] == 2 * (2 + 1) * 2 * 16 * 2
    assert result["target"]["kvBytesPerToken"] == 2 * 2 * 2 * 16 * 2
    used = sum(memory[key] for key in ("weightsBytes", "activationBytes", "kvPoolBytes"))
    assert 0 <= memory["availableBytes"] - used < memory["kvBytesPerToken"] * 16


def test_the_digest_of_a_pair_does_not_depend_on_where_it_is_judged(job: Job) -> None:
    _, on_cpu = job.preflight()
    job.document["device"] = "cuda"
    _, on_gpu = job.preflight("--accelerator-memory", "8589934592")
    assert on_cpu["pairDigest"] == on_gpu["pairDigest"]


def test_memory_that_nobody_knows_is_not_judged(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.document["device"] = "cuda"
    code, result = job.preflight()
    assert code == 0
    assert result["memory"]["availableBytes"] is None
    assert result["memory"]["fits"] is None
    assert result["memory"]["requiredBytes"] > result["memory"]["weightsBytes"] > 0
    assert "whether it fits is not known" in capsys.readouterr().out


def test_the_pinned_revision_is_in_the_result(job: Job) -> None:
    write_manifest(job.target, origin=Origin(uri="hf://a/b", requested_revision="main", revision="2" * 40))
    _, result = job.preflight()
    assert result["target"]["revision"] == "2" * 40
    assert result["draft"]["revision"] is None


def truncate_weights(job: Job) -> None:
    weights = job.draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def swap_tokens(job: Job) -> None:
    path = job.draft / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(document))


def long_name(job: Job) -> None:
    job.document["models"]["target_model"]["path"] = "x" * 100_000


FAULTS: list[tuple[str, Callable[[Job], object], str, str, set[str]]] = [
    ("unknown-key", lambda j: j.set("inference", speed=1), "ConfigInvalid", "inference.speed: unknown key",
     set()),
    ("float16-on-a-cpu", lambda j: j.document["models"]["draft_model"].update(dtype="float16"),
     "ConfigInvalid", "models.draft_model.dtype: float16", {"target"}),
    ("context", lambda j: j.set("inference", max_context_length=4096), "ConfigInvalid",
     "inference.max_context_length: 4096", {"target", "draft"}),
    ("no-target", lambda j: shutil.rmtree(j.target), "FilesInvalid", "models.target_model.path: ", set()),
    ("truncated-draft", truncate_weights, "FilesInvalid", "model.safetensors: truncated", {"target"}),
    ("path-without-end", long_name, "FilesInvalid", "models.target_model.path: ", set()),
    ("other-tokens", swap_tokens, "PairMismatch", "models.draft_model.path: its vocabulary",
     {"target", "draft"}),
    ("other-pair", lambda j: j.set("models", expected_pair_digest=f"sha256:{'0' * 64}"), "PairMismatch",
     "models.expected_pair_digest: ", {"target", "draft"}),
    ("no-room", lambda j: j.set("inference", kv_cache_memory="8GiB"), "MemoryDoesNotFit",
     "inference.kv_cache_memory: 8.00 GiB do not fit", {"target", "draft", "pairDigest", "memory"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("break_it", "reason", "message", "known"), [pytest.param(*fault, id=name) for name, *fault in FAULTS]
)
def test_a_fault_is_a_result(
    job: Job,
    capsys: pytest.CaptureFixture[str],
    break_it: Callable[[Job], object],
    reason: str,
    message: str,
    known: set[str],
) -> None:
    break_it(job)
    code, result = job.preflight()
    assert code == 2
    assert result["error"]["reason"] == reason
    assert message in result["error"]["message"]
    assert {key for key, value in result.items() if value is not None} == {"error", *known}
    assert len(job.result_file.read_bytes()) <= 4096
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


def test_memory_that_does_not_suffice_is_counted(job: Job) -> None:
    job.document["device"] = "cuda"
    _, result = job.preflight("--accelerator-memory", "10MiB")
    memory = result["memory"]
    assert memory["fits"] is False
    assert memory["requiredBytes"] > memory["availableBytes"] == int(0.9 * 10 * MIB)
    request_bytes = 512 * memory["kvBytesPerToken"]
    assert memory["weightsBytes"] + memory["activationBytes"] + request_bytes == memory["requiredBytes"]
    needed = memory["requiredBytes"] * 10 // 9 + 1
    assert job.preflight("--accelerator-memory", str(needed))[0] == 0
    assert job.preflight("--accelerator-memory", str(needed - 2000))[0] == 2


def test_wrong_memory_is_a_result_too(job: Job) -> None:
    for device_name, memory, message in [
        ("cuda", "much", "--accelerator-memory: must be a number of bytes"),
        ("cpu", "8GiB", "--accelerator-memory: cannot be given where device is cpu"),
    ]:
        job.document["device"] = device_name
        code, result = job.preflight("--accelerator-memory", memory)
        assert (code, result["error"]["reason"]) == (2, "ConfigInvalid")
        assert result["error"]["message"].startswith(message)


def test_a_configuration_that_is_not_there_is_a_result_too(job: Job) -> None:
    arguments = ["--config", "/nowhere.yaml", "--result", str(job.result_file)]
    assert command_line.main(["preflight", *arguments]) == 2
    error = json.loads(job.result_file.read_text())["error"]
    assert error == {"reason": "ConfigInvalid", "message": "/nowhere.yaml: No such file or directory"}


def test_a_fault_of_ours_is_a_result_with_an_id_that_the_log_explains(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("an inner secret")

    monkeypatch.setattr(startup, "inspect_model", fail)
    code, result = job.preflight()
    assert (code, result["error"]["reason"]) == (2, "InternalError")
    [error_id] = re.findall(r"[0-9a-f]{16}", result["error"]["message"])
    assert "secret" not in result["error"]["message"]
    [line] = [
        json.loads(line) for line in capsys.readouterr().err.splitlines() if error_id in line and "{" in line
    ]
    assert line["message"] == "preflight failed"
    assert "an inner secret" in line["exception"]


def test_the_result_is_written_in_place(job: Job) -> None:
    job.result_file.write_text("x" * 5000)
    before = job.result_file.stat().st_ino
    job.preflight()
    assert job.result_file.stat().st_ino == before


def test_a_result_that_cannot_be_written_is_named(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_config()
    config = str(job.directory / "config.yaml")
    assert command_line.main(["preflight", "--config", config, "--result", "/nowhere/result"]) == 2
    assert capsys.readouterr().err.endswith("error: --result: /nowhere/result: No such file or directory\n")


def test_the_plan_is_a_table(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.document["device"] = "cuda"
    assert job.plan("--accelerator-memory", "1GiB") == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line[:24].strip() for line in lines[lines.index("") :]]
    assert names == [
        "",
        "target weights",
        "draft weights",
        "weights of both",
        "logits",
        "activations",
        "KV cache pool",
        "headroom",
        "in all",
        "target KV of a token",
        "draft KV of a token",
        "KV of a token in both",
        "",
        "it fits",
    ]
    [pool] = [line for line in lines if line.startswith("KV cache pool")]
    tokens, requests = map(int, re.findall(r"(\d+) (?:tokens,|requests)", pool))
    assert requests == tokens // 512
    assert "1.00 GiB" in lines[lines.index("") + 8]


def test_the_plan_needs_no_file(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", str(job.draft), "--draft", str(job.draft), "--device", "cuda"]
    assert command_line.main(["plan", *arguments, "--accelerator-memory", "1GiB"]) == 0
    assert command_line.main(["plan", "--target", str(job.draft), "--max-context-length", "512"]) == 0
    assert "draft weights" not in capsys.readouterr().out.split("it fits")[1]


def test_what_would_make_it_fit_does(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.document["device"] = "cuda"
    job.document["inference"] = {"max_context_length": 1024, "max_batched_tokens": 2048}
    job.set("server", max_concurrent_requests=1)
    job.set("speculative_decoding", max_batch_size=1)
    _, result = job.preflight("--accelerator-memory", "1GiB")
    memory = (result["memory"]["requiredBytes"] - 200_000) * 10 // 9
    capsys.readouterr()
    assert job.plan("--accelerator-memory", str(memory)) == 2
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("does not fit by 195.") for line in lines), "\n".join(lines)
    suggestions = [line.strip() for line in lines[lines.index("each of these would make it fit:") + 1 :]]
    assert len(suggestions) >= 5, suggestions
    for suggestion in suggestions:
        assert_helps(job, suggestion, memory)


def assert_helps(job: Job, suggestion: str, memory: int) -> None:
    changed = Job(job.directory, json.loads(json.dumps(job.document)))
    key, _, value = suggestion.removesuffix(" or less").partition(": ")
    if key.startswith("an accelerator of"):
        memory = int(re.findall(r"(\d+)GiB", key)[0]) * 2**30
    elif key == "speculative_decoding.methods":
        changed.set("speculative_decoding", methods=["ngram"])
    else:
        section: Any = changed.document
        *parents, name = key.split(".")
        for parent in parents:
            section = section[parent]
        section[name] = int(value) if value.isdecimal() else value
    assert changed.preflight("--accelerator-memory", str(memory))[0] == 0, suggestion


@pytest.mark.parametrize(
    ("inference", "expected"),
    [
        ({"kv_cache_memory": "8GiB"}, {"inference.kv_cache_memory: ", "a memory limit of the container of "}),
        ({"kv_cache_memory": "16KiB"}, {"inference.max_context_length: ", "inference.kv_cache_memory: 1MiB"}),
    ],
)
def test_a_pool_of_the_wrong_size_gets_the_right_one(
    job: Job, capsys: pytest.CaptureFixture[str], inference: dict[str, str], expected: set[str]
) -> None:
    job.set("inference", **inference)
    assert job.plan() == 2
    suggestions = capsys.readouterr().out.split("each of these would make it fit:\n")[1]
    assert all(text in suggestions for text in expected), suggestions
