"""Which files of a repository or folder serving needs.

Weights as safetensors, JSON, tokenizer and templates; no model cards, no weights in other formats, no copy
of the weights under another name (Mistral's consolidated.safetensors). The same rule for every source, so
that a model has the same digest wherever it is fetched from. Where a manifest lies beside the files, its
list is the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from draftline_server.core.digest import MANIFEST_NAME, FileEntry
from draftline_server.errors import FetchError
from draftline_server.fetch.source import RemoteFile

_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken")
_NAMES = frozenset({"merges.txt", "vocab.txt"})
_TEMPLATES_FOLDER = "additional_chat_templates"
_WEIGHTS_SUFFIX = ".safetensors"


def select_files(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """The files to fetch. Raises `FetchError` where none of them holds weights."""
    weights = [file for file in files if "/" not in file.path and file.path.endswith(_WEIGHTS_SUFFIX)]
    usual = [file for file in weights if file.path.startswith("model")]
    others = [file for file in files if _is_wanted(file.path)]
    if not weights:
        raise FetchError(_explain_no_weights(files))
    return sorted((usual or weights) + others, key=lambda file: file.path)


def apply_manifest(files: Sequence[RemoteFile], entries: Sequence[FileEntry]) -> list[RemoteFile]:
    """Exactly what a manifest beside the files lists, with its hashes. Raises `FetchError`."""
    there: Mapping[str, RemoteFile] = {file.path: file for file in files}
    return [_listed(there, entry) for entry in entries]


def _listed(there: Mapping[str, RemoteFile], entry: FileEntry) -> RemoteFile:
    path = PurePosixPath(entry.path)
    if path.is_absolute() or ".." in path.parts or path.as_posix() != entry.path:
        raise FetchError(f"{MANIFEST_NAME}: {entry.path!r} leaves the model's folder")
    file = there.get(entry.path)
    if file is None:
        raise FetchError(f"{entry.path}: missing; {MANIFEST_NAME} lists it")
    if file.size != entry.size:
        raise FetchError(f"{entry.path}: {file.size} bytes, {MANIFEST_NAME} says {entry.size}")
    if file.sha256 not in (None, entry.sha256):
        raise FetchError(f"{entry.path}: sha256:{file.sha256}, {MANIFEST_NAME} says sha256:{entry.sha256}")
    return replace(file, sha256=entry.sha256)


def _is_wanted(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    if name.startswith(".") or path == MANIFEST_NAME:
        return False
    if folder:
        return folder == _TEMPLATES_FOLDER and name.endswith(".jinja")
    return name.endswith(_SUFFIXES) or name in _NAMES


def _explain_no_weights(files: Sequence[RemoteFile]) -> str:
    others = sorted(file.path for file in files if file.path.endswith((".bin", ".gguf", ".pth", ".pt")))
    found = f", only {', '.join(others[:3])}; convert it to safetensors first" if others else ""
    return f"no safetensors files there{found}"
