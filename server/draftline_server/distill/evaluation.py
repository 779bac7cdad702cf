"""What a head is worth on this machine: measured in the engine, on prompts that it has not learned from.

Greedy, one stream, fixed draft lengths. Arms take turns, prompt by prompt, so that what slows the machine for
a while slows them all.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from draftline_server.allocator import keep_freed_memory
from draftline_server.config import parse_config
from draftline_server.core.admission import admit
from draftline_server.core.generation import SpeculationStats
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams
from draftline_server.distill.progress import progress_bar
from draftline_server.engine import Engine
from draftline_server.engine_factory import build_served_pair
from draftline_server.errors import ResourceError
from draftline_server.model.startup import inspect_models

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
OFF, NGRAM, HEAD = "off", "ngram", "draft_model"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to generate."""

    method: str
    length: int

    def speculation(self) -> SpeculationParams:
        if self.method == OFF:
            return SpeculationParams(enabled=False)
        return SpeculationParams(methods=(self.method,), max_draft_tokens=self.length)


ARMS = (Arm(OFF, 0), *(Arm(HEAD, length) for length in LENGTHS), Arm(NGRAM, LENGTHS[-1]))


@dataclass(slots=True)
class Measured:
    """Of one arm, over all prompts."""

    seconds: float = 0.0
    num_tokens: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def tokens_per_second(self) -> float:
        """0 where every answer ended with its first token."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def acceptance(self, length: int) -> list[float]:
        """Share of drafts of which at least so many tokens stood, for 1 to `length`."""
        accepted = self.stats.accepted_tokens_per_position
        drafts = max(1, self.stats.drafts)
        return [(accepted[i] if i < len(accepted) else 0) / drafts for i in range(length)]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens of a step with a draft: those that stood, and one."""
        return 1.0 + self.stats.accepted_tokens / max(1, self.stats.drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All that a model card tells."""

    arms: Mapping[Arm, Measured]
    draft_seconds: float
    """Of one forward of the head for one sequence."""
    verify_seconds: Mapping[int, float]
    """Of the target's forward, by tokens."""
    num_prompts: int

    def measured_speedup(self, arm: Arm) -> float:
        """1 where nothing could be measured."""
        off = self.arms[ARMS[0]].tokens_per_second
        return self.arms[arm].tokens_per_second / off if off else 1.0

    def predicted_speedup(self, length: int) -> float:
        """From acceptance at the longest draft, and from what forwards cost."""
        longest = max(LENGTHS)
        survivals = self.arms[Arm(HEAD, longest)].acceptance(length)
        seconds = self.verify_seconds[1 + length] + length * self.draft_seconds
        return (1.0 + sum(survivals)) * self.verify_seconds[1] / seconds

    def summary(self) -> list[str]:
        """Lines for a person."""
        best = max(ARMS[1:-1], key=self.measured_speedup)
        survivals = self.arms[ARMS[-2]].acceptance(max(LENGTHS))
        return [
            f"acceptance by position: {' '.join(f'{share:.2f}' for share in survivals)}",
            f"fastest with drafts of {best.length}: {self.measured_speedup(best):.2f} times speculation off",
        ]

    @property
    def cost_ratio(self) -> float:
        return self.draft_seconds / self.verify_seconds[1]


def evaluate_apart(
    target: Path, head: Path, prompts: Sequence[tuple[int, ...]], *, device: str, max_tokens: int
) -> Evaluation:
    """As `evaluate`, in a process of its own whose threads wait as those of `serve` do.

    How they wait is read once, when torch is loaded, and training is faster the other way. Raises what
    loading raises, and `ResourceError` where the process was killed.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # this process has read it long ago
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_load_and_evaluate, target, head, prompts, device, max_tokens).result()
        except BrokenProcessPool as error:
            raise ResourceError(
                "the evaluation's process was killed; was there too little memory?"
            ) from error


def _end_with_parent() -> None:
    """A parent that was killed ends nothing by itself."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _load_and_evaluate(
    target: Path, head: Path, prompts: Sequence[tuple[int, ...]], device: str, max_tokens: int
) -> Evaluation:
    _end_with_parent()
    keep_freed_memory()
    config = parse_config(
        {
            "device": device,
            "models": {"target_model": {"path": str(target)}, "draft_model": {"path": str(head)}},
            "speculative_decoding": {
                "methods": [HEAD, NGRAM],
                "num_speculative_tokens": max(LENGTHS),
                "adaptive": False,
                "fallback_to_standard_decoding": False,
            },
            "inference": {
                "prefix_caching": False,
                "max_context_length": max(map(len, prompts)) + max_tokens,
            },
        }
    )
    engine = build_served_pair(config, inspect_models(config)).engine
    assert isinstance(engine, Engine)
    engine.warm_up()
    with progress_bar("evaluation", len(prompts) * len(ARMS), "text") as bar:
        return evaluate(engine, prompts, max_tokens=max_tokens, advance=bar.update)


def evaluate(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    *,
    max_tokens: int,
    advance: Callable[[int], object],
) -> Evaluation:
    """Completes each prompt by each arm; the engine drafts as it is told, whether it pays or not."""
    arms = {arm: Measured() for arm in ARMS}
    for index, prompt in enumerate(prompts):
        turn = list(arms) if index % 2 else list(reversed(arms))
        for arm in turn:
            _complete(engine, prompt, arm, arms[arm], max_tokens)
            advance(1)
    costs = engine.costs
    return Evaluation(
        arms=arms,
        draft_seconds=costs.draft.estimate(1),
        verify_seconds={n: costs.verify.estimate(n) for n in range(1, max(LENGTHS) + 2)},
        num_prompts=len(prompts),
    )


def _complete(engine: Engine, prompt: tuple[int, ...], arm: Arm, measured: Measured, max_tokens: int) -> None:
    engine.add_request(
        admit(
            request_id="evaluation",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
            speculation=arm.speculation(),
            limits=engine.limits,
            now=0.0,
        )
    )
    while not any(delta.token_ids for delta in engine.step()):
        pass  # it reads the prompt, a part in each step
    started = time.monotonic()
    while engine.has_work:
        for delta in engine.step():
            measured.num_tokens += len(delta.token_ids)
            if delta.summary is not None:
                _add(measured.stats, delta.summary.speculation)
    measured.seconds += time.monotonic() - started


def _add(total: SpeculationStats, one: SpeculationStats) -> None:
    total.drafts += one.drafts
    total.draft_tokens += one.draft_tokens
    total.accepted_tokens += one.accepted_tokens
    total.decode_steps += one.decode_steps
    missing = len(one.accepted_tokens_per_position) - len(total.accepted_tokens_per_position)
    total.accepted_tokens_per_position.extend([0] * missing)
    for position, count in enumerate(one.accepted_tokens_per_position):
        total.accepted_tokens_per_position[position] += count
