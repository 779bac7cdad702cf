"""The identity of a model and of a pair: what is served, down to the last byte.

Preflight, the operator's status and a starting pod must come to the same digest, so it is computed here
only, and from files alone. A model's digest is the SHA-256 of the canonical JSON of its sorted file list
(relative path, size, SHA-256 of each); names that begin with a dot are no part of it, since download
tools and volume mounts leave such files behind.

A manifest beside the files carries the list, written when they were fetched, and says where they are from.
At a start it is trusted once every size matches and no file is missing or new, so that a model of any size
starts at once; modification times are not compared, because copying changes them. Without a manifest every
byte is read, a few files at a time, which costs about as long as loading the model from the same disk does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline_server.errors import ModelError

MANIFEST_NAME = "draftline-manifest.json"
TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)

_MANIFEST_VERSION = 1
_MAX_READERS = 4
_OF_THE_FILE_SYSTEM = "lost+found"  # at the root of a volume, where only root may look into it


@dataclass(frozen=True, slots=True, order=True)
class FileEntry:
    """One file of a model; `path` is relative, with forward slashes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a fetched model is from."""

    uri: str
    requested_revision: str | None = None
    revision: str | None = None
    """What the request was resolved to, such as a commit; None where a source has no revisions."""


@dataclass(frozen=True, slots=True)
class ModelDigest:
    """The file list and what follows from it."""

    files: tuple[FileEntry, ...]
    from_manifest: bool
    """Whether the list was read instead of computed."""
    origin: Origin | None = None
    """What the manifest says of it; None for files that were not fetched."""

    @property
    def model(self) -> str:
        """``sha256:...`` of all files."""
        return digest_files(self.files)

    @property
    def tokenizer(self) -> str:
        """``sha256:...`` of the tokenizer's files."""
        return digest_files(entry for entry in self.files if entry.path in TOKENIZER_FILES)


def compute_model_digest(directory: Path) -> ModelDigest:
    """Reads the manifest where there is one, else every file. Raises `ModelError`."""
    try:
        sizes = list_files(directory)
        manifest = directory / MANIFEST_NAME
        if manifest.exists():
            digest = read_manifest(manifest)
            _compare_sizes(manifest, digest.files, sizes)
            return digest
        return ModelDigest(_hash_files(directory, sizes), from_manifest=False)
    except OSError as error:
        raise ModelError(f"{error.filename or directory}: cannot be read: {error.strerror}") from error


def hash_model(directory: Path) -> ModelDigest:
    """Reads every file, whatever a manifest says. Raises `OSError`."""
    return ModelDigest(_hash_files(directory, list_files(directory)), from_manifest=False)


def write_manifest(
    directory: Path, *, files: Sequence[FileEntry] | None = None, origin: Origin | None = None
) -> ModelDigest:
    """Writes the manifest beside the files, replacing an old one.

    Every file is hashed, unless `files` lists them: whoever brings files may know their hashes already, and
    write the manifest before they are in place, so that half a model is never taken for a whole one.
    """
    entries = tuple(sorted(files)) if files is not None else hash_model(directory).files
    digest = ModelDigest(entries, from_manifest=False, origin=origin)
    document = {
        "version": _MANIFEST_VERSION,
        "digest": digest.model,
        **({"origin": dataclasses.asdict(origin)} if origin is not None else {}),
        "files": [_as_dict(entry) for entry in digest.files],
    }
    temporary = directory / f".{MANIFEST_NAME}.part"
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    temporary.replace(directory / MANIFEST_NAME)
    return digest


def read_manifest(manifest: Path) -> ModelDigest:
    """What a manifest says, whatever lies beside it. Raises `ModelError`."""
    return parse_manifest(manifest.read_bytes(), name=str(manifest))


def parse_manifest(content: bytes, *, name: str) -> ModelDigest:
    """The manifest in `content`; messages call it `name`. Raises `ModelError`."""
    try:
        document = json.loads(content.decode("utf-8"))
        version, stated = document["version"], document["digest"]
        entries = tuple(sorted(FileEntry(f["path"], f["size"], f["sha256"]) for f in document["files"]))
        origin = _parse_origin(document.get("origin"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{name}: not a manifest; delete it or fetch the model again") from error
    if version != _MANIFEST_VERSION:
        raise ModelError(f"{name}: version {version}, this server reads version {_MANIFEST_VERSION}")
    if stated != digest_files(entries):
        raise ModelError(f"{name}: its digest does not follow from its list; fetch the model again")
    return ModelDigest(entries, from_manifest=True, origin=origin)


def compute_pair_digest(
    *,
    target: ModelDigest,
    draft: ModelDigest | None,
    dtypes: Mapping[str, str],
    tensor_parallel_sizes: Mapping[str, int],
    num_speculative_tokens: int,
) -> str:
    """The digest of all that decides what a pair answers and how it drafts.

    `dtypes` and `tensor_parallel_sizes` have the keys ``target`` and, with a draft model, ``draft``.
    """
    return _digest_json(
        {
            "target": target.model,
            "draft": draft.model if draft else None,
            "tokenizer": target.tokenizer,
            "dtypes": dict(dtypes),
            "tensor_parallel_sizes": dict(tensor_parallel_sizes),
            "num_speculative_tokens": num_speculative_tokens,
        }
    )


def digest_files(entries: Iterable[FileEntry]) -> str:
    """``sha256:...`` of the sorted list."""
    return _digest_json([_as_dict(entry) for entry in sorted(entries)])


def _digest_json(document: object) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"sha256:{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def _as_dict(entry: FileEntry) -> dict[str, Any]:
    return {"path": entry.path, "size": entry.size, "sha256": entry.sha256}


def list_files(directory: Path) -> dict[str, int]:
    """Relative path to size, of every file that counts. Links to files are followed."""
    sizes: dict[str, int] = {}
    for folder, folders, names in os.walk(directory, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and name != _OF_THE_FILE_SYSTEM]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path != directory / MANIFEST_NAME:
                sizes[path.relative_to(directory).as_posix()] = path.stat().st_size
    return sizes


def _raise(error: OSError) -> None:
    raise error


def _hash_files(directory: Path, sizes: Mapping[str, int]) -> tuple[FileEntry, ...]:
    paths = sorted(sizes)
    with ThreadPoolExecutor(max_workers=_MAX_READERS) as readers:  # hashlib lets go of the GIL
        hashes = list(readers.map(lambda path: _hash_file(directory / path), paths))
    return tuple(FileEntry(path, sizes[path], sha256) for path, sha256 in zip(paths, hashes, strict=True))


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.sha256(usedforsecurity=False)).hexdigest()


def _parse_origin(stated: Mapping[str, Any] | None) -> Origin | None:
    """None where there is none; what a later version may add is left out."""
    if stated is None:
        return None
    names = [field.name for field in dataclasses.fields(Origin)]
    return Origin(**{name: stated[name] for name in names})


def _compare_sizes(manifest: Path, entries: Sequence[FileEntry], sizes: Mapping[str, int]) -> None:
    for entry in entries:
        size = sizes.get(entry.path)
        if size is None:
            raise ModelError(f"{manifest.parent / entry.path}: missing; {MANIFEST_NAME} lists it")
        if size != entry.size:
            raise ModelError(
                f"{manifest.parent / entry.path}: {size} bytes, {MANIFEST_NAME} says {entry.size}"
            )
    unlisted = sorted(sizes.keys() - {entry.path for entry in entries})
    if unlisted:
        raise ModelError(
            f"{manifest.parent / unlisted[0]}: not listed in {MANIFEST_NAME}; remove the file or "
            "write the manifest again"
        )
