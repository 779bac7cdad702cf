"""Which files are fetched: what serving needs, once, and exactly a manifest's list where there is one."""

from __future__ import annotations

import pytest

from draftline_server.core.digest import FileEntry
from draftline_server.errors import FetchError
from draftline_server.fetch.selection import apply_manifest, select_files
from draftline_server.fetch.source import RemoteFile


def files(*paths: str) -> list[RemoteFile]:
    return [RemoteFile(path=path, size=10, identity=path) for path in paths]


def selected(*paths: str) -> list[str]:
    return [file.path for file in select_files(files(*paths))]


def test_serving_needs_no_cards_and_no_other_formats() -> None:
    assert selected(
        ".gitattributes",
        "LICENSE",
        "README.md",
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "config.json",
        "draftline-manifest.json",
        "merges.txt",
        "model.safetensors",
        "onnx/config.json",
        "original/consolidated.00.pth",
        "pytorch_model.bin",
        "requirements.txt",
        "tokenizer.json",
        "tokenizer.model",
    ) == [
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
    ]


def test_weights_come_once() -> None:
    assert selected("consolidated.safetensors", "model.safetensors") == ["model.safetensors"]
    assert selected("part-1.safetensors", "part-2.safetensors") == [
        "part-1.safetensors",
        "part-2.safetensors",
    ]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("config.json",), "no safetensors files there"),
        (("config.json", "pytorch_model.bin"), "only pytorch_model.bin; convert it to safetensors first"),
        (("unet/model.safetensors",), "no safetensors files there"),
    ],
)
def test_a_model_without_weights_is_refused(paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(FetchError, match=message):
        select_files(files(*paths))


def test_a_manifest_is_the_list() -> None:
    entries = [FileEntry("README.md", 10, "a" * 64), FileEntry("b.safetensors", 10, "b" * 64)]
    there = files("README.md", "b.safetensors", "config.json")
    assert [(file.path, file.sha256) for file in apply_manifest(there, entries)] == [
        ("README.md", "a" * 64),
        ("b.safetensors", "b" * 64),
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (FileEntry("gone.json", 10, "a" * 64), "gone.json: missing"),
        (FileEntry("config.json", 11, "a" * 64), "config.json: 10 bytes, draftline-manifest.json says 11"),
        (FileEntry("../config.json", 10, "a" * 64), "leaves the model's folder"),
        (FileEntry("/etc/passwd", 10, "a" * 64), "leaves the model's folder"),
        (FileEntry("a//b", 10, "a" * 64), "leaves the model's folder"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(entry: FileEntry, message: str) -> None:
    with pytest.raises(FetchError, match=message):
        apply_manifest(files("config.json"), [entry])


def test_a_part_is_continued_only_with_the_same_content() -> None:
    first = RemoteFile(path="a", size=10, identity="x")
    assert first.staged_name == RemoteFile(path="a", size=10, identity="x", sha256="f" * 64).staged_name
    others = [("b", 10, "x"), ("a", 11, "x"), ("a", 10, "y")]
    names = {RemoteFile(path=p, size=s, identity=i).staged_name for p, s, i in others}
    assert len(names) == 3
    assert first.staged_name not in names
