#!/usr/bin/env bash
# All checks that need a GPU, in at most 8 minutes: exactness first, then the table of times.
# Installs nothing: the interpreter (PYTHON, default python3) must have torch, transformers, pydantic, PyYAML and
# pytest. What it lacks comes from the wheels in $WHEELS, a folder, where that is set:
#     pip download --no-deps --python-version 3.12 --only-binary :all: --dest wheels pydantic pydantic-core ...
# The table goes to $OUT (default: here). A dry run without a GPU:
#     tests/gpu/run.sh --device cpu --size tiny
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
out=$(cd "${OUT:-.}" && pwd)
export PYTHONPATH="$root/server:$root/protos:$root/tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1

if [[ -n ${WHEELS:-} ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$PYTHONPATH:$site"
fi

device=cuda
previous=
for argument in "$@"; do
    [[ $previous == --device ]] && device=$argument
    previous=$argument
done

cd "$root"
status=0
if "$python" -c 'import pytest' 2>/dev/null; then
    # Without the project's settings, which name plugins that these tests do without.
    DRAFTLINE_TEST_DEVICE=$device timeout 150 "$python" -m pytest -c /dev/null --rootdir . --import-mode importlib \
        -m gpu -q -p no:cacheprovider tests/gpu || status=$?
else
    echo "pytest is not installed: exactness was not checked" >&2
    status=1
fi
# The table is wanted even where a test failed.
timeout 320 "$python" tests/gpu/measure.py --seconds 280 --out "$out/gpu.md" "$@" || status=$?
exit "$status"
