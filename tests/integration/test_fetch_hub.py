"""Fetching from a hub: what arrives, what is not fetched twice, and every way in which it can fail."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftline_server.core.digest import (
    MANIFEST_NAME,
    ModelDigest,
    compute_model_digest,
    hash_model,
    read_manifest,
)
from draftline_server.errors import FetchError
from draftline_server.fetch import download
from draftline_server.fetch.fetching import fetch_model
from draftline_server.fetch.installation import STAGING_NAME
from draftline_server.fetch.retries import MAX_TRIES
from support.hub_server import SIGNATURE, HubServer
from support.model_files import LARGE_BYTES, make_files, read_files, wanted_files

NAME = "org/model"
URI = f"hf://{NAME}"
COMMIT, LATER = "1" * 40, "2" * 40
FILES = make_files()
WANTED = wanted_files(FILES)
FIRST_SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer() as server:
        server.add(NAME, dict(FILES), commit=COMMIT)
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
        yield server


def fetch(
    directory: Path, *, uri: str = URI, revision: str | None = None, digest: str | None = None
) -> ModelDigest:
    return fetch_model(uri, directory, revision=revision, digest=digest, pause=lambda _: None)


def failure(directory: Path, **options: str) -> str:
    with pytest.raises(FetchError) as caught:
        fetch(directory, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert SIGNATURE not in message
    return message


def content_of(directory: Path) -> dict[str, bytes]:
    """All files but the manifest."""
    return {path: content for path, content in read_files(directory).items() if path != MANIFEST_NAME}


def test_the_files_that_serving_needs_arrive_with_a_manifest(hub: HubServer, tmp_path: Path) -> None:
    fetched = fetch(tmp_path / "model")
    assert content_of(tmp_path / "model") == WANTED
    found = compute_model_digest(tmp_path / "model")
    assert found.from_manifest
    assert found.model == fetched.model == hash_model(tmp_path / "model").model
    assert found.origin is not None
    assert (found.origin.uri, found.origin.requested_revision, found.origin.revision) == (URI, None, COMMIT)
    assert not (tmp_path / "model" / STAGING_NAME).exists()


def test_a_model_that_is_there_is_left_alone_without_a_request(hub: HubServer, tmp_path: Path) -> None:
    first = fetch(tmp_path)
    hub.requests.clear()
    assert fetch(tmp_path).model == first.model
    assert fetch(tmp_path, digest=first.model).model == first.model
    assert fetch(tmp_path, uri="hf://org/elsewhere", digest=first.model).model == first.model
    assert hub.requests == []


def test_a_revision_is_pinned_to_its_commit(hub: HubServer, tmp_path: Path) -> None:
    later = make_files(seed=1)
    hub.repositories[NAME].commits[LATER] = later
    hub.repositories[NAME].branches["next"] = LATER
    fetch(tmp_path, revision="next")
    assert content_of(tmp_path) == wanted_files(later)
    origin = read_manifest(tmp_path / MANIFEST_NAME).origin
    assert origin is not None
    assert (origin.requested_revision, origin.revision) == ("next", LATER)
    assert all(f"/resolve/{LATER}/" in r.path for r in hub.requests if "/resolve/" in r.path)


def test_another_revision_replaces_the_model(hub: HubServer, tmp_path: Path) -> None:
    fetch(tmp_path)
    later = {path: content for path, content in FILES.items() if path != "added_tokens.json"}
    later["config.json"] = b"{}"
    hub.repositories[NAME].commits[LATER] = later
    fetch(tmp_path, revision=LATER)
    assert content_of(tmp_path) == wanted_files(later)


def test_the_token_goes_to_the_hub_and_not_with_a_redirect(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("HF_TOKEN", "hf_right0123456789")
    hub.repositories[NAME].token = "hf_right0123456789"
    fetch(tmp_path)
    authorizations = {(request.is_redirected, request.authorization) for request in hub.requests}
    assert authorizations == {(False, "Bearer hf_right0123456789"), (True, None)}
    shown = caplog.text + "".join(str(vars(record)) for record in caplog.records)
    assert "hf_right0123456789" not in shown
    assert SIGNATURE not in shown


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_a_cut_connection_is_continued_where_it_ended(
    hub: HubServer, tmp_path: Path, ignores_ranges: bool
) -> None:
    hub.cut_after_bytes = LARGE_BYTES * 2 // 3
    hub.ignores_ranges = ignores_ranges
    if ignores_ranges:  # then nothing can be continued, and a cut comes at the same place again and again
        assert "gave up after" in failure(tmp_path)
        hub.cut_after_bytes = None
    fetch(tmp_path)
    assert content_of(tmp_path) == WANTED
    if not ignores_ranges:
        assert hub.sent_bytes == 2 * LARGE_BYTES


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_passing_trouble_is_tried_again(hub: HubServer, tmp_path: Path, status: int) -> None:
    hub.failures.extend([status] * (MAX_TRIES - 1))
    fetch(tmp_path)
    assert content_of(tmp_path) == WANTED


def test_pauses_double_and_a_hub_that_asks_for_longer_ones_gets_them(hub: HubServer, tmp_path: Path) -> None:
    pauses: list[float] = []
    hub.failures.extend([503, 503, 503])
    fetch_model(URI, tmp_path / "a", pause=pauses.append)
    assert all(0.7 * 2**n < pause < 1.3 * 2**n for n, pause in enumerate(pauses))
    hub.failures.extend([429])
    hub.retry_after_seconds = 42
    fetch_model(URI, tmp_path / "b", pause=pauses.append)
    assert len(pauses) == 4
    assert pauses[-1] == 42


def test_lasting_trouble_is_named(hub: HubServer, tmp_path: Path) -> None:
    hub.failures.extend([503] * 100)
    message = failure(tmp_path)
    assert message.startswith(f"{URI}: the list of files: gave up after {MAX_TRIES} tries: 127.0.0.1:")
    assert message.endswith(" answered 503")


def test_a_hub_that_is_away_is_named(tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://user:word@127.0.0.1:9")
    message = failure(tmp_path)
    assert f"gave up after {MAX_TRIES} tries: 127.0.0.1:9: " in message
    assert "refused" in message
    assert "word" not in message


def gate(hub: HubServer) -> None:
    hub.repositories[NAME].is_gated = True


def make_private(hub: HubServer) -> None:
    hub.repositories[NAME].token = "hf_other"


def drop_weights(hub: HubServer) -> None:
    hub.repositories[NAME].commits[COMMIT] = {"config.json": b"{}", "pytorch_model.bin": b"x"}


def nothing(hub: HubServer) -> None:
    pass


@pytest.mark.parametrize(
    ("break_it", "options", "message"),
    [
        pytest.param(
            nothing,
            {"uri": "hf://org/none"},
            r"hf://org/none: not found on .*HF_TOKEN is not set",
            id="no-repository",
        ),
        pytest.param(
            make_private, {}, r"not found on .*, or private \(401; HF_TOKEN is not set\)", id="private"
        ),
        pytest.param(gate, {}, r"no access \(403\): the repository is gated", id="gated"),
        pytest.param(
            nothing, {"revision": "v9"}, "--revision v9: there is no such revision", id="no-revision"
        ),
        pytest.param(drop_weights, {}, "no safetensors files there, only pytorch_model.bin", id="no-weights"),
        pytest.param(lambda hub: hub.failures.append(403), {}, r"no access \(403 from 127", id="forbidden"),
        pytest.param(lambda hub: hub.failures.append(418), {}, "answered 418", id="another-status"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(
    hub: HubServer,
    tmp_path: Path,
    break_it: Callable[[HubServer], object],
    options: dict[str, str],
    message: str,
) -> None:
    break_it(hub)
    pattern = pytest.RaisesExc(FetchError, match=message)
    assert pattern.matches(FetchError(failure(tmp_path / "model", **options)))
    assert content_of(tmp_path) == {}


def test_a_server_that_is_no_hub_is_named(hub: HubServer, tmp_path: Path) -> None:
    hub.failures.append(200)  # the answer is no description of a model
    assert "does not answer as a hub does; is HF_ENDPOINT right?" in failure(tmp_path)


def test_offline_mode_is_named(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert failure(tmp_path) == f"{URI}: HF_HUB_OFFLINE is set"


def test_another_digest_is_refused_before_the_weights_are_fetched(hub: HubServer, tmp_path: Path) -> None:
    right = fetch(tmp_path / "right")
    hub.requests.clear()
    wrong = f"sha256:{'0' * 64}"
    message = failure(tmp_path / "model", digest=wrong)
    assert message == f"{URI}: --digest: {wrong} is expected, the files give {right.model}"
    assert hub.large_file_requests == []
    assert content_of(tmp_path / "model") == {}
    assert fetch(tmp_path / "model", digest=right.model).model == right.model


def test_damaged_weights_are_refused(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damage(self: HubServer, sha256: str) -> bytes:
        return bytes(LARGE_BYTES)

    monkeypatch.setattr(HubServer, "blob", damage)
    message = failure(tmp_path)
    assert "has come, sha256:" in message
    assert message.endswith(" was promised")
    assert "file was damaged and is fetched anew" in caplog.messages
    assert content_of(tmp_path) == {}


def test_a_part_of_other_content_is_thrown_away(hub: HubServer, tmp_path: Path) -> None:
    hub.cut_after_bytes = 1_000_000
    hub.ignores_ranges = True
    failure(tmp_path)
    parts = {path.name for path in (tmp_path / STAGING_NAME).iterdir()}
    hub.cut_after_bytes, hub.ignores_ranges = None, False
    other = make_files(seed=7)
    hub.repositories[NAME].commits[COMMIT] = other
    fetch(tmp_path)
    assert parts
    assert content_of(tmp_path) == wanted_files(other)


def test_a_damaged_part_is_found_and_fetched_anew(hub: HubServer, tmp_path: Path) -> None:
    hub.cut_after_bytes = 1_000_000
    hub.ignores_ranges = True
    failure(tmp_path)
    hub.cut_after_bytes, hub.ignores_ranges = None, False
    for part in (tmp_path / STAGING_NAME).iterdir():
        if part.stat().st_size >= 1_000_000:
            part.write_bytes(bytes(1_000_000))
    fetch(tmp_path)
    assert content_of(tmp_path) == WANTED


def test_what_an_interrupted_install_has_moved_is_not_fetched_again(hub: HubServer, tmp_path: Path) -> None:
    fetch(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    (tmp_path / "half" / FIRST_SHARD).unlink()
    hub.requests.clear()
    assert fetch(tmp_path / "half").model == fetch(tmp_path / "whole").model
    assert content_of(tmp_path / "half") == WANTED
    assert len(hub.large_file_requests) == 1


def test_a_truncated_model_is_made_whole(hub: HubServer, tmp_path: Path) -> None:
    fetch(tmp_path)
    with (tmp_path / FIRST_SHARD).open("r+b") as shard:
        shard.truncate(LARGE_BYTES - 7)
    fetch(tmp_path)
    assert content_of(tmp_path) == WANTED


@pytest.mark.parametrize("seed", range(5))
def test_half_a_model_is_never_taken_for_a_whole_one(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The process dies between any two renames."""
    moves, replace = 0, Path.replace

    def replace_and_die(self: Path, target: Path) -> Path:
        nonlocal moves
        if STAGING_NAME in self.parts:
            moves += 1
            if moves > seed:
                raise SystemExit("killed")
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace_and_die)
        with pytest.raises(SystemExit):
            fetch(tmp_path)
    with pytest.raises(Exception, match=f"missing; {MANIFEST_NAME} lists it"):
        compute_model_digest(tmp_path)
    fetch(tmp_path)
    assert content_of(tmp_path) == WANTED


def test_a_directory_with_other_files_is_not_touched(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("three years of work")
    assert "holds files that no fetch put there; choose an empty directory" in failure(tmp_path)
    (tmp_path / "thesis.txt").unlink()
    fetch(tmp_path)
    hub.add("org/other", make_files(seed=3))
    assert f"holds {URI}; choose another directory" in failure(tmp_path, uri="hf://org/other")
    assert content_of(tmp_path) == WANTED


def test_a_full_disk_is_named_before_anything_is_fetched(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "disk full: 5.79 MiB are needed, 1000 B are free" in failure(tmp_path)
    assert hub.large_file_requests == []


def test_a_directory_that_cannot_be_made_is_named(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert failure(tmp_path / "file" / "model") == f"{URI}: {tmp_path / 'file' / 'model'}: Not a directory"


def test_progress_is_logged_every_few_seconds(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(download, "LOG_SECONDS", 0.1)
    hub.bytes_per_second = 6_000_000
    fetch(tmp_path)
    lines = [
        vars(r)["draftline_fields"]
        for r in caplog.records
        if r.getMessage() == "part of the model was fetched"
    ]
    shares = [line["percent"] for line in lines]
    assert len(shares) > 4
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert {line["total_bytes"] for line in lines} == {sum(map(len, WANTED.values()))}
    assert any(line["bytes_per_second"] > 1_000_000 for line in lines)


def test_a_manifest_in_the_repository_is_the_list(hub: HubServer, tmp_path: Path) -> None:
    first = fetch(tmp_path / "first")
    document = json.loads((tmp_path / "first" / MANIFEST_NAME).read_text())
    hub.add("org/copy", {**FILES, MANIFEST_NAME: json.dumps(document).encode()})
    assert fetch(tmp_path / "copy", uri="hf://org/copy").model == first.model
    document["files"][0]["sha256"] = "0" * 64
    hub.add("org/forged", {**FILES, MANIFEST_NAME: json.dumps(document).encode()})
    assert f"{MANIFEST_NAME}: its digest does not follow" in failure(
        tmp_path / "forged", uri="hf://org/forged"
    )
