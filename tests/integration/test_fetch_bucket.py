"""Fetching from a bucket: moto's S3 server, and a store that refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from draftline_server.core.digest import MANIFEST_NAME, compute_model_digest, write_manifest
from draftline_server.errors import FetchError
from draftline_server.fetch import download
from draftline_server.fetch.bucket_source import BucketSource
from draftline_server.fetch.fetching import fetch_model
from draftline_server.fetch.source import RemoteFile
from support.model_files import make_files, read_files, wanted_files, write_files

FILES = make_files(large_bytes=400_000)
SECRET = "wJalrXUtnFEMI0123456789"
KEY_ID = "AKIA0123456789ABCDEF"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", store)
    bucket = boto3.resource("s3").create_bucket(Bucket="models")
    upload(bucket, "org/model", FILES)
    upload(bucket, "org/model-2", {"config.json": b"another one's"})
    yield bucket
    bucket.objects.delete()
    bucket.delete()


def upload(bucket: Any, prefix: str, files: dict[str, bytes]) -> None:
    for path, content in files.items():
        bucket.put_object(Key=f"{prefix}/{path}", Body=content)


def failure(uri: str, directory: Path, **options: Any) -> str:
    with pytest.raises(FetchError) as caught:
        fetch_model(uri, directory, pause=lambda _: None, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert SECRET not in message
    assert KEY_ID not in message
    return message


def content_of(directory: Path) -> dict[str, bytes]:
    return {path: content for path, content in read_files(directory).items() if path != MANIFEST_NAME}


def test_the_objects_below_a_prefix_arrive(bucket: Any, tmp_path: Path) -> None:
    bucket.put_object(Key="org/model/")  # what consoles make of folders
    fetched = fetch_model("s3://models/org/model/", tmp_path, revision="v1")
    assert content_of(tmp_path) == wanted_files(FILES)
    assert compute_model_digest(tmp_path).model == fetched.model
    bucket.objects.delete()
    assert fetch_model("s3://models/org/model", tmp_path, revision="v1").model == fetched.model


def test_objects_are_read_in_pieces(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_PIECE_BYTES", 33_333)
    fetch_model("s3://models/org/model", tmp_path)
    assert content_of(tmp_path) == wanted_files(FILES)


def test_a_model_is_the_same_from_a_bucket_and_a_folder(bucket: Any, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "folder", FILES)
    from_folder = fetch_model(str(folder), tmp_path / "a")
    assert (
        fetch_model("s3://models/org/model", tmp_path / "b", digest=from_folder.model).model
        == from_folder.model
    )


def test_a_manifest_among_the_objects_is_checked(bucket: Any, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "folder", wanted_files(FILES))
    digest = write_manifest(folder)
    upload(bucket, "fetched", read_files(folder))
    assert fetch_model("s3://models/fetched", tmp_path / "a").model == digest.model
    bucket.put_object(Key="fetched/model-00001-of-00002.safetensors", Body=bytes(400_000))
    assert "model-00001-of-00002.safetensors: sha256:" in failure("s3://models/fetched", tmp_path / "b")


def test_an_object_that_changes_meanwhile_is_named(bucket: Any) -> None:
    source = BucketSource("models", "org/model")
    [config] = [file for file in source.list().files if file.path == "config.json"]
    bucket.put_object(Key="org/model/config.json", Body=b"{}")
    with pytest.raises(FetchError, match="an object has changed while it was being fetched"):
        list(source.read(config, 0, config.size))
    bucket.Object("org/model/config.json").delete()
    with pytest.raises(FetchError, match="an object has gone while"):
        list(source.read(RemoteFile(path="config.json", size=2, identity='"x"'), 0, 2))


def test_what_is_not_there_is_named(bucket: Any, tmp_path: Path) -> None:
    assert failure("s3://none/org", tmp_path) == "s3://none/org: not found: there is no such bucket"
    message = failure("s3://models/none", tmp_path)
    assert message == "s3://models/none: not found: there are no objects below it"


@pytest.fixture
def refusing_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """Answers every request with the status and code in the list; moto checks no credentials by itself."""
    answers: list[tuple[int, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, code = answers[0]
            key = self.headers.get("Authorization", "")
            body = f"<Error><Code>{code}</Code><Message>{key}</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    yield answers
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", "no access (403 AccessDenied): look at AWS_ACCESS_KEY_ID and its rights"),
        (403, "SignatureDoesNotMatch", "no access (403 SignatureDoesNotMatch)"),
        (400, "ExpiredToken", "no access (400 ExpiredToken)"),
        (401, "Unauthorized", "no access (401 Unauthorized)"),
        (301, "PermanentRedirect", "another region; set AWS_DEFAULT_REGION"),
        (503, "SlowDown", "the list of files: gave up after 6 tries: the store answered 503 SlowDown"),
        (400, "InvalidRequest", "the store answered 400 InvalidRequest"),
    ],
)
def test_a_store_that_refuses_is_named(
    refusing_store: list[tuple[int, str]], tmp_path: Path, status: int, code: str, message: str
) -> None:
    refusing_store.append((status, code))
    assert message in failure("s3://models/org/model", tmp_path)


def test_a_store_that_is_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:word@127.0.0.1:9")
    message = failure("s3://models/org/model", tmp_path)
    assert "gave up after 6 tries" in message
    assert "127.0.0.1:9" in message
    assert "word" not in message


def test_half_of_a_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "no access: Partial credentials found in env" in failure("s3://models/org/model", tmp_path)


def test_a_public_bucket_needs_no_key(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.Acl().put(ACL="public-read")
    for object_summary in bucket.objects.all():
        object_summary.Acl().put(ACL="public-read")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    fetch_model("s3://models/org/model", tmp_path)
    assert content_of(tmp_path) == wanted_files(FILES)
