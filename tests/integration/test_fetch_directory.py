"""Fetching from a folder: copied, or verified where it lies."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftline_server.core.digest import (
    MANIFEST_NAME,
    Origin,
    compute_model_digest,
    hash_model,
    write_manifest,
)
from draftline_server.errors import FetchError
from draftline_server.fetch.fetching import fetch_model
from draftline_server.fetch.installation import Installation
from draftline_server.fetch.source import RemoteFile
from support.model_files import make_files, read_files, wanted_files, write_files

FILES = make_files(large_bytes=200_000)
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_files(tmp_path / "source", FILES)


def failure(uri: str, directory: Path, **options: Any) -> str:
    with pytest.raises(FetchError) as caught:
        fetch_model(uri, directory, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_is_copied_as_from_anywhere_else(source: Path, tmp_path: Path) -> None:
    fetched = fetch_model(f"file://{source}", tmp_path / "model")
    copied = read_files(tmp_path / "model")
    assert copied.pop(MANIFEST_NAME)
    assert copied == wanted_files(FILES)
    assert fetched.origin is not None
    assert (fetched.origin.uri, fetched.origin.revision) == (f"file://{source}", None)
    assert fetch_model(str(source), tmp_path / "again").model == fetched.model


def test_a_download_cache_of_links_is_copied(source: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in source.iterdir():
        (snapshot / path.name).symlink_to(path)
    fetch_model(str(snapshot), tmp_path / "model")
    assert (tmp_path / "model" / SHARD).read_bytes() == FILES[SHARD]
    assert not (tmp_path / "model" / SHARD).is_symlink()


def test_a_copy_of_a_fetched_model_has_its_digest(source: Path, tmp_path: Path) -> None:
    write_manifest(source)  # of all that is there, cards too
    fetched = fetch_model(str(source), tmp_path / "model", digest=hash_model(source).model)
    copied = read_files(tmp_path / "model")
    copied.pop(MANIFEST_NAME)
    assert fetched.model == hash_model(source).model
    assert copied.keys() == {path for path in FILES if not path.startswith(".")}


def test_a_copy_is_checked_against_the_manifest_of_its_source(source: Path, tmp_path: Path) -> None:
    write_manifest(source)
    content = bytearray(FILES[SHARD])
    content[1000] ^= 1
    (source / SHARD).write_bytes(content)
    assert f"{SHARD}: sha256:" in failure(str(source), tmp_path / "model")
    (source / SHARD).write_bytes(content[:-1])
    assert f"{SHARD}: 199999 bytes, {MANIFEST_NAME} says 200000" in failure(str(source), tmp_path / "model")


@pytest.mark.parametrize("has_manifest", [False, True])
def test_a_model_in_place_is_verified(source: Path, has_manifest: bool) -> None:
    if has_manifest:
        write_manifest(source)
    right = hash_model(source).model
    assert fetch_model(f"file://{source}", source, digest=right).model == right
    assert compute_model_digest(source).from_manifest
    assert read_files(source).keys() - {MANIFEST_NAME} == {path for path in FILES if not path.startswith(".")}
    wrong = f"sha256:{'0' * 64}"
    assert failure(str(source), source, digest=wrong).endswith(f"{wrong} is expected, the files give {right}")


def test_damage_in_place_is_found(source: Path) -> None:
    write_manifest(source)
    (source / SHARD).write_bytes(bytes(200_000))
    assert f"do not have the hashes that {MANIFEST_NAME} lists" in failure(str(source), source)
    (source / SHARD).unlink()
    assert f"{SHARD}: missing; {MANIFEST_NAME} lists it" in failure(str(source), source)


def test_a_model_in_place_on_a_read_only_volume_is_verified(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "write_text", refuse)
    assert fetch_model(str(source), source).model == hash_model(source).model
    assert "no manifest could be written" in caplog.messages


def test_what_is_no_folder_is_named(tmp_path: Path) -> None:
    assert failure("/nowhere/model", tmp_path / "m") == "file:///nowhere/model: no such directory"
    (tmp_path / "file").write_text("")
    assert failure(str(tmp_path / "file"), tmp_path / "m").endswith("/file: not a directory")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_is_named_and_the_next_try_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail_to_sync(_: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_to_sync)
        message = failure(str(source), tmp_path / "model")
    assert f"{tmp_path / 'model'}: disk full ({os.strerror(code)}); what has come is kept" in message
    fetch_model(str(source), tmp_path / "model")
    assert (tmp_path / "model" / SHARD).read_bytes() == FILES[SHARD]


def test_a_source_that_shrinks_does_not_hang(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = Installation.prepare

    def shrink(installation: Installation, files: Sequence[RemoteFile], origin: Origin) -> None:
        prepare(installation, files, origin)
        (source / SHARD).write_bytes(b"short")

    monkeypatch.setattr(Installation, "prepare", shrink)
    message = failure(str(source), tmp_path / "model", pause=lambda _: None)
    assert message.endswith(f"{SHARD}: gave up after 6 tries: nothing came")
