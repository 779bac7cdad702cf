"""The table of cases is complete, and names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE = (TESTS / "CASES.md").read_text(encoding="utf-8")
# Tiny models on a CPU, or directories of models, are enough for these.
SERVER_CASES = {
    *("S01", "S02", "S03", "S06", "S07", "S08", "S09", "S11", "S14", "S16", "S18", "S20", "S21", "S23"),
    *("S25", "S28", "S29", "S32", "S33", "S34", "S35", "S37", "S40", "S41", "S44", "S45", "S47", "S50"),
}


def test_every_case_of_servers_has_a_row() -> None:
    assert SERVER_CASES - set(re.findall(r"^\| (S\d+) ", TABLE, re.MULTILINE)) == set()


def test_every_test_that_the_table_of_cases_names_exists() -> None:
    missing: list[str] = []
    num_named = 0
    for line in TABLE.splitlines():
        path = ""
        for new_path, name in re.findall(r"`((?:\w+/)*\w+\.py)?::(test_\w+)`", line):
            path = new_path or path
            num_named += 1
            source = TESTS / path
            if not path or not source.exists() or f"def {name}(" not in source.read_text(encoding="utf-8"):
                missing.append(f"{path}::{name}")
    assert not missing
    assert num_named > 50
