"""How far a step is, for a person at a terminal."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


def progress_bar(name: str, total: int, unit: str) -> Any:
    """A bar of `tqdm`, on stderr."""
    return tqdm(total=total, desc=name, unit=unit, dynamic_ncols=True)
