"""The benchmark still runs: a smoke test with tiny random models. Its numbers mean nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent


@pytest.mark.slow
def test_quick_run_prints_every_section(tmp_path: Path) -> None:
    environment = {**os.environ, "DRAFTLINE_CACHE": str(tmp_path), "PEERS": "0"}
    command = [sys.executable, str(BENCH / "run.py"), "--quick", "--threads", "1"]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stderr
    document = (tmp_path / "bench" / "result.md").read_text()
    assert result.stdout.strip() == document.strip()
    for title in ("## Speed", "## The draft head", "## Synthetic acceptance", "## gRPC"):
        assert title in document
    for arm in ("off", "n-gram", "draft model", "chain", "adaptive"):
        assert f"| draftline {arm} |" in document
