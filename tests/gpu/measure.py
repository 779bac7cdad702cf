"""How long steps take on a GPU, and what speculation makes of them: one markdown table.

A Llama-shaped target with random weights, because only sizes matter for time. Two drafts: a clone of the
target with noise on its weights, whose acceptance is real, and a small model, whose acceptance is set.
``--device cpu --size tiny`` is a dry run.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from draftline_server.config import Method
from draftline_server.model import attention
from draftline_server.model.kv_cache import KVCache
from draftline_server.model.runner import ModelRunner, SequenceInput
from engine_arms import BLOCK_SIZE, EngineArm, LoadedPair, make_engine
from measure import Table, measure
from report import markdown_table
from synthetic import SyntheticVerify
from workload import Workload

VOCABULARY = 32_768
SMALL_DRAFT_ACCEPTANCE = 0.8
CLONE_NOISE = 0.03
SEED = 7


@dataclass(frozen=True)
class Size:
    """A target and what is measured of it."""

    target: LlamaConfig
    small: LlamaConfig
    context: int = 512
    batches: tuple[int, ...] = (1, 8, 32, 64)
    draft_lengths: tuple[int, ...] = (0, 1, 2, 4, 8)
    streams: tuple[int, ...] = (1, 8, 32)
    new_tokens: int = 64
    rounds: int = 3


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )


_SMALL = _llama(1024, 8, 16, 4, 2816)
SIZES = {
    "tiny": Size(
        _llama(64, 2, 4, 2, 128),
        _llama(32, 1, 2, 1, 64),
        context=32,
        batches=(1, 2),
        draft_lengths=(0, 2),
        streams=(1, 2),
        new_tokens=8,
        rounds=1,
    ),
    "1b": Size(_llama(2048, 16, 32, 8, 8192), _SMALL),
    "8b": Size(_llama(4096, 32, 32, 8, 14336), _SMALL),
}


class Bench:
    """The models on one device, and its clock."""

    def __init__(self, size: Size, device: torch.device, deadline: float) -> None:
        self.size, self.device, self._deadline = size, device, deadline
        torch.manual_seed(SEED)
        attention.register()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.target = self._random_model(size.target)
        self.small = self._random_model(size.small)
        self.clone = self._noised(self.target)

    def has_time(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self._deadline

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def median_seconds(self, action: Callable[[], object], *, repeats: int = 10) -> float:
        """Of an action, after two that do not count."""
        times = []
        for _ in range(2 + repeats):
            self.synchronize()
            started = time.perf_counter()
            action()
            self.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[2:])

    def bytes_per_second(self) -> float:
        """Reads of a buffer much larger than any cache."""
        num_values = (2**32 if self.device.type == "cuda" else 2**26) // 4
        buffer = torch.ones(num_values, dtype=torch.float32, device=self.device)
        return 4 * num_values / self.median_seconds(buffer.sum)

    def _random_model(self, config: LlamaConfig) -> PreTrainedModel:
        with _default(self.dtype), self.device:
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=self.dtype, attn_implementation=attention.IMPLEMENTATION
            )
        # Logits as sure of themselves as a trained model's, else the least noise changes every token.
        torch.nn.init.normal_(model.lm_head.weight, std=3.0 / config.hidden_size**0.5)
        model = model.to(self.device).eval().requires_grad_(False)
        return cast(PreTrainedModel, model)

    @torch.no_grad()
    def _noised(self, source: PreTrainedModel) -> PreTrainedModel:
        clone = copy.deepcopy(source)
        for parameter in clone.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn_like(parameter) * (CLONE_NOISE * parameter.std()))
        return clone


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def num_bytes(model: PreTrainedModel) -> int:
    """What a step reads: all weights but the embedding, of which it reads a few rows."""
    embedding = cast(nn.Embedding, model.get_input_embeddings()).weight
    values = sum(p.numel() for p in model.parameters()) - embedding.numel()
    return values * embedding.element_size()


def kv_bytes_per_token(config: LlamaConfig, dtype: torch.dtype) -> int:
    head_dim = config.hidden_size // config.num_attention_heads
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    return 2 * config.num_hidden_layers * num_kv_heads * head_dim * dtype.itemsize


def step_table(bench: Bench, model: PreTrainedModel, draft_lengths: Sequence[int], bandwidth: float) -> str:
    """Milliseconds of one forward of `batch` sequences that verify a draft, and the share of the limit."""
    config, context = cast(LlamaConfig, model.config), bench.size.context
    longest = context + max(draft_lengths) + 1
    blocks_each = -(-longest // BLOCK_SIZE)
    cache = KVCache(
        num_layers=config.num_hidden_layers,
        num_blocks=1 + max(bench.size.batches) * blocks_each,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        dtype=bench.dtype,
        device=bench.device,
    )
    runner = ModelRunner(model, cache, vocab_size=config.vocab_size)
    rows = []
    for batch in bench.size.batches:
        row = [str(batch)]
        for length in draft_lengths:
            inputs = [
                SequenceInput(
                    token_ids=list(range(1, length + 2)),
                    start=context,
                    block_table=range(1 + index * blocks_each, 1 + (index + 1) * blocks_each),
                    num_logits=length + 1,
                )
                for index in range(batch)
            ]
            seconds = bench.median_seconds(partial(runner.forward, inputs))
            needed = num_bytes(model) + batch * context * kv_bytes_per_token(config, bench.dtype)
            row.append(f"{1e3 * seconds:.2f} ({needed / bandwidth / seconds:.0%})")
        rows.append(row)
    return markdown_table(["batch", *(f"draft of {length}" for length in draft_lengths)], rows)


def _decode_nothing(token_ids: object) -> str:
    return ""


def speed_table(bench: Bench) -> str:
    """Speculation on against off, interleaved."""
    size = bench.size
    verify = SyntheticVerify()
    verify.rate = SMALL_DRAFT_ACCEPTANCE
    with_clone = LoadedPair(bench.target, bench.clone, _decode_nothing, _decode_nothing)
    with_small = LoadedPair(bench.target, bench.small, _decode_nothing, _decode_nothing)
    draft: tuple[Method, ...] = ("draft_model",)
    streams = max(size.streams)
    arms = [
        EngineArm("off", make_engine(with_small, (), max_streams=streams)),
        EngineArm("n-gram", make_engine(with_small, ("ngram",), max_streams=streams)),
        EngineArm("noised clone", make_engine(with_clone, draft, max_streams=streams)),
        EngineArm(
            f"small draft, acceptance set to {SMALL_DRAFT_ACCEPTANCE}",
            make_engine(with_small, draft, max_streams=streams, verify=verify),
        ),
        EngineArm(
            "the same, adaptive",
            make_engine(with_small, draft, adaptive=True, max_streams=streams, verify=verify),
        ),
    ]
    workloads = _random_workloads(size)
    table: Table = {}
    for workload in workloads:
        if bench.has_time(90 if bench.device.type == "cuda" else 0):
            table |= measure(arms, [workload], rounds=size.rounds)
    rows = [[arm.name, *(_cell(table, arm.name, workload.name) for workload in workloads)] for arm in arms]
    return markdown_table(["tokens/s (ratio to off; accepted)", *(w.name for w in workloads)], rows)


def _random_workloads(size: Size) -> list[Workload]:
    generator = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(
        0, VOCABULARY, (max(size.streams), size.context // 4), generator=generator
    ).tolist()
    return [
        Workload(f"{count} streams", tuple(map(tuple, prompts[:count])), size.new_tokens)
        for count in size.streams
    ]


def _cell(table: Table, arm: str, workload: str) -> str:
    if (arm, workload) not in table:
        return "(no time left)"
    cell = table[arm, workload]
    accepted = f"; {cell.acceptance:.0%}" if cell.acceptance is not None else ""
    return f"{cell.tokens_per_second:.1f} ({cell.ratio_to(table['off', workload]):.2f}x{accepted})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--seconds", type=float, default=300.0, help="no new measurement begins near this")
    parser.add_argument("--out", type=Path, default=Path("gpu.md"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    bench = Bench(SIZES[arguments.size], device, time.monotonic() + arguments.seconds)
    bandwidth = bench.bytes_per_second()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (a dry run)"
    size = bench.size
    billions = sum(p.numel() for p in bench.target.parameters()) / 1e9
    parts = [
        f"# {name}",
        f"Random Llama-shaped target of {billions:.2f} billion parameters, {bench.dtype}, "
        f"context {size.context}, torch {torch.__version__}; reads {bandwidth / 1e9:.0f} GB/s.",
        "## Target step in ms (share of the bandwidth limit)",
        step_table(bench, bench.target, size.draft_lengths, bandwidth),
        "## Small draft's step in ms (share of the bandwidth limit)",
        step_table(bench, bench.small, (0,), bandwidth),
    ]
    _write(arguments.out, parts)  # what there is, should the rest run out of time
    parts += ["## Speculation on against off", speed_table(bench)]
    _write(arguments.out, parts)
    print(arguments.out.read_text())


def _write(path: Path, parts: Sequence[str]) -> None:
    path.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
