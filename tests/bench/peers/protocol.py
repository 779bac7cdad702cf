"""How the bench talks to a peer's process: one JSON object a line, in and out.

The process loads its model, prints ``{"ready": ...}`` and then answers each workload with its time
and tokens. It stays up between workloads, so that its runs can alternate with everybody else's, and
ends when its input does. Standard library only: a peer's own interpreter imports this too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

# prompts as token ids, number of new tokens -> the new token ids of each prompt
Generate = Callable[[list[list[int]], int], list[list[int]]]


@dataclass(frozen=True)
class Peer:
    """One started peer."""

    description: str
    """Version, dtype and settings, for the foot of the table."""
    generate: Generate


def claim_stdout() -> int:
    """Keeps the real standard output for answers and sends everybody else's prints to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def serve(peer: Peer, answers: int) -> None:
    """Answers workloads until the input ends."""
    with os.fdopen(answers, "w") as output:
        _answer(output, {"ready": peer.description})
        for line in sys.stdin:
            workload = json.loads(line)
            started = time.perf_counter()
            outputs = peer.generate(workload["prompts"], workload["max_new_tokens"])
            seconds = time.perf_counter() - started
            _answer(output, {"seconds": seconds, "outputs": outputs})


def _answer(output: TextIO, message: dict[str, object]) -> None:
    output.write(json.dumps(message) + "\n")
    output.flush()
