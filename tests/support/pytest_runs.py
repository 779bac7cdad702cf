"""pytest in pytest, for what it does in another environment."""

from __future__ import annotations

import os
import subprocess
import sys

from support.kube.cache import ROOT


def run_pytest(*tests: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Of this project's variables only the given ones are set."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTLINE_")}
    return subprocess.run(
        command, cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, check=False
    )
