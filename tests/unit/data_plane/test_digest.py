"""Digests: what changes them, what does not, and what a manifest is trusted for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline_server.core.digest import (
    MANIFEST_NAME,
    ModelDigest,
    compute_model_digest,
    compute_pair_digest,
    write_manifest,
)
from draftline_server.errors import ModelError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "more.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    return tmp_path


def test_the_digest_is_the_sha256_of_the_canonical_file_list(directory: Path) -> None:
    names = ["config.json", "model.safetensors", "nested/more.json", "tokenizer.json"]
    files = [
        {
            "path": name,
            "sha256": hashlib.sha256((directory / name).read_bytes()).hexdigest(),
            "size": (directory / name).stat().st_size,
        }
        for name in names
    ]
    text = json.dumps(files, separators=(",", ":"), sort_keys=True)
    assert compute_model_digest(directory).model == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def test_a_directory_of_the_same_files_elsewhere_has_the_same_digest(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / ".copy"
    copy.mkdir()
    for path in [p for p in directory.iterdir() if p.is_file()]:
        (copy / path.name).symlink_to(path)  # as download caches lay their files out
    (copy / "nested").mkdir()
    (copy / "nested" / "more.json").write_text("{}")
    assert compute_model_digest(copy).model == compute_model_digest(directory).model


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        pytest.param(lambda d: (d / "config.json").write_text('{"a": 2}'), True, id="content"),
        pytest.param(lambda d: (d / "config.json").rename(d / "other.json"), True, id="name"),
        pytest.param(lambda d: (d / "extra.txt").write_text(""), True, id="new-file"),
        pytest.param(lambda d: (d / ".gitattributes").write_text("x"), False, id="hidden-file"),
        pytest.param(lambda d: (d / "..data").mkdir(), False, id="hidden-folder"),
        pytest.param(lambda d: write_manifest(d), False, id="manifest"),
    ],
)
def test_what_changes_a_digest(directory: Path, change: Callable[[Path], object], is_other: bool) -> None:
    before = compute_model_digest(directory).model
    change(directory)
    assert (compute_model_digest(directory).model != before) is is_other


def test_a_manifest_saves_the_hashing(directory: Path) -> None:
    written = write_manifest(directory)
    weights = directory / "model.safetensors"
    weights.write_bytes(bytes(len(weights.read_bytes())))  # other bytes, the same size: not looked at
    read = compute_model_digest(directory)
    assert read.from_manifest
    assert (read.files, read.model) == (written.files, written.model)


MANIFEST_FAULTS = [
    (
        "missing-file",
        lambda d: (d / "config.json").unlink(),
        f"config.json: missing; {MANIFEST_NAME} lists it",
    ),
    (
        "truncated-file",
        lambda d: (d / "config.json").write_text("{"),
        f"config.json: 1 bytes, {MANIFEST_NAME} says 8",
    ),
    ("new-file", lambda d: (d / "new.json").write_text("{}"), f"new.json: not listed in {MANIFEST_NAME}"),
    ("not-json", lambda d: (d / MANIFEST_NAME).write_text("{"), f"{MANIFEST_NAME}: not a manifest"),
    ("not-a-manifest", lambda d: (d / MANIFEST_NAME).write_text("[]"), f"{MANIFEST_NAME}: not a manifest"),
    ("version", lambda d: _edit(d, version=2), f"{MANIFEST_NAME}: version 2, this server reads version 1"),
    ("tampered", lambda d: _edit(d, digest="sha256:0"), "its digest does not follow from its list"),
]


@pytest.mark.parametrize(
    ("change", "message"), [pytest.param(*case, id=name) for name, *case in MANIFEST_FAULTS]
)
def test_a_manifest_that_does_not_match_is_refused(
    directory: Path, change: Callable[[Path], object], message: str
) -> None:
    write_manifest(directory)
    change(directory)
    with pytest.raises(ModelError) as caught:
        compute_model_digest(directory)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def _edit(directory: Path, **values: object) -> None:
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_pair_digest_depends_on_everything_that_decides_the_answers(directory: Path) -> None:
    target = compute_model_digest(directory)
    (directory / "README.md").write_text("another model")
    draft = compute_model_digest(directory)
    assert draft.tokenizer == target.tokenizer

    def digest(
        draft: ModelDigest | None = draft, dtype: str = "float32", size: int = 1, limit: int = 5
    ) -> str:
        return compute_pair_digest(
            target=target,
            draft=draft,
            dtypes={"target": dtype, "draft": "float32"},
            tensor_parallel_sizes={"target": size, "draft": 1},
            num_speculative_tokens=limit,
        )

    variants = [digest(), digest(draft=target), digest(draft=None), digest(dtype="bfloat16")]
    variants += [digest(size=2), digest(limit=4)]
    assert len(set(variants)) == len(variants)
    assert digest() == digest()
