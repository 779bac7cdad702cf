"""Engines over tiny models, driven without threads, and the reference that they must equal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftline_server.config import InferenceConfig, ModelConfig, SpeculativeDecodingConfig
from draftline_server.core.admission import admit
from draftline_server.core.clock import Clock
from draftline_server.core.generation import GenerationSummary, TokenLogprobs
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams
from draftline_server.engine import Engine
from draftline_server.engine_factory import EngineInputs, assemble_engine
from draftline_server.errors import RequestError
from draftline_server.model.architecture import read_eos_token_ids
from draftline_server.model.head_checkpoint import LoadedHead, load_head
from draftline_server.model.head_config import is_draft_head
from draftline_server.model.loader import load_model
from draftline_server.model.startup import inspect_head, inspect_model
from draftline_server.model.tokenizer import Tokenizer

CPU = torch.device("cpu")


@dataclass(slots=True)
class Completion:
    """Everything that an engine said about one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    chunks: list[str] = field(default_factory=list)
    summary: GenerationSummary | None = None
    error: RequestError | None = None

    @property
    def text(self) -> str:
        return "".join(self.chunks)


def make_engine(
    target: Path,
    draft: Path | None = None,
    *,
    num_blocks: int = 512,
    max_running: int = 32,
    max_context_length: int = 512,
    inference: Mapping[str, Any] | None = None,
    speculation: Mapping[str, Any] | None = None,
    clock: Clock = time.monotonic,
    pack: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Engine:
    """An engine on the CPU, weights in `dtype`. Speculation is fixed-length and never off unless told so."""
    tokenizer = Tokenizer.load(target)
    model = load_model(target, dtype=dtype, device=CPU, pack=pack)
    fixed = {"adaptive": False, "fallback_to_standard_decoding": False, "max_batch_size": 64}
    return assemble_engine(
        EngineInputs(
            target=model,
            draft=_load_draft(draft, target, model, dtype=dtype, pack=pack) if draft else None,
            eos_token_ids=frozenset(read_eos_token_ids(target, model.config)),
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
            decode_plain=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
            num_blocks=num_blocks,
            max_context_length=max_context_length,
            max_running=max_running,
            inference=InferenceConfig(**(inference or {})),
            speculative_decoding=SpeculativeDecodingConfig(**(fixed | dict(speculation or {}))),
            clock=clock,
        )
    )


def _load_draft(
    draft: Path, target: Path, model: PreTrainedModel, *, dtype: torch.dtype, pack: bool
) -> PreTrainedModel | LoadedHead:
    if not is_draft_head(draft):
        return load_model(draft, dtype=dtype, device=CPU, pack=pack)
    inspected = inspect_model(ModelConfig(path=target), role="target", where=CPU)
    head = inspect_head(ModelConfig(path=draft), inspected, where=CPU)
    return load_head(
        head.checkpoint,
        head.head,
        target=model,
        target_weights=inspected.weights,
        dtype=dtype,
        device=CPU,
        pack=pack,
    )


def add(
    engine: Engine,
    request_id: str,
    prompt: Sequence[int],
    *,
    speculation: SpeculationParams | None = None,
    priority: int = 0,
    deadline: float | None = None,
    **sampling: Any,
) -> None:
    """Admits a request, greedy unless told otherwise."""
    engine.add_request(
        admit(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(**({"temperature": 0.0} | sampling)),
            speculation=speculation or SpeculationParams(),
            limits=engine.limits,
            now=0.0,
            deadline=deadline,
            priority=priority,
        )
    )


def drain(engine: Engine, *, max_steps: int = 20_000) -> dict[str, Completion]:
    """Steps until nothing is left; checks the engine's books after every step."""
    completions: dict[str, Completion] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return completions
        for delta in engine.step():
            completion = completions.setdefault(delta.request_id, Completion())
            assert completion.summary is None, "a delta after the final one"
            assert completion.error is None, "a delta after the final one"
            completion.chunks.append(delta.text)
            completion.token_ids.extend(delta.token_ids)
            completion.logprobs.extend(delta.logprobs)
            completion.summary, completion.error = delta.summary, delta.error
        engine.check_integrity()
    raise AssertionError(f"the engine still has work after {max_steps} steps")


def generate(engine: Engine, prompts: Sequence[Sequence[int]], **options: Any) -> list[Completion]:
    """Completes all prompts together; where `draft_lengths` are given, they take turns with these."""
    draft_lengths: Sequence[int] = options.pop("draft_lengths", ())
    for index, prompt in enumerate(prompts):
        if draft_lengths:
            longest = draft_lengths[index % len(draft_lengths)]
            options["speculation"] = SpeculationParams(max_draft_tokens=longest)
        add(engine, f"request-{index}", prompt, **options)
    completions = drain(engine)
    assert engine.statistics().kv_blocks_used == 0
    return [completions[f"request-{index}"] for index in range(len(prompts))]


def reference_greedy(
    target: Path, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False
) -> list[int]:
    """What transformers' own `generate` gives in float32, new tokens only."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True).eval()
    config = model.generation_config
    assert config is not None
    eos = None if ignore_eos else config.eos_token_id
    output = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=eos if eos is not None else -1,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens
