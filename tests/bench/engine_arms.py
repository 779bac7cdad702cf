"""Our engine, driven directly: no gRPC, no threads, one `step` after the other.

All engines of a run share the loaded models, since only their caches differ.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from dataclasses import dataclass

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
from draftline_server.model.loader import load_model
from draftline_server.model.tokenizer import Tokenizer
from draftline_server.speculation.verification import Verify, verify
from models import Pair
from workload import Workload

MAX_STREAMS = 32
NUM_SPECULATIVE_TOKENS = 5
BLOCK_SIZE = 16
CONTEXT_LENGTH = 1024

_request_numbers = itertools.count()


@dataclass(frozen=True)
class LoadedPair:
    """Both models, ready for packed forwards."""

    target: PreTrainedModel
    draft: PreTrainedModel
    decode: Decode
    decode_plain: Decode


def load_pair(pair: Pair, *, dtype: torch.dtype, device: str = "cpu") -> LoadedPair:
    target, draft = (
        load_model(path, dtype=dtype, device=torch.device(device)) for path in (pair.target, pair.draft)
    )
    tokenizer = Tokenizer.load(pair.target)
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    return LoadedPair(target, draft, decode, tokenizer.decode)


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


class EngineArm:
    """One engine with one way to speculate."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self._engine = engine

    def supports(self, workload: Workload) -> bool:
        return True

    def run(self, workload: Workload) -> Run:
        engine = self._engine
        outputs: dict[str, list[int]] = {}
        summaries: dict[str, GenerationSummary] = {}
        started = time.perf_counter()
        for prompt in workload.prompts:
            request_id = f"bench-{next(_request_numbers)}"
            outputs[request_id] = []
            engine.add_request(
                admit(
                    request_id=request_id,
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(temperature=0.0, max_tokens=workload.new_tokens, ignore_eos=True),
                    speculation=SpeculationParams(),
                    limits=engine.limits,
                    now=time.monotonic(),
                )
            )
        step_ends = [started]
        while engine.has_work:
            deltas = engine.step()
            step_ends.append(time.perf_counter())
            for delta in deltas:
                if delta.error is not None:
                    raise delta.error
                outputs[delta.request_id].extend(delta.token_ids)
                if delta.summary is not None:
                    summaries[delta.request_id] = delta.summary
        counts = [summary.speculation for summary in summaries.values()]
        return Run(
            step_ends[-1] - started,
            tuple(map(tuple, outputs.values())),
            step_seconds=statistics.median(b - a for a, b in itertools.pairwise(step_ends)),
            draft_tokens=sum(count.draft_tokens for count in counts),
            accepted_tokens=sum(count.accepted_tokens for count in counts),
        )

    def close(self) -> None:
        del self._engine


SPECULATIONS: dict[str, tuple[Method, ...]] = {
    "off": (),
    "n-gram": ("ngram",),
    "draft model": ("draft_model",),
    "chain": ("ngram", "draft_model"),
    "adaptive": ("ngram", "draft_model"),
}


def make_arms(pair: LoadedPair) -> list[EngineArm]:
    """The rows of the table that are ours."""
    return [
        EngineArm(f"draftline {name}", make_engine(pair, methods, adaptive=name == "adaptive"))
        for name, methods in SPECULATIONS.items()
    ]
