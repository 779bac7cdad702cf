"""Drives an engine a few steps at a time, where a case happens in the middle of something."""

from __future__ import annotations

from typing import Any

from draftline_server.core.generation import GenerationDelta
from draftline_server.engine import Engine
from draftline_server.errors import RequestError
from support.engines import Completion, add


class Session:
    """Collects what an engine says about its requests, and checks its books after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.completions: dict[str, Completion] = {}

    def add(self, request_id: str, prompt: list[int], **options: Any) -> None:
        add(self.engine, request_id, prompt, **options)
        self.completions[request_id] = Completion()

    def abort(self, request_id: str, error: RequestError) -> None:
        self.engine.abort(request_id, error)
        self.engine.check_integrity()

    def step(self, count: int = 1) -> list[GenerationDelta]:
        """Returns the last step's deltas."""
        deltas: list[GenerationDelta] = []
        for _ in range(count):
            deltas = self.engine.step()
            self.engine.check_integrity()
            for delta in deltas:
                self._collect(delta)
        return deltas

    def drain(self, *, max_steps: int = 20_000) -> dict[str, Completion]:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return self.completions
            self.step()
        raise AssertionError(f"the engine still has work after {max_steps} steps")

    def _collect(self, delta: GenerationDelta) -> None:
        completion = self.completions[delta.request_id]
        assert completion.summary is None, "a delta after the final one"
        assert completion.error is None, "a delta after the final one"
        completion.chunks.append(delta.text)
        completion.token_ids.extend(delta.token_ids)
        completion.logprobs.extend(delta.logprobs)
        completion.summary, completion.error = delta.summary, delta.error
