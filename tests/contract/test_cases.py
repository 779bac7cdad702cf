"""The table of cases names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def test_every_test_that_the_table_of_cases_names_exists() -> None:
    missing: list[str] = []
    num_named = 0
    for line in (TESTS / "CASES.md").read_text(encoding="utf-8").splitlines():
        path = ""
        for new_path, name in re.findall(r"`((?:\w+/)*\w+\.py)?::(test_\w+)`", line):
            path = new_path or path
            num_named += 1
            source = TESTS / path
            if not path or not source.exists() or f"def {name}(" not in source.read_text(encoding="utf-8"):
                missing.append(f"{path}::{name}")
    assert not missing
    assert num_named > 50
