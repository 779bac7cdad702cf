"""What the demo's head learns from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "server" / "demo" / "head_prompts.py"


def prompts(number: int) -> list[str]:
    command = [sys.executable, str(SCRIPT), "--number", str(number)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_prompts_are_different_have_no_gaps_and_are_the_same_each_time() -> None:
    made = prompts(2000)
    assert len(set(made)) == 2000
    assert not [prompt for prompt in made if "{" in prompt or "}" in prompt]
    assert prompts(500) == made[:500]
