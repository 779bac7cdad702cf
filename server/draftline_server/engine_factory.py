"""Puts an engine together: models, caches, pool, proposers, controller."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from draftline_server.config import InferenceConfig, SpeculativeDecodingConfig
from draftline_server.core.admission import RequestLimits
from draftline_server.core.block_pool import BlockPool
from draftline_server.core.clock import Clock
from draftline_server.core.detokenizer import Decode
from draftline_server.core.scheduler import Scheduler
from draftline_server.engine import Engine, EngineParts
from draftline_server.model.kv_cache import KVCache
from draftline_server.model.runner import ModelRunner
from draftline_server.speculation.chain import ProposerChain
from draftline_server.speculation.draft_model import DraftModelProposer
from draftline_server.speculation.length_controller import ControllerSettings, LengthController
from draftline_server.speculation.ngram import NgramProposer
from draftline_server.speculation.proposer import Proposer
from draftline_server.speculation.verification import Verify, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInputs:
    """Everything an engine needs that is not a choice of its own."""

    target: PreTrainedModel
    draft: PreTrainedModel | None
    eos_token_ids: frozenset[int]
    decode: Decode
    decode_plain: Decode
    num_blocks: int
    max_context_length: int
    max_running: int
    """Sequences in one step."""
    inference: InferenceConfig
    speculative_decoding: SpeculativeDecodingConfig
    clock: Clock = time.monotonic
    verify: Verify = verify


def assemble_engine(inputs: EngineInputs) -> Engine:
    """Builds an engine around loaded models."""
    inference, speculation = inputs.inference, inputs.speculative_decoding
    target = _build_runner(inputs.target, inputs)
    proposers = ProposerChain(_build_proposers(inputs, target.vocab_size))
    controller = LengthController(
        ControllerSettings(
            num_speculative_tokens=speculation.num_speculative_tokens if proposers.names else 0,
            max_batch_size=speculation.max_batch_size,
            adaptive=speculation.adaptive,
            fallback=speculation.fallback_to_standard_decoding,
            min_acceptance_rate=speculation.min_acceptance_rate,
        )
    )
    pool = BlockPool(
        num_blocks=inputs.num_blocks,
        block_size=inference.block_size,
        prefix_caching=inference.prefix_caching,
    )
    return Engine(
        EngineParts(
            target=target,
            proposers=proposers,
            controller=controller,
            scheduler=Scheduler(
                pool=pool, max_running=inputs.max_running, max_batched_tokens=inference.max_batched_tokens
            ),
            limits=RequestLimits(
                vocab_size=target.vocab_size,
                max_context_length=inputs.max_context_length,
                max_tokens_per_request=inference.max_tokens_per_request,
                context_overflow=inference.context_overflow,
                methods=proposers.names,
                num_speculative_tokens=controller.limit,
            ),
            eos_token_ids=inputs.eos_token_ids,
            decode=inputs.decode,
            decode_plain=inputs.decode_plain,
            clock=inputs.clock,
            verify=inputs.verify,
        )
    )


def _build_runner(model: PreTrainedModel, inputs: EngineInputs) -> ModelRunner:
    config = model.config.get_text_config()
    num_heads = config.num_attention_heads
    cache = KVCache(
        num_layers=config.num_hidden_layers,
        num_blocks=inputs.num_blocks,
        block_size=inputs.inference.block_size,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        dtype=model.dtype,
        device=model.device,
    )
    return ModelRunner(model, cache, vocab_size=config.vocab_size)


def _build_proposers(inputs: EngineInputs, target_vocab_size: int) -> list[Proposer]:
    """The configured methods that this pair can do."""
    speculation = inputs.speculative_decoding
    if not speculation.enabled or speculation.num_speculative_tokens == 0:
        return []
    proposers: list[Proposer] = []
    for method in speculation.methods:
        if method == "ngram":
            proposers.append(NgramProposer(min_length=speculation.ngram_min, max_length=speculation.ngram_max))
        elif inputs.draft is not None:
            proposers.append(
                DraftModelProposer(
                    _build_runner(inputs.draft, inputs),
                    target_vocab_size=target_vocab_size,
                    max_batched_tokens=inputs.inference.max_batched_tokens,
                    eos_token_ids=inputs.eos_token_ids,
                )
            )
    return proposers
