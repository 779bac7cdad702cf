"""Our engine, driven directly: no gRPC, no threads, one `step` after the other.

All engines of a run share the loaded models, since only their caches differ.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from arms import Run
from draftline_server.config import InferenceConfig, Method, SpeculativeDecodingConfig
from draftline_server.core.admission import admit
from draftline_server.core.detokenizer import Decode
from draftline_server.core.generation import GenerationSummary
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams
from draftline_server.engine import Engine
from draftline_server.engine_factory import EngineInputs, assemble_engine
from draftline_server.model.head_checkpoint import LoadedHead
from draftline_server.model.loader import load_model
from draftline_server.model.tokenizer import Tokenizer
from draftline_server.speculation.verification import Verify, verify
from models import Pair
from workload import Workload

MAX_STREAMS = 32
NUM_SPECULATIVE_TOKENS = 5
# Drafts that cost no forward are longer; the peers' n-grams get as many.
NUM_LOOKUP_TOKENS = 10
BLOCK_SIZE = 16
CONTEXT_LENGTH = 1024
CPU = torch.device("cpu")

_request_numbers = itertools.count()


@dataclass(frozen=True)
class LoadedPair:
    """Both models, ready for packed forwards."""

    target: PreTrainedModel
    draft: PreTrainedModel | LoadedHead | None
    decode: Decode
    decode_plain: Decode


def load_pair(pair: Pair, *, dtype: torch.dtype, device: str = "cpu") -> LoadedPair:
    where = torch.device(device)
    return load_target(
        pair.target,
        dtype=dtype,
        device=where,
        load_draft=lambda _: load_model(pair.draft, dtype=dtype, device=where),
    )


def load_target(
    path: Path,
    *,
    dtype: torch.dtype,
    load_draft: Callable[[PreTrainedModel], PreTrainedModel | LoadedHead | None],
    device: torch.device = CPU,
) -> LoadedPair:
    """A target, and what is loaded for it."""
    target = load_model(path, dtype=dtype, device=device)
    tokenizer = Tokenizer.load(path)
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    return LoadedPair(target, load_draft(target), decode, tokenizer.decode)


def make_engine(
    pair: LoadedPair,
    methods: tuple[Method, ...],
    *,
    adaptive: bool = False,
    num_speculative_tokens: int = NUM_SPECULATIVE_TOKENS,
    max_streams: int = MAX_STREAMS,
    verify: Verify = verify,
) -> Engine:
    """Nothing is switched off by batch size, and no prompt's cache outlives its run."""
    engine = assemble_engine(
        EngineInputs(
            target=pair.target,
            draft=pair.draft if "draft_model" in methods else None,
            eos_token_ids=frozenset(),
            decode=pair.decode,
            decode_plain=pair.decode_plain,
            num_blocks=1 + max_streams * CONTEXT_LENGTH // BLOCK_SIZE,
            max_context_length=CONTEXT_LENGTH,
            max_running=max_streams,
            inference=InferenceConfig(block_size=BLOCK_SIZE, prefix_caching=False),
            speculative_decoding=SpeculativeDecodingConfig(
                enabled=bool(methods),
                methods=methods or ("ngram",),
                num_speculative_tokens=num_speculative_tokens,
                max_batch_size=2 * max_streams,
                adaptive=adaptive,
                fallback_to_standard_decoding=adaptive,
            ),
            verify=verify,
        )
    )
    engine.warm_up()
    return engine


class EngineRun:
    """One workload under way, step by step, so that several engines can take turns."""

    def __init__(self, engine: Engine, workload: Workload) -> None:
        self._engine = engine
        self._outputs: dict[str, list[int]] = {}
        self._summaries: list[GenerationSummary] = []
        self._step_seconds: list[float] = []
        started = time.perf_counter()
        for prompt in workload.prompts:
            self._submit(prompt, workload.new_tokens)
        self._submit_seconds = time.perf_counter() - started

    def _submit(self, prompt: tuple[int, ...], new_tokens: int) -> None:
        request_id = f"bench-{next(_request_numbers)}"
        self._outputs[request_id] = []
        self._engine.add_request(
            admit(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True),
                speculation=SpeculationParams(),
                limits=self._engine.limits,
                now=time.monotonic(),
            )
        )

    @property
    def is_done(self) -> bool:
        return not self._engine.has_work

    def step(self) -> None:
        started = time.perf_counter()
        deltas = self._engine.step()
        self._step_seconds.append(time.perf_counter() - started)
        for delta in deltas:
            if delta.error is not None:
                raise delta.error
            self._outputs[delta.request_id].extend(delta.token_ids)
            if delta.summary is not None:
                self._summaries.append(delta.summary)

    def result(self) -> Run:
        counts = [summary.speculation for summary in self._summaries]
        return Run(
            self._submit_seconds + sum(self._step_seconds),
            tuple(map(tuple, self._outputs.values())),
            step_seconds=statistics.median(self._step_seconds),
            drafts=sum(count.drafts for count in counts),
            draft_tokens=sum(count.draft_tokens for count in counts),
            accepted_tokens=sum(count.accepted_tokens for count in counts),
        )


class EngineArm:
    """One engine with one way to speculate."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self._engine = engine

    def supports(self, workload: Workload) -> bool:
        return True

    def begin(self, workload: Workload) -> EngineRun:
        return EngineRun(self._engine, workload)

    def run(self, workload: Workload) -> Run:
        run = self.begin(workload)
        while not run.is_done:
            run.step()
        return run.result()

    def close(self) -> None:
        del self._engine


def make_arms(pair: LoadedPair) -> list[EngineArm]:
    """The rows of the table that are ours."""
    lookup = functools.partial(make_engine, pair, num_speculative_tokens=NUM_LOOKUP_TOKENS)
    engines = {
        "off": make_engine(pair, ()),
        "n-gram": lookup(("ngram",)),
        "draft model": make_engine(pair, ("draft_model",)),
        "chain": make_engine(pair, ("ngram", "draft_model")),
        "adaptive": lookup(("ngram", "draft_model"), adaptive=True),
    }
    return [EngineArm(f"draftline {name}", engine) for name, engine in engines.items()]
