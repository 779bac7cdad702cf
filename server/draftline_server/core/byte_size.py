"""Numbers of bytes as people read them."""

from __future__ import annotations


def format_bytes(size: int) -> str:
    """In the unit that keeps the number short."""
    for unit, factor in [("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)]:
        if abs(size) >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"
