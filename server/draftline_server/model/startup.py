"""All checks of a model pair that need no weights, in the order of what they cost.

`inspect_models` is what `serve`, `plan` and `preflight` begin with: after it, loading may only fail for
what cannot be known before. Every fault is one line that begins with the configuration key at fault.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers.utils import logging as transformers_logging

from draftline_server.config import Config, Method, ModelConfig
from draftline_server.core.digest import ModelDigest, compute_model_digest, compute_pair_digest
from draftline_server.errors import ConfigError, ModelError, PairMismatchError, StartupError
from draftline_server.model import architecture, checkpoint, cpu_kernels, device, memory_plan, pair
from draftline_server.model.architecture import ModelFacts, Skeleton
from draftline_server.model.checkpoint import Checkpoint
from draftline_server.model.cpu_layers import compute_dtype
from draftline_server.model.head_checkpoint import (
    HeadCheckpoint,
    describe_head,
    read_head_checkpoint,
)
from draftline_server.model.head_config import HeadConfig, is_draft_head, read_head_config
from draftline_server.model.memory_plan import MemoryBudget, MemoryPlan, PlannedModel
from draftline_server.model.tokenizer import Tokenizer

Role = Literal["target", "draft"]

ACCELERATOR_FLAG = "--accelerator-memory"
_SHOWN_CHARACTERS = 200

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedModel:
    """A model or a draft head whose files were checked; nothing is loaded yet."""

    role: Role
    directory: Path
    facts: ModelFacts
    digest: ModelDigest
    device: torch.device
    """What the dtypes below are for."""
    dtype: torch.dtype
    """Of the weights, as configured; the device may compute in a wider one."""
    compute_dtype: torch.dtype
    """Of activations and cache."""
    ignored: tuple[str, ...]
    """What of its weights is not used, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedLanguageModel(InspectedModel):
    """A model that reads and writes text by itself."""

    tokenizer: Tokenizer
    weights: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedHead(InspectedModel):
    """A draft head; its tokens are the target's."""

    head: HeadConfig
    checkpoint: HeadCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedPair:
    """Models that are sound and fit together; whether they fit the memory is another question."""

    device: torch.device
    target: InspectedLanguageModel
    draft: InspectedModel | None
    """The configured draft model or head, whether or not it is ever run."""
    max_context_length: int
    pair_digest: str

    def notes(self) -> list[str]:
        """What is worth a line in the log, though nothing is wrong."""
        models = [self.target] if self.draft is None else [self.target, self.draft]
        return [f"{_key(model.role)}: ignored {what}" for model in models for what in model.ignored]


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedModels(InspectedPair):
    """A pair that fits the device."""

    budget: MemoryBudget
    methods: tuple[Method, ...]
    """The proposers that this server can run, in order; empty where speculation is off."""
    plan: MemoryPlan


def inspect_models(config: Config) -> InspectedModels:
    """Checks the configured models and plans the memory. Raises a `StartupError`."""
    where = device.resolve_device(config.device)
    inspected = inspect_pair(config, where)
    budget = read_budget(where)
    plan = plan_memory(config, inspected, budget)
    memory_plan.check_memory_plan(plan)
    return InspectedModels(
        device=where,
        target=inspected.target,
        draft=inspected.draft,
        max_context_length=inspected.max_context_length,
        pair_digest=inspected.pair_digest,
        budget=budget,
        methods=_usable_methods(config),
        plan=plan,
    )


def inspect_pair(
    config: Config, where: torch.device, *, report: Callable[[InspectedModel], object] = lambda _: None
) -> InspectedPair:
    """Checks the configured models for a device, without a look at its memory. Raises a `StartupError`.

    `report` is called with each model that is sound, so that a fault of the pair does not hide what is known.
    """
    # transformers warns on stderr in a form of its own; its warnings belong in the log of the process.
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    target = inspect_model(config.models.target_model, role="target", where=where)
    report(target)
    draft = None
    if config.models.draft_model is not None:
        draft = _inspect_draft(config.models.draft_model, target, where)
        report(draft)
        if isinstance(draft, InspectedLanguageModel):
            with naming("draft"):
                pair.check_tokenizers(target.tokenizer, draft.tokenizer)
    limits_context = config.uses_draft_model and isinstance(draft, InspectedLanguageModel)
    max_context_length = pair.check_context_lengths(
        max_context_length=config.inference.max_context_length,
        target=target.facts,
        draft=draft.facts if draft and limits_context else None,
    )
    return InspectedPair(
        device=where,
        target=target,
        draft=draft,
        max_context_length=max_context_length,
        pair_digest=_check_pair_digest(config, target, draft),
    )


def _inspect_draft(model: ModelConfig, target: InspectedLanguageModel, where: torch.device) -> InspectedModel:
    """A head is told from a full model by its config.json."""
    with naming("draft"):
        checkpoint.check_directory(model.path)
        is_head = is_draft_head(model.path)
    if is_head:
        return inspect_head(model, target, where=where)
    return inspect_model(model, role="draft", where=where)


def inspect_head(model: ModelConfig, target: InspectedLanguageModel, *, where: torch.device) -> InspectedHead:
    """Checks a head's config, weights and vocabulary maps against its target."""
    directory = model.path
    with naming("draft"):
        head = read_head_config(directory, target.facts)
        weights = read_head_checkpoint(directory, head)
        facts = describe_head(head, weights)
        digest = compute_model_digest(directory)
    key = "models.draft_model.dtype"
    dtype = device.resolve_dtype(model.dtype, checkpoint_dtype=facts.checkpoint_dtype, device=where, key=key)
    return InspectedHead(
        role="draft",
        directory=directory,
        facts=facts,
        digest=digest,
        device=where,
        dtype=dtype,
        compute_dtype=compute_dtype(dtype, where),
        ignored=_ignored_of_head(weights),
        head=head,
        checkpoint=weights,
    )


def inspect_model(model: ModelConfig, *, role: Role, where: torch.device) -> InspectedLanguageModel:
    """Checks one model's directory, architecture, weights, dtype and tokenizer."""
    directory = model.path
    with naming(role):
        checkpoint.check_directory(directory)
        config = architecture.read_config(directory)
        weights = checkpoint.read_checkpoint(directory)
        skeleton = architecture.build_skeleton(directory, config)
        checkpoint.check_tensors(directory, weights, skeleton)
        facts = architecture.describe(
            config,
            skeleton,
            checkpoint_dtype=device.dtype_name(config.dtype) if config.dtype else weights.dtype,
            eos_token_ids=architecture.read_eos_token_ids(directory, config),
        )
        tokenizer = Tokenizer.load(directory)
        pair.check_vocabulary(tokenizer, facts)
    dtype = device.resolve_dtype(
        model.dtype,
        checkpoint_dtype=facts.checkpoint_dtype,
        device=where,
        key=f"models.{role}_model.dtype",
    )
    with naming(role):
        digest = compute_model_digest(directory)
    return InspectedLanguageModel(
        role=role,
        directory=directory,
        facts=facts,
        tokenizer=tokenizer,
        weights=weights,
        digest=digest,
        device=where,
        dtype=dtype,
        compute_dtype=compute_dtype(dtype, where),
        ignored=_ignored(weights, skeleton),
    )


def _ignored(weights: Checkpoint, skeleton: Skeleton) -> tuple[str, ...]:
    files = [f"{path.name}, which is no part of the checkpoint" for path in weights.ignored_files]
    tensors = checkpoint.ignored_tensors(weights, skeleton)
    return (*files, *([tensors] if tensors is not None else []))


def _ignored_of_head(weights: HeadCheckpoint) -> tuple[str, ...]:
    files = [f"{path.name}, which is no part of the checkpoint" for path in weights.weights.ignored_files]
    names = weights.ignored_tensors
    return (*files, *([f"tensors that a head does not have: {', '.join(names)}"] if names else []))


def choose_device(config: Config, accelerator_bytes: int | None) -> tuple[torch.device, MemoryBudget]:
    """What to plan for, which need not be here: a GPU with memory of a given size, or of an unknown one."""
    if accelerator_bytes is not None:
        if config.device == "cpu":
            raise ConfigError(f"{ACCELERATOR_FLAG}: cannot be given where device is cpu")
        return device.ABSENT_GPU, MemoryBudget(
            is_cpu=False,
            total_bytes=accelerator_bytes,
            available_bytes=accelerator_bytes,
            source="the accelerator",
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        return device.ABSENT_GPU, MemoryBudget(
            is_cpu=False, total_bytes=0, available_bytes=0, source="accelerator", is_known=False
        )
    where = device.resolve_device(config.device)
    return where, read_budget(where)


def read_budget(where: torch.device) -> MemoryBudget:
    """The memory of a device as the plan wants it."""
    memory = device.read_memory(where)
    return MemoryBudget(
        is_cpu=where.type == "cpu",
        total_bytes=memory.total_bytes,
        available_bytes=memory.available_bytes,
        source=memory.source,
    )


def plan_memory(config: Config, inspected: InspectedPair, budget: MemoryBudget) -> MemoryPlan:
    """The plan of a pair, whether or not it fits; a draft model that is never run takes no memory."""
    target, draft = inspected.target, inspected.draft if config.uses_draft_model else None
    models = [target] if draft is None else [target, draft]
    return memory_plan.compute_memory_plan(
        config,
        budget=budget,
        max_context_length=inspected.max_context_length,
        target=_planned(target),
        draft=_planned(draft) if draft else None,
        extra_weight_bytes=sum(map(_embedding_copy_bytes, models)) if budget.is_cpu else 0,
    )


def _planned(model: InspectedModel) -> PlannedModel:
    return PlannedModel(
        model.facts,
        weight_dtype_bytes=_weight_dtype(model).itemsize,
        compute_dtype_bytes=model.compute_dtype.itemsize,
        captured_size=model.head.captured_size if isinstance(model, InspectedHead) else 0,
    )


def _weight_dtype(model: InspectedModel) -> torch.dtype:
    """Of linear layers in memory: a CPU without our kernels widens weights to what it computes in."""
    if model.compute_dtype != model.dtype and cpu_kernels.load() is None:
        return model.compute_dtype
    return model.dtype


def _embedding_copy_bytes(model: InspectedModel) -> int:
    """What a CPU's repacking adds: an embedding as wide as activations, beside the packed head if tied."""
    facts = model.facts
    if isinstance(model, InspectedHead) and not model.checkpoint.has_embedding:
        return 0
    counted_bytes = 0 if facts.has_tied_head else _weight_dtype(model).itemsize
    return facts.vocab_size * facts.hidden_size * (model.compute_dtype.itemsize - counted_bytes)


def _check_pair_digest(config: Config, target: InspectedModel, draft: InspectedModel | None) -> str:
    dtypes = {"target": device.dtype_name(target.dtype)}
    sizes = {"target": config.models.target_model.tensor_parallel_size}
    if draft is not None and config.models.draft_model is not None:
        dtypes["draft"] = device.dtype_name(draft.dtype)
        sizes["draft"] = config.models.draft_model.tensor_parallel_size
    computed = compute_pair_digest(
        target=target.digest,
        draft=draft.digest if draft else None,
        dtypes=dtypes,
        tensor_parallel_sizes=sizes,
        num_speculative_tokens=config.num_speculative_tokens,
    )
    expected = config.models.expected_pair_digest
    if expected not in (None, computed):
        raise PairMismatchError(
            f"models.expected_pair_digest: {expected} is expected, the files give {computed}"
        )
    return computed


def _usable_methods(config: Config) -> tuple[Method, ...]:
    if config.num_speculative_tokens == 0:
        return ()
    methods = config.speculative_decoding.methods
    return tuple(method for method in methods if method != "draft_model" or config.uses_draft_model)


@contextmanager
def naming(role: Role) -> Iterator[None]:
    """Puts the configuration key before what is wrong with a model."""
    try:
        yield
    except ModelError as error:
        raise type(error)(f"{_key(role)}: {error}") from error
    except OSError as error:  # of any file or folder; the checks name those that they know
        known = f"{error.filename}: cannot be read: {error.strerror}"
        reason = known if error.filename is not None else _shown(str(error))
        raise ModelError(f"{_key(role)}: {reason}") from error
    except StartupError:
        raise
    except Exception as error:  # what libraries raise for files that nobody has thought of
        _logger.debug("a model cannot be used", exc_info=True)
        reason = _shown(f"{type(error).__name__}: {error}")
        raise ModelError(f"{_key(role)}: cannot be used: {reason}") from error


def _shown(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARACTERS]


def _key(role: Role) -> str:
    return f"models.{role}_model.path"
