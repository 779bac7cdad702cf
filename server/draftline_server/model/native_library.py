"""Compiles C files with the system's compiler and loads what comes of it.

A library is built at first use (a second or two) and kept in the user's cache directory under a key of its
sources. Images have no compiler; theirs are built with the image, into the folder `BUILT` beside the sources:

    python -m draftline_server.model.native_library
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

BUILT = Path(__file__).with_name("native")

_FLAGS = ("-O3", "-fPIC", "-shared", "-pthread")
_MAX_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Source:
    """C files beside this one, headers last, and what their instructions need."""

    name: str
    file_names: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def paths(self) -> list[Path]:
        return [Path(__file__).with_name(name) for name in self.file_names]

    @property
    def all_flags(self) -> tuple[str, ...]:
        return (*_FLAGS, *self.flags)

    @property
    def library_name(self) -> str:
        """Changes with everything that the library is made of."""
        content = b"".join(path.read_bytes() for path in self.paths) + " ".join(self.all_flags).encode()
        return f"{self.name}-{hashlib.sha256(content).hexdigest()[:16]}.so"


CPU_KERNELS = Source("cpu_kernels", ("cpu_kernels.c", "cpu_pool.c", "cpu_pool.h"), ("-mavx2", "-mfma"))
_BF16_HEADERS = ("bf16_inputs.h", "cpu_pool.h")
_AVX512 = ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512bf16")
AMX_LINEAR = Source("amx_linear", ("amx_linear.c", *_BF16_HEADERS), ("-mamx-tile", "-mamx-bf16", *_AVX512))
AVX512_LINEAR = Source("avx512_linear", ("avx512_linear.c", *_BF16_HEADERS), _AVX512)


def load(source: Source) -> ctypes.CDLL | None:
    """The library made from `source`; None, with a warning, where it cannot be built."""
    built, cached = (folder / source.library_name for folder in (BUILT, _cache_directory()))
    try:
        if not built.exists() and not cached.exists():
            compiler = _compiler()
            if compiler is None:
                logger.warning("No C compiler found, running without %s", source.name)
                return None
            _compile(compiler, source, cached)
        return ctypes.CDLL(str(built if built.exists() else cached))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s could not be built, running without it: %s", source.name, error)
        return None


def build_all(folder: Path = BUILT) -> None:
    """Compiles every library into a folder, none for processors that have no such instructions.

    Raises `FileNotFoundError` or `subprocess.SubprocessError` where that fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if platform.machine() not in ("x86_64", "AMD64"):
        return
    compiler = _compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler found")
    for source in (CPU_KERNELS, AMX_LINEAR, AVX512_LINEAR):
        _compile(compiler, source, folder / source.library_name)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "draftline"


def _compile(compiler: str, source: Source, path: Path) -> None:
    """Builds beside the destination and renames, so that nobody ever loads half a library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        built = Path(directory) / path.name
        sources = [str(source_path) for source_path in source.paths if source_path.suffix == ".c"]
        subprocess.run(
            [compiler, *source.all_flags, *sources, "-o", str(built), "-lm"],
            check=True,
            capture_output=True,
            timeout=_MAX_SECONDS,
        )
        built.rename(path)


if __name__ == "__main__":
    build_all()
