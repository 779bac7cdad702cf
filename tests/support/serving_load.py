"""A steady load of streams on serving pods, and what became of each stream."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftline_operator import constants
from support.kube.components import DNS_SERVICE, DOMAIN
from support.serving_pods import ServingPods

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ("Once upon a time", "The sky is blue because", "def main():", "Dear reader,")
_END_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Stream:
    """One that has ended. `outcome` is complete, refused (it never began) or cut."""

    prompt: str
    began: float
    seconds: float
    outcome: str
    error: str
    text: str


def target_of(serving: ServingPods) -> str:
    """For clients that balance by themselves, asking the cluster's DNS."""
    host = f"{serving.name}-pods.{serving.namespace}.svc.{DOMAIN}"
    return f"dns://{DNS_SERVICE}:53/{host}:{constants.GRPC_PORT}"


@dataclass(frozen=True)
class Load:
    """Runs from the beginning of `steady_load` to `end`."""

    process: subprocess.Popen[bytes]
    records: Path
    errors: Path

    def ended(self) -> list[Stream]:
        """The streams that have ended by now."""
        lines = self.records.read_text().splitlines()
        return [Stream(**json.loads(line)) for line in lines if line.endswith("}")]

    def end(self) -> list[Stream]:
        """Lets the streams that run end, and tells of all."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> list[Stream]:
        code = self.process.wait(timeout=_END_SECONDS)
        assert code == 0, f"the clients ended with {code}:\n{self.errors.read_text()[-4000:]}"
        return self.ended()


@contextmanager
def steady_load(
    serving: ServingPods, *, streams: int, tokens: int, rounds: int | None = None, pod: str | None = None
) -> Iterator[Load]:
    """So many streams at any time; with `rounds` only so many one after another. On all pods, or one."""
    target = target_of(serving) if pod is None else f"ipv4:{serving.address(pod)}:{constants.GRPC_PORT}"
    once = ["--rounds", str(rounds)] if rounds is not None else []
    options = ["--streams", str(streams), "--tokens", str(tokens), *once]
    command = [sys.executable, "-m", "support.serving_clients", target, *options, *PROMPTS]
    with tempfile.TemporaryDirectory(prefix="draftline-load-") as folder:
        records, errors = Path(folder, "records"), Path(folder, "errors")
        with records.open("wb") as output, errors.open("wb") as complaints:
            process = subprocess.Popen(
                serving.cluster.command_inside(*command),
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'protos'}"},
                stdout=output,
                stderr=complaints,
            )
        try:
            yield Load(process, records, errors)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def summary(streams: list[Stream]) -> str:
    """One line for a person."""
    seconds = sorted(stream.seconds for stream in streams if stream.outcome == "complete") or [0.0]
    counts = dict(Counter(stream.outcome for stream in streams))
    errors = dict(Counter(stream.error for stream in streams if stream.error))
    middle = seconds[len(seconds) // 2]
    return f"streams {counts}, seconds {seconds[0]:.1f}/{middle:.1f}/{seconds[-1]:.1f}, errors {errors}"
