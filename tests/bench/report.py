"""Turns measurements into one markdown document."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from head_bench import Gain
from machine import Machine
from measure import Cell, Table
from models import ModelBytes
from rpc_arms import RpcRun
from sweep import SweepPoint
from workload import Workload

OFF = "draftline off"
_AIMS = {
    "vLLM, ": " (aim: 0.8 at 8 and 32 streams)",
    "transformers generate": " (aim: 1)",
}


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def describe_machine(machine: Machine) -> str:
    native = "native bfloat16" if machine.has_native_bfloat16 else "no bfloat16 instructions"
    return (
        f"{machine.processor}, {machine.num_cores} cores, {native}, "
        f"reads {machine.bytes_per_second / 1e9:.1f} GB/s; torch {machine.torch_version}"
    )


def speed_table(names: Sequence[str], workloads: Sequence[Workload], table: Table) -> str:
    """Output tokens per second, the ratio to our plain decoding, and acceptance."""
    header = ["tokens/s (ratio to off; accepted of drafted)", *(workload.name for workload in workloads)]
    rows = [[name, *(_speed(table, name, workload) for workload in workloads)] for name in names]
    return markdown_table(header, rows)


def _speed(table: Table, name: str, workload: Workload) -> str:
    cell = table.get((name, workload.name))
    if cell is None:
        return "-"
    notes = []
    if name != OFF:
        notes.append(f"{cell.ratio_to(table[OFF, workload.name]):.2f}x")
    if cell.acceptance is not None:
        notes.append(f"{cell.acceptance:.0%}")
    return f"{cell.tokens_per_second:.1f}" + (f" ({'; '.join(notes)})" if notes else "")


def floor_table(
    workloads: Sequence[Workload], table: Table, *, machine: Machine, sizes: Sequence[tuple[str, ModelBytes]]
) -> str:
    """How far plain decoding is from the time that reading weights and cache takes at least."""
    header = ["plain decoding", *(workload.name for workload in workloads)]
    cells = [table[OFF, workload.name] for workload in workloads]
    steps = [cell.step_seconds for cell in cells]
    rows = [["decode step, ms", *(f"{1e3 * seconds:.1f}" for seconds in steps)]]
    for name, size in sizes:
        floors = [
            machine.floor_seconds(size.per_step(num_sequences=w.num_streams, context=w.mean_context))
            for w in workloads
        ]
        rows.append([f"floor in {name}, ms", *(f"{1e3 * floor:.1f}" for floor in floors)])
        distances = [seconds / floor for seconds, floor in zip(steps, floors, strict=True)]
        rows.append([f"times the floor in {name}", *(f"{distance:.1f}" for distance in distances)])
    return markdown_table(header, rows)


def head_table(gains: Sequence[Gain]) -> str:
    """What each way to draft gains, and how sure that is."""
    rows = [
        [
            gain.name,
            f"{gain.tokens_per_second:.1f}",
            f"{gain.speedup:.2f}x",
            f"{gain.low:.2f} to {gain.high:.2f}",
            "-" if gain.mean_acceptance_length is None else f"{gain.mean_acceptance_length:.2f}",
        ]
        for gain in gains
    ]
    header = [
        "drafts",
        "tokens/s",
        "speed-up (aim: 1.7)",
        "95 % interval over prompts",
        "tokens per draft step",
    ]
    return markdown_table(header, rows)


def sweep_table(points: Sequence[SweepPoint]) -> str:
    """Off, fixed and adaptive at each acceptance, and the worst of adaptive."""
    header = ["acceptance", "streams", "off", "fixed", "fixed / off", "adaptive", "adaptive / off", "spread"]
    rows = [
        [
            f"{point.rate:.2f}",
            str(point.workload.num_streams),
            _rate(point.off),
            _rate(point.fixed),
            f"{point.fixed_ratio:.2f}",
            _rate(point.adaptive),
            f"{point.adaptive_ratio:.2f}",
            f"{point.adaptive_spread:.1%}",
        ]
        for point in points
    ]
    worst = min(points, key=lambda point: point.adaptive_ratio)
    least = (
        f"Least adaptive / off: {worst.adaptive_ratio:.3f}, at acceptance {worst.rate:.2f} "
        f"and {worst.workload.num_streams} streams (aim: 0.98)."
    )
    return f"{markdown_table(header, rows)}\n\n{least}"


def _rate(cell: Cell) -> str:
    return f"{cell.tokens_per_second:.1f}"


def aims(names: Sequence[str], workloads: Sequence[Workload], table: Table) -> str:
    """Each aim of the project with what was measured. Only those whose arms have run."""
    copy = workloads[-1]
    lines = []
    for name in ("draftline n-gram", "draftline adaptive"):
        ratio = table[name, copy.name].ratio_to(table[OFF, copy.name])
        lines.append(f"- {name} / off on {copy.name}: {ratio:.2f} (aim: 2)")
    for other in names:
        if other.startswith("draftline"):
            continue
        aim = next((text for prefix, text in _AIMS.items() if other.startswith(prefix)), "")
        ratios = [
            f"{table[OFF, w.name].ratio_to(table[other, w.name]):.2f}"
            for w in workloads
            if (other, w.name) in table
        ]
        lines.append(f"- plain / {other}: {', '.join(ratios)}{aim}")
    return "\n".join(lines)


def rpc_lines(alone: Cell, rpc: Cell, workload: Workload) -> str:
    """What serving takes from the engine, and apart from it what the clients take, who share its cores."""
    runs = [run for run in rpc.runs if isinstance(run, RpcRun)]
    share = statistics.median(
        run.server_cpu_seconds / reference.seconds for run, reference in zip(runs, alone.runs, strict=True)
    )
    seconds = statistics.median(run.seconds for run in alone.runs)
    server = statistics.median(run.server_cpu_seconds for run in runs)
    clients = statistics.median(run.client_cpu_seconds for run in runs)
    wall = 1.0 / rpc.ratio_to(alone) - 1.0
    return (
        f"{workload.num_streams} streaming clients, each with its own connection: outside of the engine the "
        f"server takes {server:.2f} s of CPU, {share:.1%} of the engine's {seconds:.2f} s alone "
        f"(aim: at most 5 %).\n\n"
        f"With the clients the run takes {wall:+.1%} longer ({rpc.tokens_per_second:.1f} against "
        f"{alone.tokens_per_second:.1f} tokens/s). They are on the engine's own cores here and take "
        f"{clients:.2f} s of CPU, which they would not take from a server elsewhere."
    )
