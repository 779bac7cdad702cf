"""The commands: flags become keys, faults become one line."""

from __future__ import annotations

import io
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from draftline.v1 import inference_pb2 as pb
from draftline_server import __main__ as command_line
from draftline_server.config import Config
from draftline_server.errors import ModelError
from draftline_server.rpc.client import CallFailedError, CompletionOptions, build_request, describe_summary


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that `serve` was run with."""
    configs: list[Config] = []

    def run(config: Config, _: object) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("draftline_server.app.run", run)
    monkeypatch.setattr(command_line, "configure_logging", lambda **_: None)
    return configs


def test_serve_takes_directories_and_overrides(served: list[Config]) -> None:
    flags = [
        "--grpc-port",
        "0",
        "--device",
        "cpu",
        "--num-speculative-tokens",
        "0",
        "--kv-cache-memory",
        "1GiB",
    ]
    assert command_line.main(["serve", "--target", "/a", "--draft", "/b", *flags]) == 0
    [config] = served
    assert config.models.target_model.path == Path("/a")
    assert config.models.draft_model is not None
    assert config.models.draft_model.path == Path("/b")
    assert (config.server.grpc_port, config.server.admin_port, config.device) == (0, 9090, "cpu")
    assert config.inference.kv_cache_memory == 2**30
    assert config.speculative_decoding.num_speculative_tokens == 0


def test_flags_go_before_the_file(served: list[Config], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("models: {target_model: {path: /a}}\nserver: {grpc_port: 1, admin_port: 2}\n")
    assert command_line.main(["serve", "--config", str(file), "--grpc-port", "3"]) == 0
    assert (served[0].server.grpc_port, served[0].server.admin_port) == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "/a", "--grpc-port", "99999"], "server.grpc_port"),
        (["--target", "/a", "--device", "tpu"], "device"),
        (["--target", "/a", "--num-speculative-tokens", "-1"], "speculative_decoding.num_speculative_tokens"),
        (
            ["--target", "/a", "--num-speculative-tokens", "1000"],
            "speculative_decoding.num_speculative_tokens",
        ),
        (["--target", ""], "models.target_model.path"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--config", "/nowhere.yaml", "--draft", "/b"], "--draft"),
    ],
)
def test_wrong_key_is_one_line(
    served: list[Config], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert command_line.main(["serve", *arguments]) == command_line.EXIT_STARTUP
    assert served == []
    captured = capsys.readouterr().err
    assert captured.startswith(f"error: {message}")
    assert captured.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "one of the arguments --config --target is required"),
        (["serve", "--target", "/a", "--grpc-prot", "1"], "unrecognized arguments: --grpc-prot 1"),
        *(
            (["serve", "--target", "/a", "--num-speculative-tokens", value], message)
            for value, message in (
                ("1.9", "argument --num-speculative-tokens: invalid int value: '1.9'"),
                ("true", "argument --num-speculative-tokens: invalid int value: 'true'"),
                ("", "argument --num-speculative-tokens: invalid int value: ''"),
            )
        ),
        (["generate", "--top-k", "many"], "argument --top-k: invalid int value: 'many'"),
        (["fetch", "hf://a/b"], "the following arguments are required: --out"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_flag_that_cannot_be_read_is_one_line(
    served: list[Config], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main(arguments)
    assert caught.value.code == command_line.EXIT_STARTUP
    assert served == []
    captured = capsys.readouterr().err
    assert captured.startswith(f"error: {message}; see draftline-server")
    assert captured.count("\n") == 1


def test_failed_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: list[Config]
) -> None:
    def run(config: Config, _: object) -> int:
        raise ModelError("models.target_model.path: no such directory")

    monkeypatch.setattr("draftline_server.app.run", run)
    assert command_line.main(["serve", "--target", "/a"]) == command_line.EXIT_STARTUP
    assert capsys.readouterr().err == "error: models.target_model.path: no such directory\n"


@pytest.mark.usefixtures("root_logger_as_it_was")
def test_start_that_fails_by_a_fault_of_ours_is_one_line_with_an_id(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Config, _: object) -> int:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("draftline_server.app.run", run)
    assert command_line.main(["serve", "--target", "/a"]) == command_line.EXIT_FAILED
    entry = json.loads(capsys.readouterr().err)  # one line, so one document
    assert (entry["level"], entry["message"], entry["error"]) == ("critical", "server failed", "RuntimeError")
    assert re.fullmatch("[0-9a-f]{16}", entry["error_id"])
    assert entry["exception"].startswith("Traceback")
    assert command_line.main(["serve", "--target", "/a", "--log-format", "text"]) == command_line.EXIT_FAILED
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert re.search(
        "critical draftline_server.*: server failed error_id=[0-9a-f]{16} error=RuntimeError$", first
    )
    assert second.startswith("Traceback")


def test_sigterm_ends_a_server_that_has_no_handler_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a container would not hear it otherwise."""
    seen: list[object] = []

    def run(config: Config, _: object) -> int:
        seen.append(signal.getsignal(signal.SIGTERM))
        return 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("draftline_server.app.run", run)
    assert command_line.main(["serve", "--target", "/a"]) == 0
    assert callable(seen[0])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_prompt_that_is_no_text_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    assert command_line.main(["generate"]) == command_line.EXIT_STARTUP
    assert capsys.readouterr().err == "error: the prompt is not utf-8 text (byte 2)\n"


@pytest.mark.parametrize("command", [[], ["serve"], ["generate"], ["fetch"], ["preflight"], ["plan"]])
def test_help_is_there(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main([*command, "--help"])
    assert caught.value.code == 0
    assert "usage: draftline-server" in capsys.readouterr().out


def test_generate_sends_only_what_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[pb.GenerateRequest] = []

    def stream_completion(address: str, options: CompletionOptions, show: Any) -> pb.Summary:
        sent.append(build_request(options))
        show("some text")
        show("")
        return pb.Summary(finish_reason=pb.FINISH_REASON_STOP)

    monkeypatch.setattr("draftline_server.rpc.client.stream_completion", stream_completion)
    flags = ["--chat", "--max-tokens", "5", "--seed", "0", "--stop", "a", "--stop", "b", "--no-speculation"]
    assert command_line.main(["generate", "--prompt", "hi", *flags]) == 0
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    assert sent == [
        pb.GenerateRequest(
            chat=chat,
            sampling=pb.SamplingParams(max_tokens=5, seed=0, stop=["a", "b"], ignore_eos=False),
            speculation=pb.SpeculationParams(enabled=False),
        )
    ]
    captured = capsys.readouterr()
    assert captured.out == "some text\n"
    assert "finish reason stop" in captured.err


def test_generate_without_a_server_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["generate", "--address", "127.0.0.1:1", "--prompt", "x"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: UNAVAILABLE: ")


def test_value_that_the_wire_cannot_carry_is_refused() -> None:
    with pytest.raises(CallFailedError, match="cannot be sent"):
        build_request(CompletionOptions(prompt="x", sampling={"max_tokens": 2**64}))
    for is_chat in (True, False):
        with pytest.raises(CallFailedError, match="not UTF-8"):  # as stdin gives what is none
            build_request(CompletionOptions(prompt="\udcff", is_chat=is_chat))


def test_summary_is_described() -> None:
    line = describe_summary(
        pb.Summary(
            finish_reason=pb.FINISH_REASON_LENGTH,
            usage=pb.Usage(prompt_tokens=7, completion_tokens=11, cached_tokens=4),
            timings=pb.Timings(time_to_first_token_ns=10**9, end_to_end_ns=3 * 10**9),
            speculation=pb.SpeculationStats(draft_tokens=8, accepted_tokens=6),
        )
    )
    assert "7 prompt tokens (4 cached), 11 output tokens in 3.00 s, first after 1.00 s" in line
    assert "then 5.0 tokens/s" in line
    assert "accepted 6 of 8 draft tokens (75%)" in line
