"""Reads the header of a safetensors file and checks that the file keeps what the header promises.

A truncated download would otherwise be found late, by a crash in native code or by noise for weights.
Only the header is read, never a weight, so that a file of any size is checked in milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline_server.errors import ModelError

_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What the header says of one tensor; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Name to entry of every tensor. Raises `ModelError` where file and header disagree."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_LENGTH_BYTES)
            header_bytes = int.from_bytes(start, "little")
            _check_header_length(path, start, header_bytes=header_bytes, file_bytes=size)
            document = _parse(path, file.read(header_bytes))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    entries = {name: _entry(path, name, value) for name, value in document.items() if name != "__metadata__"}
    _check_offsets(path, entries, data_bytes=size - _LENGTH_BYTES - header_bytes)
    return entries


def _check_header_length(path: Path, start: bytes, *, header_bytes: int, file_bytes: int) -> None:
    if start.startswith(b"version "):
        raise ModelError(f"{path}: a git-lfs pointer instead of the file itself; fetch it with git lfs")
    if len(start) < _LENGTH_BYTES:
        raise ModelError(f"{path}: truncated: {file_bytes} bytes are no safetensors file")
    if header_bytes > _MAX_HEADER_BYTES:
        raise ModelError(f"{path}: not a safetensors file (a header of {header_bytes} bytes)")
    if _LENGTH_BYTES + header_bytes > file_bytes:
        raise ModelError(
            f"{path}: truncated: its header alone has {header_bytes} bytes, the file {file_bytes}"
        )


def _parse(path: Path, header: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: damaged: its header is not valid JSON") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path}: damaged: its header is not a JSON object")
    return document


def _entry(path: Path, name: str, value: Any) -> TensorEntry:
    try:
        begin, end = value["data_offsets"]
        entry = TensorEntry(str(value["dtype"]), tuple(map(int, value["shape"])), int(begin), int(end))
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: damaged: the header's entry of tensor {name} is not complete") from error
    bits = _BITS.get(entry.dtype)
    if bits is not None and math.prod(entry.shape) * bits != (entry.end - entry.begin) * 8:
        raise ModelError(
            f"{path}: damaged: tensor {name} has {entry.end - entry.begin} bytes, which does not fit "
            f"{entry.dtype} of shape {list(entry.shape)}"
        )
    return entry


def _check_offsets(path: Path, entries: Mapping[str, TensorEntry], *, data_bytes: int) -> None:
    """The tensors must follow one another without gap or overlap and fill the file."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise ModelError(f"{path}: damaged: tensor {name} begins at byte {entry.begin}, not {position}")
        position = entry.end
    if position > data_bytes:
        raise ModelError(
            f"{path}: truncated: {position} bytes of weights are promised, {data_bytes} are there"
        )
    if position < data_bytes:
        raise ModelError(f"{path}: damaged: {data_bytes - position} bytes follow the last tensor")
