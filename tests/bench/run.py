"""The benchmark: everything that we compare, in one run on one machine, as one markdown document.

``make bench`` runs it; ``PEERS=1 make bench`` adds vLLM and llama.cpp. Each number is a median over
interleaved rounds, each ratio the median of the rounds' ratios where nothing else is said. Prompts and new
tokens are the same for all, greedy, end-of-sequence ignored, prefix caches off; a time includes prefill.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `serve` does; read once, when torch is loaded

import torch

# This folder's modules are no package: the bench is a script, and its peers have other interpreters.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import report
from arms import Arm, Dtype
from draftline_server.allocator import keep_freed_memory
from engine_arms import CONTEXT_LENGTH, NUM_LOOKUP_TOKENS, LoadedPair, load_pair, make_arms
from head_bench import MAX_ROUNDS, measure_head
from machine import Machine, measure_machine
from measure import measure
from models import Pair, cache_dir, model_bytes, smollm2_head, smollm2_pair, tiny_head, tiny_pair
from peer_arms import PeerArm, PeerSettings, start_peers, start_transformers
from rpc_arms import AloneArm, RpcArm, RpcSettings
from sweep import RATES, sweep
from workload import NEW_TOKENS, SINGLE_PROMPTS, STREAMS, WorkloadSet, make_workloads

DTYPE = "bfloat16"
SECTIONS = ("speed", "head", "sweep", "rpc")


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int = 5
    streams: tuple[int, ...] = STREAMS
    new_tokens: int = NEW_TOKENS
    rates: tuple[float, ...] = RATES
    single_prompts: int = SINGLE_PROMPTS


QUICK = Effort(rounds=1, streams=(1, 2), new_tokens=8, rates=(0.0, 1.0), single_prompts=2)


@dataclass(frozen=True)
class Bench:
    """What all sections share."""

    machine: Machine
    pair: Pair
    head: Pair
    loaded: LoadedPair
    workloads: WorkloadSet
    effort: Effort


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test: tiny random models, few tokens")
    parser.add_argument(
        "--peers", action="store_true", default=os.environ.get("PEERS") == "1", help="add vLLM and llama.cpp"
    )
    parser.add_argument("--rounds", type=int, help="counted rounds (default: 5)")
    parser.add_argument("--streams", type=int, nargs="+", help="numbers of streams (default: 1 8 32)")
    parser.add_argument("--new-tokens", type=int, help="tokens for each prompt (default: 64)")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="leave out the other sections")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="torch threads (default: cores)"
    )
    parser.add_argument("--out", type=Path, help="the markdown file (default: bench/result.md in the cache)")
    return parser.parse_args()


def prepare(arguments: argparse.Namespace) -> Bench:
    effort = QUICK if arguments.quick else Effort()
    effort = replace(
        effort,
        rounds=arguments.rounds or effort.rounds,
        streams=tuple(arguments.streams or effort.streams),
        new_tokens=arguments.new_tokens or effort.new_tokens,
    )
    keep_freed_memory()  # as `serve` does
    torch.set_num_threads(arguments.threads)
    pair = tiny_pair() if arguments.quick else smollm2_pair()
    head = tiny_head() if arguments.quick else smollm2_head()
    return Bench(
        machine=measure_machine(),
        pair=pair,
        head=head,
        loaded=load_pair(pair, dtype=getattr(torch, DTYPE)),
        workloads=make_workloads(pair.target, streams=effort.streams, new_tokens=effort.new_tokens),
        effort=effort,
    )


def run_speed(bench: Bench, peers: Sequence[PeerArm]) -> str:
    arms: list[Arm] = [*make_arms(bench.loaded), *peers]
    workloads = bench.workloads.all
    table = measure(arms, workloads, rounds=bench.effort.rounds)
    names = [arm.name for arm in arms]
    for arm in arms:
        arm.close()
    sizes = [
        (dtype.name, model_bytes(bench.pair.target, bytes_per_value=getattr(torch, dtype.name).itemsize))
        for dtype in _dtypes(bench.machine)
    ]
    parts = [
        "## Speed",
        report.speed_table(names, workloads, table),
        *(f"{peer.name}: {peer.description}." for peer in peers),
        report.floor_table(workloads, table, machine=bench.machine, sizes=sizes),
        report.aims(names, workloads, table),
    ]
    return "\n\n".join(parts)


def _dtypes(machine: Machine) -> list[Dtype]:
    """The model's own; where the processor lacks it, also the one that we compute in then."""
    if machine.has_native_bfloat16:
        return [Dtype(DTYPE)]
    return [Dtype(DTYPE, is_native=False), Dtype("float32")]


def run_head(bench: Bench) -> str:
    gains = measure_head(
        bench.head,
        getattr(torch, DTYPE),
        bench.workloads.single[: bench.effort.single_prompts],
        rounds=bench.effort.rounds,
    )
    return (
        f"## The draft head, one stream\n\n{report.head_table(gains)}\n\n"
        f"{bench.effort.single_prompts} prompts, medians of {min(bench.effort.rounds, MAX_ROUNDS)} rounds; "
        "speed-ups are of all prompts together."
    )


def run_sweep(bench: Bench) -> str:
    points = sweep(bench.loaded, bench.workloads.chat, rates=bench.effort.rates, rounds=bench.effort.rounds)
    return f"## Synthetic acceptance\n\n{report.sweep_table(points)}"


def run_rpc(bench: Bench) -> str:
    workload = bench.workloads.chat[-1]
    settings = RpcSettings(
        bench.pair,
        dtype=DTYPE,
        max_streams=workload.num_streams,
        context_length=CONTEXT_LENGTH,
        threads=torch.get_num_threads(),
    )
    log = cache_dir() / "bench" / "rpc-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    alone, rpc = AloneArm(settings), RpcArm(settings, log)
    try:
        table = measure([alone, rpc], [workload], rounds=bench.effort.rounds)
    finally:
        alone.close()
        rpc.close()
    lines = report.rpc_lines(table[alone.name, workload.name], table[rpc.name, workload.name], workload)
    return f"## gRPC\n\n{lines}"


def main() -> None:
    arguments = parse_arguments()
    started = time.monotonic()
    sections = arguments.only or SECTIONS
    bench = prepare(arguments)
    parts = [
        f"# Benchmark\n\n{report.describe_machine(bench.machine)}.",
        f"Model: {bench.pair.target.name}, {DTYPE}.",
    ]
    if "speed" in sections:
        parts.append(run_speed(bench, _start_peers(bench, all_of_them=arguments.peers)))
    if "head" in sections:
        parts.append(run_head(bench))
    if "sweep" in sections:
        parts.append(run_sweep(bench))
    if "rpc" in sections:
        parts.append(run_rpc(bench))
    minutes = (time.monotonic() - started) / 60
    parts.append(f"Medians of {bench.effort.rounds} interleaved rounds; {minutes:.1f} minutes.")
    document = "\n\n".join(parts) + "\n"
    out: Path = arguments.out or cache_dir() / "bench" / "result.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(document)
    print(document)


def _start_peers(bench: Bench, *, all_of_them: bool) -> list[PeerArm]:
    settings = PeerSettings(
        model=bench.pair.target,
        dtypes=_dtypes(bench.machine),
        max_streams=max(bench.effort.streams),
        num_speculative_tokens=NUM_LOOKUP_TOKENS,
        threads=torch.get_num_threads(),
        logs=cache_dir() / "bench",
    )
    return start_transformers(settings) + (start_peers(settings) if all_of_them else [])


if __name__ == "__main__":
    main()
