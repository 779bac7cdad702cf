"""Writes requirements.lock: the exact version of everything that any extra of draftline installs.

pip resolves, without installing; `make lock` runs this. Versions already in the lock are kept, so that one
dependency can be added without moving the others; delete lines of the lock (or all of it) to move them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
HEADER = """\
# Everything that any extra of draftline installs, on Linux x86-64 with Python 3.11. A constraint for pip:
#   pip install -c requirements.lock -e '.[server,dev]'
# Written by `make lock`.
"""


def resolve() -> list[dict[str, Any]]:
    """Asks pip what it would install for all extras."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--report", str(report), "--editable", f"{ROOT}[operator,server,dev]"]
        if LOCK.exists():
            command += ["--constraint", str(LOCK)]
        subprocess.run(command, check=True)
        installs: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return installs


def main() -> None:
    """Rewrites the lock."""
    pins = {}
    for item in resolve():
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        pins[name] = item["metadata"]["version"]
    del pins["draftline"]
    lines = [f"{name}=={version}\n" for name, version in sorted(pins.items())]
    LOCK.write_text(HEADER + "".join(lines))
    print(f"{LOCK.name}: {len(lines)} packages")


if __name__ == "__main__":
    main()
