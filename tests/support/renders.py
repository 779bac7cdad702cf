"""What is rendered, text for text in files, so that every change of it is seen in review.

After an intended change `DRAFTLINE_WRITE_RENDERS=1 make test` writes the files anew; without the variable
nothing is ever written.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection
from pathlib import Path

WRITE = "DRAFTLINE_WRITE_RENDERS"


def assert_known(path: Path, text: str) -> None:
    """Whether a file has this text."""
    if os.environ.get(WRITE) == "1":
        path.write_text(text)
    known = path.read_text()
    lines = difflib.unified_diff(known.splitlines(), text.splitlines(), "known", "rendered", lineterm="")
    assert known == text, "\n".join([*lines, f"an intended change is written with {WRITE}=1"])


def assert_all_compared(folder: Path, names: Collection[str]) -> None:
    """There is no file that nobody compares."""
    assert {path.stem for path in folder.iterdir()} == set(names)
