"""Our head says what the `speculators` library's own model says of the same inputs, for every flag.

The library is installed beside the test's own environment, without its dependencies: its model is enough.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftline_server.distill import unrolled
from support.draft_heads import FLAGS, ReferenceHead, load_unrolled_head, make_tiny_head
from support.prompts import random_prompt
from support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 3
SCRIPT = Path(__file__).parents[1] / "support" / "run_speculators.py"
# The library itself and what importing it touches; all that it shares with the server is there already.
PACKAGES = (
    "speculators==0.9.0",
    "hs-connectors==0.9.0",
    "loguru==0.7.3",
    "pydantic-settings",
    "openai",
    "datasets",
    "pyarrow",
    "dill",
    "xxhash",
    "multiprocess",
    "pandas",
    "python-dateutil",
    "pytz",
    "tzdata",
    "six",
    "aiohttp",
    "jiter",
    "distro",
    "sniffio",
)
HEADS: list[dict[str, Any]] = [
    {},
    *({flag: True} for flag in FLAGS),
    {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    {"layer_type": "qwen3"},
    {"layers": 2},
    {"layers": 2, "layer_type": "qwen3", "norm_output": True},
    {"draft_vocab_size": 100},
    {"layer_ids": (1, 2)},
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("speculators")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory)]
    done = subprocess.run([*pip, *PACKAGES], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(
            f"speculators cannot be installed, so heads are NOT compared with it: {done.stderr[-300:]}"
        )
    return directory


def test_drafts_are_those_of_the_library(library: Path, tmp_path: Path) -> None:
    target = make_tiny_model(tmp_path / "target")
    tokens = random_prompt(40, seed=3)
    jobs: list[dict[str, Any]] = []
    expected: list[list[list[int]]] = []
    for index, options in enumerate(HEADS):
        head = make_tiny_head(tmp_path / f"head-{index}", target, seed=index, has_embedding=True, **options)
        reference = ReferenceHead(head, target)
        captured = reference.captured(tokens)
        inputs = tmp_path / f"inputs-{index}.safetensors"
        save_file({"token_ids": torch.tensor(tokens), "captured": captured}, inputs)
        jobs.append({"head": str(head), "inputs": str(inputs), "steps": STEPS})
        own = load_unrolled_head(head, target)
        with torch.no_grad():
            steps = unrolled.unroll(own, torch.tensor([tokens]), captured[None], STEPS)
            expected.append([own.logits(vectors)[0].argmax(dim=-1).tolist() for vectors, _ in steps])
    environment = {**os.environ, "PYTHONPATH": str(library), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT)],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for options, theirs, ours in zip(HEADS, json.loads(done.stdout), expected, strict=True):
        for step in range(STEPS):
            # The last rows of a step have no token left to read.
            assert theirs[step][: len(tokens) - 1 - step] == ours[step][: len(tokens) - 1 - step], options
