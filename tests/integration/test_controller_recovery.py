"""A draft that was switched off comes back, also for requests that it has missed a long prompt of."""

from __future__ import annotations

from pathlib import Path

from draftline_server.engine import Engine
from support.engines import add, make_engine
from support.tiny_models import make_tiny_model

PROMPT_LENGTH = 700


def run_until_drafted(engine: Engine, *, max_steps: int) -> int:
    for step in range(max_steps):
        engine.step()
        if engine.statistics().drafts.get("draft_model", 0):
            return step
    raise AssertionError(f"no draft in {max_steps} steps")


def test_a_probe_lets_a_draft_catch_up_with_a_long_prompt(tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target")
    engine = make_engine(
        target,
        target,
        max_context_length=1024,
        speculation={"methods": ("draft_model",), "fallback_to_standard_decoding": True},
    )
    engine._parts.controller.switch_off()
    add(engine, "long", [5 + i % 300 for i in range(PROMPT_LENGTH)], max_tokens=300, ignore_eos=True)

    run_until_drafted(engine, max_steps=100)

    engine.check_integrity()
