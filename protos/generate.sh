#!/usr/bin/env bash
# Generates the Python stubs of every .proto file, with types, beside the files or below the given folder.
#
#   protos/generate.sh            rewrites the committed stubs
#   protos/generate.sh DIRECTORY  writes them there instead (the drift test compares them)
#
# Needs the `dev` extra (grpcio-tools, mypy-protobuf); PYTHON picks the interpreter that has it.
set -euo pipefail

source_root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
output="${1:-$source_root}"
python="${PYTHON:-python3}"
plugins="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')"

cd "$source_root"
find draftline -name '*.proto' -print0 | sort -z | xargs -0 "$python" -m grpc_tools.protoc \
    --proto_path=. \
    --plugin=protoc-gen-mypy_grpc="$plugins/protoc-gen-mypy_grpc" \
    --python_out="$output" \
    --pyi_out="$output" \
    --grpc_python_out="$output" \
    --mypy_grpc_out=quiet:"$output"
