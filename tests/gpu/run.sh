#!/usr/bin/env bash
# All checks that need a GPU, in at most 8 minutes: exactness first, then the table of times.
# Installs nothing: the interpreter (PYTHON, default python3) must have torch, transformers and pytest.
# The table goes to $OUT (default: here). A dry run without a GPU:
#     tests/gpu/run.sh --device cpu --size tiny
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
out=$(cd "${OUT:-.}" && pwd)
export PYTHONPATH="$root/server:$root/protos:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1

device=cuda
previous=
for argument in "$@"; do
    [[ $previous == --device ]] && device=$argument
    previous=$argument
done

cd "$root"
status=0
if "$python" -c 'import pytest' 2>/dev/null; then
    DRAFTLINE_TEST_DEVICE=$device timeout 150 "$python" -m pytest tests/gpu -m gpu -q -p no:cacheprovider || status=$?
else
    echo "pytest is not installed: exactness was not checked" >&2
    status=1
fi
# The table is wanted even where a test failed.
timeout 320 "$python" tests/gpu/measure.py --seconds 280 --out "$out/gpu.md" "$@" || status=$?
exit "$status"
