"""The demo behind `make run`: a real server, two streamed completions, and what speculation gained.

Everything goes through the gRPC API, as any client would do it; nothing of the server is imported. The speed
with speculation off is measured on the same running server by the per-request switch.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from draftline.v1 import inference_pb2 as pb
from draftline.v1 import inference_pb2_grpc
from prepare_models import PreparationError, cache_directory, prepare_head, prepare_target

CONFIG = Path(__file__).with_name("config.yaml")
START_TIMEOUT_SECONDS = 300
STOP_TIMEOUT_SECONDS = 60
CALL_TIMEOUT_SECONDS = 600  # a busy machine may be slow
RUNS = 3
PROPOSERS = {"ngram": "n-gram", "draft_model": "head"}
MAX_POSITIONS = 16

CODE = '''\
class Account:
    """Money of one customer, in cents."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance
'''


@dataclass(frozen=True)
class Prompt:
    """A chat message to show."""

    name: str
    text: str
    max_tokens: int


PROMPTS = (
    Prompt("edit code", f"Tidy up this Python code and show all of it.\n\n```python\n{CODE}```", 160),
    Prompt("chat", "Explain in a few sentences why the sky is blue and sunsets are red.", 96),
)


@dataclass(frozen=True)
class Completion:
    """What one call returned."""

    token_ids: tuple[int, ...]
    summary: pb.Summary

    @property
    def tokens_per_second(self) -> float:
        """Of all tokens after the first, so that prefill does not count."""
        timings = self.summary.timings
        seconds = (timings.end_to_end_ns - timings.time_to_first_token_ns) / 1e9
        return (len(self.token_ids) - 1) / seconds


class DemoError(Exception):
    """The demo did not go as it should; the message is for the person at the terminal."""


class Server:
    """The server process, started on creation. Its log goes to a file, away from the text."""

    def __init__(self, *, directory: Path, log: Path) -> None:
        self._log = log
        command = [sys.executable, "-m", "draftline_server", "serve", "--config", str(CONFIG)]
        # A session of its own: Ctrl-C reaches this script alone, which then ends the server in good order.
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, cwd=directory, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_until_ready(self, channel: grpc.Channel) -> None:
        """Returns when the health service says SERVING; raises `DemoError` if the process ends before."""
        health = health_pb2_grpc.HealthStub(channel)
        give_up_at = time.monotonic() + START_TIMEOUT_SECONDS
        while not _is_serving(health):
            if self._process.poll() is not None:
                raise DemoError(f"the server ended with code {self._process.returncode}:\n{self._log_tail()}")
            if time.monotonic() > give_up_at:
                raise DemoError(f"the server was not ready after {START_TIMEOUT_SECONDS} s; see {self._log}")
            time.sleep(0.2)

    def wait(self) -> None:
        """Returns when the process ends by itself."""
        self._process.wait()
        raise DemoError(f"the server ended with code {self._process.returncode}:\n{self._log_tail()}")

    def stop(self) -> int:
        """Asks the server to drain and returns its exit code."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text().splitlines()[-10:])


def check_port(host: str, port: int) -> None:
    """Raises `DemoError` where somebody else answers: the demo would show and measure their server."""
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex((host, port)) == 0:
            raise DemoError(f"{host}:{port} is in use, perhaps by another demo")


def _is_serving(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        # The stub's types lack its methods, which are made at run time.
        response = health.Check(health_pb2.HealthCheckRequest(), timeout=1)  # type: ignore[attr-defined]
    except grpc.RpcError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def generate(
    stub: inference_pb2_grpc.InferenceStub,
    prompt: Prompt,
    *,
    speculate: bool,
    on_text: Callable[[str], None] | None = None,
) -> Completion:
    """Streams one greedy completion."""
    request = pb.GenerateRequest(
        chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=prompt.text)]),
        sampling=pb.SamplingParams(temperature=0, max_tokens=prompt.max_tokens),
        speculation=pb.SpeculationParams(enabled=speculate),
    )
    token_ids: list[int] = []
    for message in stub.GenerateStream(request, timeout=CALL_TIMEOUT_SECONDS):
        if message.HasField("summary"):
            return Completion(tuple(token_ids), message.summary)
        token_ids.extend(message.chunk.token_ids)
        if on_text is not None:
            on_text(message.chunk.text)
    raise DemoError("a stream ended without a summary")


def show(stub: inference_pb2_grpc.InferenceStub, prompt: Prompt) -> None:
    """Streams a completion to the terminal as it comes."""
    print(f"\n── {prompt.name} ──\n> {prompt.text.splitlines()[0]}\n")
    completion = generate(stub, prompt, speculate=True, on_text=lambda text: print(text, end="", flush=True))
    speculation = completion.summary.speculation
    print(f"\n\n[{len(completion.token_ids)} tokens in {speculation.decode_steps} steps of the target]")


@dataclass(frozen=True)
class Measurement:
    """One prompt with speculation off and on."""

    line: str
    """Of the table."""
    num_accepted_tokens: int
    is_same: bool


def measure(stub: inference_pb2_grpc.InferenceStub, prompt: Prompt) -> Measurement:
    """Measures a prompt with speculation off and on, by turns."""
    off, on = [], []
    for _ in range(RUNS):
        off.append(generate(stub, prompt, speculate=False))
        on.append(generate(stub, prompt, speculate=True))
        print(".", end="", flush=True)
    speed_off = statistics.median(completion.tokens_per_second for completion in off)
    speed_on = statistics.median(completion.tokens_per_second for completion in on)
    drafted = sum(completion.summary.speculation.draft_tokens for completion in on)
    accepted = sum(completion.summary.speculation.accepted_tokens for completion in on)
    # Where drafts do not pay on this machine, none are made.
    acceptance = f"{accepted / drafted:.0%} of {drafted}" if drafted else "not drafted"
    is_same = {c.token_ids for c in off} == {c.token_ids for c in on}
    line = (
        f"{prompt.name:<10} {speed_off:>9.1f} {speed_on:>9.1f} {speed_on / speed_off:>9.2f}x"
        f"   {acceptance:<16} {'yes' if is_same else 'no'}"
    )
    return Measurement(line, accepted, is_same)


def prove(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Shows and measures all prompts."""
    for prompt in PROMPTS:
        show(stub, prompt)
    print(f"\nmeasuring: {RUNS} runs each, by turns, greedy, one stream ", end="", flush=True)
    measured = [measure(stub, prompt) for prompt in PROMPTS]
    print(f"\n\n{'tokens/s':<10} {'off':>9} {'on':>9} {'speed-up':>10}   {'accepted':<16} same tokens")
    print("\n".join(measurement.line for measurement in measured))
    if not any(measurement.num_accepted_tokens for measurement in measured):
        raise DemoError("no draft token was accepted")
    if not all(measurement.is_same for measurement in measured):
        # Without our kernels bfloat16 may round otherwise where more tokens are computed at once.
        print("the tokens are not the same: either this machine has no C compiler, or that is a fault")


def describe_acceptance(address: str) -> None:
    """Prints what became of the drafts so far, as the server's metrics count them."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=CALL_TIMEOUT_SECONDS) as response:
        metrics = {
            (sample.name.removeprefix("draftline_"), *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(response.read().decode())
            for sample in family.samples
        }
    print("\naccepted of what each proposer drafted, and how often its 1st, 2nd, ... token stood:")
    for proposer, name in PROPOSERS.items():
        drafts = metrics.get(("drafts_total", proposer), 0.0)
        if not drafts:
            print(f"{name:<10} nothing drafted")
            continue
        drafted = metrics["draft_tokens_total", proposer]
        accepted = metrics.get(("accepted_tokens_total", proposer), 0.0)
        stood = (
            metrics.get(("accepted_tokens_per_position_total", str(position), proposer), 0.0)
            for position in range(MAX_POSITIONS)
        )
        by_position = " ".join(f"{count / drafts:.2f}" for count in stood if count)
        print(f"{name:<10} {accepted / drafted:>4.0%} of {drafted:.0f}   {by_position}")
    print(
        "\nn-grams continue earlier matches in the same conversation: they help where an answer repeats its"
        "\nprompt. The head, a layer trained for this target, drafts where it promises more than they do."
    )


def describe_server(stub: inference_pb2_grpc.InferenceStub) -> None:
    """Prints what is being served."""
    model = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=CALL_TIMEOUT_SECONDS)
    server = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=CALL_TIMEOUT_SECONDS)
    methods = ", ".join(pb.SpeculationMethod.Name(method) for method in server.speculation_methods)
    print(
        f"ready: {model.target.name} ({model.target.architecture}, {model.target.dtype}, {server.device}), "
        f"speculation by {methods.lower().replace('speculation_method_', '')}, "
        f"up to {server.num_speculative_tokens} tokens"
    )


def run(*, once: bool) -> None:
    """Starts the server, shows it, and serves until interrupted, or stops it at once."""
    cache = cache_directory()
    prepare_target()
    prepare_head()
    settings = yaml.safe_load(CONFIG.read_text())["server"]
    address = f"{settings['host']}:{settings['grpc_port']}"
    log = cache / "demo-server.log"
    print(f"starting the server on {address}; its log is {log}", flush=True)
    check_port(settings["host"], settings["grpc_port"])
    server = Server(directory=cache, log=log)
    try:
        with grpc.insecure_channel(address) as channel:
            server.wait_until_ready(channel)
            stub = inference_pb2_grpc.InferenceStub(channel)
            describe_server(stub)
            prove(stub)
            describe_acceptance(f"{settings['host']}:{settings['admin_port']}")
        if not once:
            print(f"\nserving on {address} until Ctrl-C; in another terminal, for example:")
            print('  .venv/bin/draftline-server generate --chat --prompt "What is a lighthouse?"', flush=True)
            server.wait()
    finally:
        exit_code = server.stop()
        print(f"\nthe server ended with exit code {exit_code}", flush=True)
    if exit_code != 0:
        raise DemoError(f"expected exit code 0; see {log}")


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo."""
    parser = argparse.ArgumentParser(description="Show speculative decoding on this machine.")
    parser.add_argument(
        "--once", action="store_true", default=os.environ.get("ONCE") == "1", help="stop after the proof"
    )
    arguments = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        run(once=arguments.once)
    except KeyboardInterrupt:
        return 0
    except grpc.RpcError as error:
        print(f"error: a call failed: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except (DemoError, PreparationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
