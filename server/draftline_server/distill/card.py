"""The README of a head: what it is for, how it was made, what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftline_server.distill.evaluation import ARMS, HEAD, LENGTHS, NGRAM, Arm, Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """How a head was made."""

    target_name: str
    target_digest: str
    num_dialogues: int
    num_answer_tokens: int
    data: str
    layer_ids: tuple[int, ...]
    draft_vocab_size: int
    coverage: float
    unrolled_steps: int
    num_steps: int
    num_tokens: int
    training_minutes: float
    best_step: int
    held_out: tuple[float, ...]
    """Share of right guesses by unrolled step."""
    machine: str
    command: str


def write_card(origin: Origin, evaluation: Evaluation) -> str:
    """Markdown."""
    return "\n".join([*_head(origin), *_table(evaluation), ""])


def _head(origin: Origin) -> list[str]:
    return [
        f"# A draft head for {origin.target_name}",
        "",
        "An EAGLE-3 head in the layout of the `speculators` library. It drafts for this target alone",
        f"(`{origin.target_digest}`). Embeddings and output layer are not in it: they are the target's.",
        "",
        "```",
        origin.command,
        "```",
        "",
        "| how it was made | |",
        "| --- | --- |",
        f"| data | {origin.data}: {origin.num_dialogues} dialogues, "
        f"{origin.num_answer_tokens} answer tokens |",
        f"| hidden states read | {', '.join(map(str, origin.layer_ids))} |",
        f"| draft vocabulary | {origin.draft_vocab_size} tokens, {origin.coverage:.1%} of the answers |",
        f"| unrolled steps | {origin.unrolled_steps} |",
        f"| training | {origin.num_steps} steps, {origin.num_tokens} tokens, "
        f"{origin.training_minutes:.0f} minutes; the weights are those of step {origin.best_step} |",
        "| right guesses, held out | "
        f"{' / '.join(f'{share:.2f}' for share in origin.held_out)} by unrolled step |",
        f"| machine | {origin.machine} |",
        "",
    ]


def _table(evaluation: Evaluation) -> list[str]:
    longest = evaluation.arms[Arm(HEAD, max(LENGTHS))].acceptance(max(LENGTHS))
    rows = []
    for length in LENGTHS:
        arm = Arm(HEAD, length)
        measured = evaluation.arms[arm]
        rows.append(
            f"| {length} | {_conditional(longest, length):.2f} | {longest[length - 1]:.2f} "
            f"| {measured.mean_acceptance_length:.2f} "
            f"| {evaluation.predicted_speedup(length):.2f}x | {evaluation.measured_speedup(arm):.2f}x |"
        )
    ngram = Arm(NGRAM, max(LENGTHS))
    return [
        f"On {evaluation.num_prompts} prompts that it has not learned from, greedy, one stream. "
        f"Speculation off: {evaluation.arms[ARMS[0]].tokens_per_second:.1f} tokens/s; a step of the head "
        f"costs {evaluation.cost_ratio:.2f} of one of the target.",
        "",
        "| draft length | accepted at this position, if all before were | drafts that stand so far "
        "| tokens per step | predicted speed-up | measured |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        f"| n-gram, {ngram.length} | | | {evaluation.arms[ngram].mean_acceptance_length:.2f} | "
        f"| {evaluation.measured_speedup(ngram):.2f}x |",
        "",
    ]


def _conditional(survivals: Sequence[float], length: int) -> float:
    before = survivals[length - 2] if length > 1 else 1.0
    return survivals[length - 1] / before if before else 0.0
