"""Puts an engine together: models, caches, pool, proposers, controller."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from draftline_server.config import Config, InferenceConfig, SpeculativeDecodingConfig
from draftline_server.core.admission import RequestLimits
from draftline_server.core.block_pool import BlockPool
from draftline_server.core.clock import Clock
from draftline_server.core.detokenizer import Decode
from draftline_server.core.scheduler import Scheduler
from draftline_server.core.served_pair import ModelDescription, PairDescription, ServedPair
from draftline_server.engine import Engine, EngineParts
from draftline_server.model.head_checkpoint import LoadedHead, load_head
from draftline_server.model.head_runner import HeadRunner
from draftline_server.model.hidden_states import HiddenStateTap
from draftline_server.model.kv_cache import KVCache
from draftline_server.model.loader import load_model
from draftline_server.model.runner import ModelRunner, Runner
from draftline_server.model.startup import (
    InspectedHead,
    InspectedModel,
    InspectedModels,
    InspectedPair,
    naming,
)
from draftline_server.speculation.chain import ProposerChain
from draftline_server.speculation.draft_head import DraftHeadProposer
from draftline_server.speculation.draft_model import DraftModelProposer
from draftline_server.speculation.hidden_state_store import HiddenStateStore
from draftline_server.speculation.length_controller import ControllerSettings, LengthController
from draftline_server.speculation.ngram import NgramProposer
from draftline_server.speculation.proposer import Proposer
from draftline_server.speculation.verification import Verify, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInputs:
    """Everything an engine needs that is not a choice of its own."""

    target: PreTrainedModel
    draft: PreTrainedModel | LoadedHead | None
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
    target = build_runner(inputs.target, num_blocks=inputs.num_blocks, block_size=inputs.inference.block_size)
    draft = _build_draft(inputs, vocab_size=target.vocab_size)
    proposers = ProposerChain(_build_proposers(inputs, draft, target))
    controller = LengthController(
        ControllerSettings(
            num_speculative_tokens=speculation.num_speculative_tokens if proposers.names else 0,
            max_batch_size=speculation.max_batch_size,
            adaptive=speculation.adaptive,
            fallback=speculation.fallback_to_standard_decoding,
            min_acceptance_rate=speculation.min_acceptance_rate,
        ),
        proposers=proposers.names,
    )
    pool = BlockPool(
        num_blocks=inputs.num_blocks,
        block_size=inference.block_size,
        prefix_caching=inference.prefix_caching,
    )
    return Engine(
        EngineParts(
            target=target,
            draft=draft,
            tap=_build_tap(inputs) if isinstance(draft, HeadRunner) else None,
            proposers=proposers,
            controller=controller,
            scheduler=Scheduler(
                pool=pool,
                max_running=inputs.max_running,
                max_batched_tokens=inference.max_batched_tokens,
                draft_catches_up=not isinstance(draft, HeadRunner),
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


def build_runner(model: PreTrainedModel, *, num_blocks: int, block_size: int) -> ModelRunner:
    """A loaded model with an empty cache."""
    config = model.config.get_text_config()
    cache = _build_cache(
        config, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device
    )
    return ModelRunner(model, cache, vocab_size=config.vocab_size)


def _build_draft(inputs: EngineInputs, *, vocab_size: int) -> Runner | None:
    block_size = inputs.inference.block_size
    if inputs.draft is None:
        return None
    if not isinstance(inputs.draft, LoadedHead):
        return build_runner(inputs.draft, num_blocks=inputs.num_blocks, block_size=block_size)
    head = inputs.draft.head
    cache = _build_cache(
        head.config.layer,
        num_blocks=inputs.num_blocks,
        block_size=block_size,
        dtype=inputs.draft.dtype,
        device=inputs.target.device,
    )
    return HeadRunner(head, cache, vocab_size=vocab_size, draft_token_ids=inputs.draft.draft_token_ids)


def _build_cache(
    config: PreTrainedConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    num_heads = config.num_attention_heads
    return KVCache(
        num_layers=config.num_hidden_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        dtype=dtype,
        device=device,
    )


def _build_tap(inputs: EngineInputs) -> HiddenStateTap:
    assert isinstance(inputs.draft, LoadedHead)
    return HiddenStateTap(inputs.target, inputs.draft.head.config.layer_ids)


def _build_proposers(inputs: EngineInputs, draft: Runner | None, target: ModelRunner) -> list[Proposer]:
    """The configured methods that this pair can do."""
    speculation = inputs.speculative_decoding
    if not speculation.enabled or speculation.num_speculative_tokens == 0:
        return []
    proposers: list[Proposer] = []
    for method in speculation.methods:
        if method == "ngram":
            proposers.append(
                NgramProposer(min_length=speculation.ngram_min, max_length=speculation.ngram_max)
            )
        elif draft is not None:
            proposers.append(_build_draft_proposer(inputs, draft, target))
    return proposers


def _build_draft_proposer(inputs: EngineInputs, draft: Runner, target: ModelRunner) -> Proposer:
    max_batched_tokens = inputs.inference.max_batched_tokens
    if isinstance(draft, HeadRunner):
        assert isinstance(inputs.draft, LoadedHead)
        store = HiddenStateStore(
            num_blocks=inputs.num_blocks,
            block_size=inputs.inference.block_size,
            size=inputs.draft.head.config.captured_size,
            dtype=target.cache.keys.dtype,
            device=target.device,
        )
        return DraftHeadProposer(
            draft, store, max_batched_tokens=max_batched_tokens, eos_token_ids=inputs.eos_token_ids
        )
    assert isinstance(draft, ModelRunner)
    return DraftModelProposer(
        draft,
        target_vocab_size=target.vocab_size,
        max_batched_tokens=max_batched_tokens,
        eos_token_ids=inputs.eos_token_ids,
    )


def build_served_pair(config: Config, inspected: InspectedModels) -> ServedPair:
    """Loads the inspected models and returns all that serving needs; the engine is not warmed up yet."""
    with naming("target"):
        target = load_model(inspected.target.directory, dtype=inspected.target.dtype, device=inspected.device)
    with naming("draft"):
        draft = load_draft(inspected, target) if "draft_model" in inspected.methods else None
    tokenizer = inspected.target.tokenizer
    engine = assemble_engine(
        EngineInputs(
            target=target,
            draft=draft,
            eos_token_ids=frozenset(inspected.target.facts.eos_token_ids),
            decode=partial(tokenizer.decode, skip_special_tokens=False),
            decode_plain=partial(tokenizer.decode, skip_special_tokens=True),
            num_blocks=inspected.plan.num_blocks,
            max_context_length=inspected.max_context_length,
            max_running=config.max_running,
            inference=config.inference,
            speculative_decoding=config.speculative_decoding,
        )
    )
    return ServedPair(engine=engine, tokenizer=tokenizer, description=_describe(inspected))


def load_draft(inspected: InspectedPair, target: PreTrainedModel) -> PreTrainedModel | LoadedHead | None:
    """The draft model or head, for a loaded target; None where the pair has none."""
    draft = inspected.draft
    if isinstance(draft, InspectedHead):
        return load_head(
            draft.checkpoint,
            draft.head,
            target=target,
            target_weights=inspected.target.weights,
            dtype=draft.dtype,
            device=inspected.device,
        )
    return load_model(draft.directory, dtype=draft.dtype, device=inspected.device) if draft else None


def _describe(inspected: InspectedModels) -> PairDescription:
    return PairDescription(
        target=_describe_model(inspected.target),
        draft=_describe_model(inspected.draft) if inspected.draft is not None else None,
        pair_digest=inspected.pair_digest,
        eos_token_ids=sorted(inspected.target.facts.eos_token_ids),
        device=str(inspected.device),
        longest_token_length=max(map(len, inspected.target.tokenizer.token_map())),
    )


def _describe_model(model: InspectedModel) -> ModelDescription:
    return ModelDescription(
        name=model.directory.name,
        architecture=model.facts.architecture,
        vocab_size=model.facts.vocab_size,
        max_context_length=model.facts.max_position_embeddings,
        dtype=str(model.dtype).removeprefix("torch."),
        digest=model.digest.model,
    )
