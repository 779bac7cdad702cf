"""Checks a model directory before anything is loaded from it.

A loader that finds a weight missing makes one up, and the model answers nonsense; so every tensor that
the model needs must be in the files, whole, and of the right shape. Only headers are read here.

Choices: weights are safetensors. A directory with both model.safetensors and an index that names other
files is refused: it does not say which one is stale, and transformers would read the single file alone.
Safetensors files that neither is nor names are ignored and reported, and so are tensors that the model does
not have, as transformers does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from draftline_server.errors import ModelError
from draftline_server.model.architecture import Skeleton, read_json_object
from draftline_server.model.safetensors_header import TensorEntry, read_header

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_SHOWN_NAMES = 3
# A pickle can run any code when it is read: that is for its owner to do, once, and not for a server.
_CONVERT_BIN = (
    'convert a single one: python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')\""
)
FLOAT_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights of a directory as their headers describe them."""

    tensors: Mapping[str, TensorEntry]
    files: tuple[Path, ...]
    """Where the weights are, in order of name."""
    ignored_files: tuple[Path, ...]
    """Safetensors files that are no part of the checkpoint."""

    @property
    def dtype(self) -> str:
        """The floating-point dtype that most bytes have; torch's name for it."""
        bytes_of: dict[str, int] = {}
        for entry in self.tensors.values():
            if entry.dtype in FLOAT_DTYPES:
                bytes_of[entry.dtype] = bytes_of.get(entry.dtype, 0) + entry.end - entry.begin
        return FLOAT_DTYPES[max(bytes_of, key=bytes_of.__getitem__)] if bytes_of else "float32"


def check_directory(directory: Path) -> None:
    """Raises `ModelError` unless this is a directory that may hold a model."""
    if not directory.exists():
        raise ModelError(f"{directory}: no such directory")
    if not directory.is_dir():
        raise ModelError(f"{directory}: not a directory")
    adapter = directory / "adapter_config.json"
    if adapter.exists():
        raise ModelError(f"{adapter}: adapters are not supported; merge the adapter into its model first")


def read_checkpoint(directory: Path) -> Checkpoint:
    """Reads the headers of all weight files and checks them against the index."""
    single, index = directory / WEIGHTS_NAME, directory / INDEX_NAME
    if index.exists():
        weight_map = _read_index(index)
        shards = sorted(set(weight_map.values()))
        if single.exists() and shards != [WEIGHTS_NAME]:
            raise ModelError(
                f"{index}: names other files than {WEIGHTS_NAME}, which is there, too; delete the stale one, "
                "or rename the shard"
            )
        tensors = _read_shards(directory, weight_map, shards)
        files = tuple(directory / name for name in shards)
    elif single.exists() or single.is_symlink():  # a link to nowhere is named as what it is
        tensors, files = read_header(single), (single,)
    else:
        raise ModelError(_explain_no_weights(directory))
    others = sorted(set(directory.glob("*.safetensors")) - set(files))
    return Checkpoint(tensors=tensors, files=files, ignored_files=tuple(others))


def check_tensors(directory: Path, checkpoint: Checkpoint, skeleton: Skeleton) -> None:
    """Raises `ModelError` unless every tensor of the model is there, in its shape, unquantized."""
    where = checkpoint.files[0] if len(checkpoint.files) == 1 else directory / INDEX_NAME
    found = {_model_name(name, skeleton): entry for name, entry in checkpoint.tensors.items()}
    missing = [name for name in skeleton.shapes if name not in found and not _is_tied(name, found, skeleton)]
    if missing:
        raise ModelError(f"{where}: lacks {_count(missing, 'tensor')} of the model: {_join(missing)}")
    for name, shape in skeleton.shapes.items():
        entry = found.get(name)
        if entry is not None:
            check_entry(where, name, entry, shape)


def check_entry(where: Path, name: str, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    """Raises `ModelError` unless a tensor has its shape and is unquantized."""
    if entry.shape != shape:
        raise ModelError(
            f"{where}: tensor {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}"
        )
    if entry.dtype not in FLOAT_DTYPES:
        raise ModelError(f"{where}: tensor {name} is {entry.dtype}; quantized weights are not supported")


def ignored_tensors(checkpoint: Checkpoint, skeleton: Skeleton) -> str | None:
    """Says which tensors the model does not have; None where it has them all."""
    names = sorted(name for name in checkpoint.tensors if _model_name(name, skeleton) not in skeleton.shapes)
    return f"{_count(names, 'tensor')} that the model does not have: {_join(names)}" if names else None


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing or empty")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"{index}: {shard!r}, given for tensor {tensor}, is not a file name")
    return weight_map


def _read_shards(
    directory: Path, weight_map: Mapping[str, str], shards: Iterable[str]
) -> dict[str, TensorEntry]:
    index = directory / INDEX_NAME
    missing = [name for name in shards if not (directory / name).is_file()]
    if missing:
        raise ModelError(f"{index}: names {_count(missing, 'missing file')}: {_join(missing)}")
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        entries = read_header(directory / shard)
        _check_shard(index, shard, weight_map, entries)
        tensors.update(entries)
    return tensors


def _check_shard(
    index: Path, shard: str, weight_map: Mapping[str, str], entries: Mapping[str, TensorEntry]
) -> None:
    """Index and shard must name the same tensors: else one of them is stale, or a tensor is there twice."""
    named = {tensor for tensor, file in weight_map.items() if file == shard}
    absent, extra = sorted(named - entries.keys()), sorted(entries.keys() - named)
    if absent:
        raise ModelError(f"{index}: names {_count(absent, 'tensor')} that {shard} lacks: {_join(absent)}")
    if extra:
        raise ModelError(
            f"{index}: stale: {shard} holds {_count(extra, 'tensor')} that the index does not place there: "
            f"{_join(extra)}"
        )


def _explain_no_weights(directory: Path) -> str:
    for pattern, hint in [
        ("*.safetensors", f"rename a single one to {WEIGHTS_NAME}, or add {INDEX_NAME}"),
        ("*.gguf", "convert it to safetensors first"),
        ("*.bin", _CONVERT_BIN),
    ]:
        others = sorted(path.name for path in directory.glob(pattern))
        if others:
            return f"{directory}: no {WEIGHTS_NAME} and no {INDEX_NAME}, only {_join(others)}; {hint}"
    return f"{directory}: no weights: neither {WEIGHTS_NAME} nor {INDEX_NAME} is there"


def _model_name(name: str, skeleton: Skeleton) -> str:
    """The model's name for a checkpoint's tensor: one of the two may lack the base model's prefix."""
    prefix = f"{skeleton.base_prefix}."
    for candidate in (name, prefix + name, name.removeprefix(prefix)):
        if candidate in skeleton.shapes:
            return candidate
    return name


def _is_tied(name: str, found: Mapping[str, TensorEntry], skeleton: Skeleton) -> bool:
    """Whether another tensor of the checkpoint shares the memory of this one."""
    source = skeleton.tied.get(name, name)
    group = {source, *(tensor for tensor, of in skeleton.tied.items() if of == source)}
    return any(tensor in found for tensor in group)


def _count(names: list[str], noun: str) -> str:
    return f"1 {noun}" if len(names) == 1 else f"{len(names)} {noun}s"


def _join(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    return f"{shown}, ..." if len(names) > _SHOWN_NAMES else shown
