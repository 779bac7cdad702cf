"""Environments of the peers: each under the cache directory, never in the checkout's own.

A peer's packages must not meet ours (other pins of the same names), so each gets a virtual
environment of its own, made once and kept. Standard library only: a peer's own interpreter
imports this too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def cache_dir() -> Path:
    """Where everything that the bench makes is kept: ``DRAFTLINE_CACHE``, or ``.cache``."""
    return Path(os.environ.get("DRAFTLINE_CACHE") or ROOT / ".cache").resolve()


def peer_dir(name: str) -> Path:
    return cache_dir() / "peers" / name


def python_of(directory: Path) -> Path:
    return directory / "venv" / "bin" / "python"


def make_environment(directory: Path) -> Path:
    """Makes the virtual environment if it is not there; returns its interpreter."""
    python = python_of(directory)
    if not python.exists():
        venv.create(directory / "venv", with_pip=True, symlinks=True)
    return python


def pip_install(python: Path, *arguments: str) -> None:
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def run(command: list[str | Path], **options: object) -> None:
    """Runs a command with its output on stderr: a driver's stdout carries results only."""
    print("+", " ".join(map(str, command)), file=sys.stderr, flush=True)
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr, **options)  # type: ignore[call-overload]


def is_ready(directory: Path, recipe: str) -> bool:
    """Whether this recipe was carried out to its end there."""
    marker = directory / "recipe.txt"
    return marker.exists() and marker.read_text() == recipe


def mark_ready(directory: Path, recipe: str) -> None:
    (directory / "recipe.txt").write_text(recipe)
