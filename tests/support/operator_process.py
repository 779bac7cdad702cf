"""The operator as a process of its own, as a person or a pod runs it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class OperatorProcess:
    process: subprocess.Popen[bytes]
    log_file: Path

    def log(self) -> list[dict[str, Any]]:
        """What it has logged so far; lines that are not JSON are left out."""
        lines = self.log_file.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def wait_for(self, message: str, *, seconds: float = 30.0) -> dict[str, Any]:
        """The first line with this message."""
        deadline = time.monotonic() + seconds
        while True:
            for line in self.log():
                if line["message"] == message:
                    return line
            ended = self.process.poll()
            assert ended is None, f"the operator ended with {ended}:\n{self.log_file.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"no {message!r} in:\n{self.log_file.read_text()[-4000:]}"
            time.sleep(0.05)

    def fetch(self, path: str) -> str:
        """Of its health port."""
        port = self.wait_for("started")["health_port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            text: str = answer.read().decode()
            return text

    def writes(self) -> int:
        """That it has made as the leader."""
        return self._total("draftline_operator_writes_total")

    def reconciles(self) -> int:
        """That have come to an end, good or bad."""
        return self._total("draftline_operator_reconciles_total")

    def _total(self, metric: str) -> int:
        lines = [line for line in self.fetch("/metrics").splitlines() if line.startswith(metric + "{")]
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)

    def stop(self, *, seconds: float = 20.0) -> int:
        """As a kubelet does; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=seconds)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)


@contextmanager
def running_operator(
    kubeconfig: Path, namespace: str, log_file: Path, **flags: str | float
) -> Iterator[OperatorProcess]:
    """Watches this namespace alone, and has its Lease there."""
    given: dict[str, str | float] = {
        "kubeconfig": str(kubeconfig),
        "namespace": namespace,
        "watch_namespaces": namespace,
        "default_image": "registry.test/server:1",
        "autoscaling_provider": "builtin",
        "health_host": "127.0.0.1",
        "health_port": 0,
        "lease_seconds": 3,
        **flags,
    }
    arguments = [
        part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    with log_file.open("wb") as log:
        command = [sys.executable, "-m", "draftline_operator.main", "run", *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    operator = OperatorProcess(process, log_file)
    try:
        yield operator
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait(timeout=10)
