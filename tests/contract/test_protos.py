"""The committed stubs are what the .proto files generate, and they import with the installed runtime."""

import os
import subprocess
import sys
from pathlib import Path

from draftline.v1 import inference_pb2, inference_pb2_grpc

PROTOS = Path(__file__).resolve().parents[2] / "protos"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def read_stubs(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*_pb2*")
        if path.name.endswith(SUFFIXES)
    }


def test_the_committed_stubs_are_current(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run([PROTOS / "generate.sh", tmp_path], check=True, env=environment)
    assert read_stubs(PROTOS) == read_stubs(tmp_path), "run `make protos`"


def test_every_proto_file_has_all_its_stubs() -> None:
    expected = {
        path.relative_to(PROTOS).as_posix().removesuffix(".proto") + suffix
        for path in PROTOS.rglob("*.proto")
        for suffix in SUFFIXES
    }
    assert set(read_stubs(PROTOS)) == expected
    assert expected


def test_packages_follow_directories() -> None:
    assert inference_pb2.DESCRIPTOR.package == "draftline.v1"
    assert inference_pb2.DESCRIPTOR.name == "draftline/v1/inference.proto"
    assert hasattr(inference_pb2_grpc, "InferenceStub")


def test_every_sampling_field_tells_absent_from_zero() -> None:
    fields = inference_pb2.SamplingParams.DESCRIPTOR.fields
    unclear = [field.name for field in fields if not field.is_repeated and not field.has_presence]
    assert unclear == []


def test_every_enum_starts_with_unspecified() -> None:
    for enum in inference_pb2.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
