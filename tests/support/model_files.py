"""Files that look like a model's to whoever only moves them: names, sizes and hashes, no sense."""

from __future__ import annotations

import random
from pathlib import Path

LARGE_BYTES = 3_000_000


def make_files(*, seed: int = 0, large_bytes: int = LARGE_BYTES, shards: int = 2) -> dict[str, bytes]:
    """What a repository on a hub holds, what serving does not need included."""
    noise = random.Random(seed)
    names = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    return {
        ".gitattributes": b"*.safetensors filter=lfs",
        "README.md": b"# A model",
        "added_tokens.json": b"",  # empty files must come, too
        "additional_chat_templates/tool_use.jinja": b"{{ messages }}",
        "config.json": b'{"model_type": "llama"}',
        "consolidated.safetensors": noise.randbytes(1000),
        "model.safetensors.index.json": noise.randbytes(500),
        **{name: noise.randbytes(large_bytes) for name in names},
        "pytorch_model.bin": noise.randbytes(1000),
        "tokenizer.json": noise.randbytes(70_000),
    }


def wanted_files(files: dict[str, bytes]) -> dict[str, bytes]:
    """Those of `make_files` that serving needs."""
    unwanted = {".gitattributes", "README.md", "consolidated.safetensors", "pytorch_model.bin"}
    return {path: content for path, content in files.items() if path not in unwanted}


def read_files(directory: Path) -> dict[str, bytes]:
    """Everything in a directory that is no hidden file."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    }


def write_files(directory: Path, files: dict[str, bytes]) -> Path:
    """Lays them out; returns the directory."""
    for path, content in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    return directory
