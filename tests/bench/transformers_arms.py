"""`transformers` as it comes: static batches, left-padded, and prompt lookup for one prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from arms import Dtype, Run
from workload import Workload

PAD_TOKEN_ID = 0


def load(model: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()


def make_arms(
    model: Path, *, dtypes: Sequence[Dtype], max_streams: int, lookup_tokens: int
) -> list[TransformersArm]:
    """`generate` in each dtype, and prompt lookup in the last."""
    arms = []
    for dtype in dtypes:
        loaded = load(model, getattr(torch, dtype.name))
        streams = dtype.limit_streams(max_streams)
        arms.append(TransformersArm(f"generate, {dtype.name}", loaded, max_streams=streams))
    name = f"prompt lookup, {dtypes[-1].name}"
    return [*arms, TransformersArm(name, loaded, max_streams=1, lookup_tokens=lookup_tokens)]


class TransformersArm:
    """`generate` on the whole batch. With `lookup_tokens` its prompt lookup, which takes one prompt."""

    def __init__(self, name: str, model: Any, *, max_streams: int, lookup_tokens: int | None = None) -> None:
        self.name = f"transformers {name}"
        self._max_streams = max_streams
        self._model = model
        self._lookup_tokens = lookup_tokens

    def supports(self, workload: Workload) -> bool:
        return workload.num_streams <= self._max_streams

    @torch.inference_mode()
    def run(self, workload: Workload) -> Run:
        longest = max(map(len, workload.prompts))
        padded = [[PAD_TOKEN_ID] * (longest - len(ids)) + list(ids) for ids in workload.prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in workload.prompts]
        options = {"prompt_lookup_num_tokens": self._lookup_tokens} if self._lookup_tokens else {}
        started = time.perf_counter()
        output = self._model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=workload.new_tokens,
            do_sample=False,
            pad_token_id=PAD_TOKEN_ID,
            eos_token_id=[],  # never ends early, as ignore_eos elsewhere
            **options,
        )
        seconds = time.perf_counter() - started
        return Run(seconds, tuple(tuple(row) for row in output[:, longest:].tolist()))

    def close(self) -> None:
        self._model = None
