"""`draftline-server fetch` as it is run: killed in the middle, several at once, its output and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftline_server.core.digest import MANIFEST_NAME, compute_model_digest, hash_model
from draftline_server.fetch.installation import STAGING_NAME
from support.hub_server import SIGNATURE, HubServer
from support.model_files import make_files, read_files, wanted_files
from support.waiting import wait_until

URI = "hf://org/model"
TOKEN = "hf_secret0123456789"
LARGE_BYTES = 4_000_000
FILES = make_files(large_bytes=LARGE_BYTES)
WANTED = wanted_files(FILES)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add("org/model", FILES, token=TOKEN)
        yield server


@pytest.fixture
def start(hub: HubServer, tmp_path: Path) -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def start_fetch(*arguments: str, uri: str = URI, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "draftline_server", "fetch", uri, "--out", str(tmp_path / "model")]
        variables = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": TOKEN,
            "HF_HOME": str(tmp_path / "hub"),
        }
        running.append(
            subprocess.Popen(
                [*command, *arguments],
                env=os.environ | variables | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return running[-1]

    yield start_fetch
    for process in running:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; no credentials in either."""
    stdout, stderr = process.communicate(timeout=60)
    for secret in (TOKEN, SIGNATURE):
        assert secret not in stdout + stderr
    return process.returncode, stdout, stderr


def log_of(stderr: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stderr.splitlines()]


def content_of(directory: Path) -> dict[str, bytes]:
    return {path: content for path, content in read_files(directory).items() if path != MANIFEST_NAME}


def test_the_digest_is_printed_and_the_log_is_structured(start: Start, tmp_path: Path) -> None:
    code, stdout, stderr = finish(start())
    assert code == 0
    assert stdout == f"{hash_model(tmp_path / 'model').model}\n"
    lines = log_of(stderr)
    assert lines[0]["message"] == "fetch began"
    assert lines[-1]["message"] == "model was fetched"
    assert lines[-1]["revision"] == "1" * 40
    assert lines[-1]["total_bytes"] == sum(map(len, WANTED.values()))


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_what_had_come_before_a_kill_is_not_fetched_again(
    hub: HubServer, start: Start, tmp_path: Path, how: signal.Signals
) -> None:
    hub.bytes_per_second = 2_000_000
    process = start()
    wait_until(lambda: hub.sent_bytes >= LARGE_BYTES, interval=0.01)
    process.send_signal(how)
    assert finish(process)[0] == {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143}[how]
    assert content_of(tmp_path / "model") == {}
    kept = sum(part.stat().st_size for part in (tmp_path / "model" / STAGING_NAME).iterdir())
    hub.bytes_per_second = None
    hub.requests.clear()
    assert finish(start())[0] == 0
    assert content_of(tmp_path / "model") == WANTED
    assert kept > LARGE_BYTES / 2
    asked_for = sum(LARGE_BYTES - request.start for request in hub.large_file_requests)
    assert asked_for == sum(map(len, WANTED.values())) - kept


def test_several_at_once_fetch_once(hub: HubServer, start: Start, tmp_path: Path) -> None:
    hub.bytes_per_second = 4_000_000
    results = [finish(process) for process in [start() for _ in range(3)]]
    assert [code for code, _, _ in results] == [0, 0, 0]
    assert {stdout for _, stdout, _ in results} == {f"{compute_model_digest(tmp_path / 'model').model}\n"}
    assert content_of(tmp_path / "model") == WANTED
    assert hub.sent_bytes == 2 * LARGE_BYTES
    last_lines = sorted(log_of(stderr)[-1]["message"] for _, _, stderr in results)
    assert last_lines == ["model was fetched", *["model was there already"] * 2]


@pytest.mark.slow
def test_without_locks_several_at_once_still_do_no_harm(hub: HubServer, start: Start, tmp_path: Path) -> None:
    """On a file system that grants every lock; whoever comes too late fails, and the next try finds it."""
    script = tmp_path / "sitecustomize.py"
    script.write_text("import fcntl\nfcntl.flock = lambda *_: None\n")
    hub.bytes_per_second = 4_000_000
    results = [finish(process) for process in [start(PYTHONPATH=str(tmp_path)) for _ in range(3)]]
    assert 0 in [code for code, _, _ in results]
    assert finish(start())[0] == 0
    assert content_of(tmp_path / "model") == WANTED
    assert hash_model(tmp_path / "model").model == compute_model_digest(tmp_path / "model").model


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ((), {"HF_TOKEN": "hf_wrong0123456789"}, f"{URI}: not found on "),
        (("--revision", "v2"), {}, f"{URI}: --revision v2: there is no such revision"),
        (("--digest", "sha256:1"), {}, "--digest: must be sha256: and 64 hexadecimal digits"),
        (("--digest", f"sha256:{'0' * 64}"), {}, f"{URI}: --digest: sha256:{'0' * 64} is expected, "),
    ],
)
def test_a_fault_is_one_line_and_exit_code_2(
    start: Start, arguments: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    code, stdout, stderr = finish(start(*arguments, **environment))
    *log, last = stderr.splitlines()
    assert (code, stdout) == (2, "")
    assert last.startswith(f"error: {message}")
    assert all(line.startswith("{") for line in log)
    assert "hf_wrong" not in stderr


def test_credentials_in_a_uri_are_refused_unread(start: Start) -> None:
    code, _, stderr = finish(start(uri=f"hf://user:{TOKEN}@org/model"))
    assert code == 2
    assert stderr.startswith("error: URI: hf://... with an @")


@pytest.mark.slow
def test_debugging_of_the_libraries_shows_no_credentials(start: Start) -> None:
    assert finish(start(HF_DEBUG="1", HF_HUB_VERBOSITY="debug"))[0] == 0
