"""Compiles a C file at first use, with the system's compiler, and loads it.

A library is built once (a second or two) and kept in the user's cache directory under a key of its source.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_FLAGS = ("-O3", "-fopenmp", "-fPIC", "-shared")
_MAX_SECONDS = 120


def load(source: Path, flags: Sequence[str]) -> ctypes.CDLL | None:
    """The library made from `source`; None, with a warning, where it cannot be built."""
    flags = (*_FLAGS, *flags)
    key = hashlib.sha256(source.read_bytes() + " ".join(flags).encode()).hexdigest()[:16]
    path = _cache_directory() / f"{source.stem}-{key}.so"
    try:
        if not path.exists():
            compiler = shutil.which(os.environ.get("CC", "cc"))
            if compiler is None:
                logger.warning("No C compiler found, running without %s", source.stem)
                return None
            _compile([compiler, *flags], source, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s could not be built, running without it: %s", source.stem, error)
        return None


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "draftline"


def _compile(command: Sequence[str], source: Path, path: Path) -> None:
    """Builds beside the destination and renames, so that nobody ever loads half a library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        built = Path(directory) / path.name
        subprocess.run(
            [*command, str(source), "-o", str(built), "-lm"],
            check=True,
            capture_output=True,
            timeout=_MAX_SECONDS,
        )
        built.rename(path)
