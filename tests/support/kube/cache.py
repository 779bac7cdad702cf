"""What is built once and used by many runs, outside the checkout, under a key of what it was built from."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftline"


def key_of(files: Iterable[Path], *facts: str, root: Path = ROOT) -> str:
    """A short key of the names and contents of files, and of further facts."""
    digest = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(content)}\n".encode())
        digest.update(content)
    for fact in facts:
        digest.update(f"\n{fact}".encode())
    return digest.hexdigest()[:12]


@contextmanager
def exclusive(file: Path) -> Iterator[None]:
    """Only one process at a time is inside, on this machine."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
