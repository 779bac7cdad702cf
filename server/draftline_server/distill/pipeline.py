"""From a target to its head, in four steps of which each goes on where it was interrupted.

    dialogues    the target answers prompts                     dialogues/part-*.npz
    features     what it computes for each of their tokens      features/part-*.safetensors
    training     a head learns from both                        training.pt
    evaluation   the head drafts for prompts held out           in the README of the result

The evaluation takes minutes and is done anew. Everything lies in a work directory beside the result. What
the run was begun with is written there, too: other settings would mix what does not belong together, and are
refused.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftline_server.config import ModelConfig, parse_config
from draftline_server.distill import generation, new_head
from draftline_server.distill.card import Origin, write_card
from draftline_server.distill.dialogues import Dialogue, read_dialogues, write_dialogues
from draftline_server.distill.evaluation import Evaluation, evaluate_apart
from draftline_server.distill.features import (
    DIALOGUES_PER_PART,
    MAX_FORWARD_TOKENS,
    FeatureFiles,
    FeatureReader,
    compute_features,
)
from draftline_server.distill.progress import progress_bar
from draftline_server.distill.publish import check_may_replace, write_head
from draftline_server.distill.training import Progress, Trainer, TrainingSettings, train
from draftline_server.distill.vocabulary import choose_draft_vocabulary, coverage
from draftline_server.engine import Engine
from draftline_server.engine_factory import build_runner, build_served_pair
from draftline_server.errors import ConfigError, ModelError, ResourceError
from draftline_server.model.cpu_layers import has_native_bfloat16
from draftline_server.model.draft_head import DraftHead
from draftline_server.model.hidden_states import HiddenStateTap
from draftline_server.model.loader import load_model
from draftline_server.model.startup import InspectedLanguageModel, inspect_model, inspect_models

MAX_TEXT_TOKENS = 2048
"""Longer texts are cut: what their rest would teach is not worth the memory of its attention."""
MAX_HELD_OUT = 64
EVALUATED_PROMPTS = 16
EVALUATED_TOKENS = 64
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """What the user asks for."""

    target: Path
    out: Path
    work: Path
    prompts: Path | None
    dialogues: tuple[Path, ...]
    num_dialogues: int
    max_answer_tokens: int
    layer_ids: tuple[int, ...] | None
    draft_vocab_size: int
    device: torch.device
    training: TrainingSettings
    command: str

    def identity(self, digest: str) -> dict[str, Any]:
        """What decides dialogues and features. A checkpoint knows itself what it was trained with."""
        return {
            "target": digest,
            "prompts": _hash(self.prompts),
            "dialogues": [_hash(path) for path in self.dialogues],
            "num_dialogues": self.num_dialogues,
            "max_answer_tokens": self.max_answer_tokens,
            "layer_ids": list(self.layer_ids) if self.layer_ids else None,
            "seed": self.training.seed,
        }


def distill(settings: DistillSettings) -> Evaluation:
    """Makes the head. Raises a `StartupError`; what was done by then is kept."""
    try:
        return _Run(settings).run()
    except OSError as error:
        raise ResourceError(f"{error.filename or settings.work}: {error.strerror or error}") from error


class _Run:
    """One run of the command."""

    def __init__(self, settings: DistillSettings) -> None:
        self._settings = settings
        model = ModelConfig(path=settings.target)
        self._target: InspectedLanguageModel = inspect_model(model, role="target", where=settings.device)
        num_layers = self._target.facts.num_layers
        self._layer_ids = settings.layer_ids or new_head.default_layer_ids(num_layers)
        ids = list(self._layer_ids)
        if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] != num_layers:
            raise ConfigError(
                f"--layers: {ids} must rise from 0 or more to {num_layers}, which is the target's final state"
            )
        new_head.check_target(settings.target)
        check_may_replace(settings.out)
        if settings.out.is_relative_to(settings.work) or settings.work.is_relative_to(settings.out):
            raise ConfigError(f"--work: {settings.work} and --out: {settings.out} must lie side by side")
        self._max_text_tokens = min(MAX_TEXT_TOKENS, self._target.facts.max_position_embeddings)

    def run(self) -> Evaluation:
        settings = self._settings
        self._claim_work()
        dialogues = self._dialogues()
        self.__dict__.pop("_plain_engine", None)
        self._free_memory()
        held_out, learned = _split(dialogues)
        token_ids = choose_draft_vocabulary(
            learned, vocab_size=self._target.facts.vocab_size, size=settings.draft_vocab_size
        )
        files = FeatureFiles(settings.work / "features", [*learned, *held_out])
        self._compute_features(files)
        head, progress = self._train(files, token_ids, num_held_out=len(held_out))
        origin = self._origin(learned, token_ids, progress)
        draft = settings.work / "head"
        self._write(draft, head, token_ids, card="")
        self._free_memory()
        evaluation = self._evaluate(draft, held_out, learned)
        self._write(settings.out, head, token_ids, card=write_card(origin, evaluation))
        return evaluation

    def _claim_work(self) -> None:
        """Raises `ConfigError` where an earlier run there was begun with other settings."""
        path = self._settings.work / "settings.json"
        identity = self._settings.identity(self._target.digest.model)
        if path.exists():
            before = json.loads(path.read_text())
            for key, value in identity.items():
                if before.get(key) != value:
                    raise ConfigError(
                        f"--work: {path.parent} belongs to a run with {key} {before.get(key)}, not {value}; "
                        "give another directory or delete it"
                    )
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(identity, indent=2))
        partial.replace(path)

    def _dialogues(self) -> list[Dialogue]:
        settings, vocab_size = self._settings, self._target.facts.vocab_size
        if settings.dialogues:
            found = [d for path in settings.dialogues for d in read_dialogues(path, vocab_size=vocab_size)]
        else:
            found = list(self._generate())
        cut = [d.cut(self._max_text_tokens) for d in found]
        usable = [d for d in cut if d.num_prompt_tokens > 0 and d.num_answer_tokens > 0]
        if len(usable) < 2 * settings.training.batch_size:
            raise ModelError(
                f"there are {len(usable)} dialogues with an answer, at least "
                f"{2 * settings.training.batch_size} are needed"
            )
        return usable

    def _generate(self) -> Iterator[Dialogue]:
        """Reads the parts that are there, and makes the others."""
        settings, tokenizer = self._settings, self._target.tokenizer
        directory = settings.work / "dialogues"
        directory.mkdir(exist_ok=True)
        given = None
        if settings.prompts:
            longest = self._max_text_tokens - settings.max_answer_tokens
            given = generation.read_prompts(settings.prompts, tokenizer, max_length=longest)
        count = len(given) if given is not None else settings.num_dialogues
        frame = generation.ChatFrame.of(tokenizer) if given is None else None
        with progress_bar("dialogues", count, "text") as bar:
            for number, start in enumerate(range(0, count, DIALOGUES_PER_PART)):
                path = directory / f"part-{number:05}.npz"
                indices = range(start, min(start + DIALOGUES_PER_PART, count))
                if not path.exists():
                    engine = self._plain_engine
                    if frame is not None:
                        prompts = generation.make_prompts(engine, frame, indices, seed=settings.training.seed)
                    else:
                        assert given is not None
                        prompts = given[start : indices.stop]
                    answered = generation.answer(
                        engine,
                        prompts,
                        indices,
                        seed=settings.training.seed,
                        max_tokens=settings.max_answer_tokens,
                    )
                    write_dialogues(path, answered)
                bar.update(len(indices))
                yield from read_dialogues(path, vocab_size=self._target.facts.vocab_size)

    @cached_property
    def _plain_engine(self) -> Engine:
        """The target alone, for large batches."""
        config = parse_config(
            {
                "device": self._settings.device.type,
                "models": {"target_model": {"path": str(self._settings.target)}},
                "server": {"max_concurrent_requests": DIALOGUES_PER_PART},
                "speculative_decoding": {"enabled": False},
                "inference": {
                    "max_context_length": self._max_text_tokens,
                    # It would make a text depend on whether this run was interrupted.
                    "prefix_caching": False,
                },
            }
        )
        pair = build_served_pair(config, inspect_models(config))
        assert isinstance(pair.engine, Engine)
        return pair.engine

    def _free_memory(self) -> None:
        """For the steps that follow."""
        gc.collect()
        if self._settings.device.type == "cuda":
            torch.cuda.empty_cache()

    def _compute_features(self, files: FeatureFiles) -> None:
        total = sum(len(d.token_ids) for d in files.dialogues)
        todo = sum(len(d.token_ids) for _, dialogues in files.missing() for d in dialogues)
        with progress_bar("features", total, "token") as bar:
            bar.update(total - todo)
            if todo:
                self._check_disk(files.directory, todo)
                longest = max(len(d.token_ids) for d in files.dialogues)
                target = load_model(
                    self._settings.target, dtype=self._target.dtype, device=self._settings.device
                )
                num_blocks = 2 * (longest + MAX_FORWARD_TOKENS) // _BLOCK_SIZE
                runner = build_runner(target, num_blocks=num_blocks, block_size=_BLOCK_SIZE)
                compute_features(files, runner, HiddenStateTap(target, self._layer_ids), bar.update)

    def _check_disk(self, directory: Path, num_tokens: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        needed = num_tokens * len(self._layer_ids) * self._target.facts.hidden_size * 2
        free = shutil.disk_usage(directory).free
        if needed > free:
            raise ResourceError(
                f"--work: {directory}: the features need {needed / 2**30:.1f} GiB, "
                f"{free / 2**30:.1f} are free"
            )

    def _train(
        self, files: FeatureFiles, token_ids: Sequence[int], *, num_held_out: int
    ) -> tuple[DraftHead, Progress]:
        settings, device = self._settings, self._settings.device
        target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            settings.target, dtype=self._target.dtype, local_files_only=True
        )
        config = new_head.make_head_config(
            target,
            layer_ids=self._layer_ids,
            draft_vocab_size=len(token_ids),
            max_length=self._target.facts.max_position_embeddings,
        )
        teacher = new_head.make_teacher(target).to(device)
        head = new_head.make_head(
            target, config, torch.tensor(token_ids), seed=settings.training.seed, device=device
        )
        del target
        trainer = Trainer(
            head,
            teacher,
            settings.training,
            device=device,
            compute_dtype=_training_dtype(device),
        )
        with progress_bar("training", 100, "%") as bar:
            train(
                trainer,
                settings.training,
                files.dialogues,
                FeatureReader(files),
                settings.work / "training.pt",
                num_held_out=num_held_out,
                report=lambda progress: _show(bar, progress, settings.training),
            )
        return trainer.head, trainer.progress

    def _origin(self, learned: Sequence[Dialogue], token_ids: Sequence[int], progress: Progress) -> Origin:
        settings = self._settings
        sources = settings.dialogues or ([settings.prompts] if settings.prompts else [])
        return Origin(
            target_name=settings.target.resolve().name,
            target_digest=self._target.digest.model,
            num_dialogues=len(learned),
            num_answer_tokens=sum(d.num_answer_tokens for d in learned),
            data=f"answers to {', '.join(path.name for path in sources)}" if sources else "self-made",
            layer_ids=self._layer_ids,
            draft_vocab_size=len(token_ids),
            coverage=coverage(learned, token_ids),
            unrolled_steps=settings.training.unrolled_steps,
            num_steps=progress.step,
            num_tokens=progress.num_tokens,
            training_minutes=progress.seconds / 60,
            best_step=progress.best_step,
            held_out=tuple(progress.held_out),
            machine=_describe_machine(settings.device),
            command=settings.command,
        )

    def _write(self, directory: Path, head: DraftHead, token_ids: Sequence[int], *, card: str) -> None:
        write_head(
            directory,
            head,
            token_ids,
            target_name=self._settings.target.resolve().name,
            target_architecture=self._target.facts.architecture,
            num_speculative_tokens=self._settings.training.unrolled_steps,
            dtype=self._target.dtype,
            card=card,
        )

    def _evaluate(self, head: Path, held_out: Sequence[Dialogue], learned: Sequence[Dialogue]) -> Evaluation:
        settings = self._settings
        room = max(1, self._target.facts.max_position_embeddings - EVALUATED_TOKENS)
        known = {d.prompt for d in learned}
        prompts = dict.fromkeys(d.prompt[:room] for d in held_out)
        new = [prompt for prompt in prompts if prompt not in known]
        return evaluate_apart(
            settings.target,
            head,
            (new or list(prompts))[:EVALUATED_PROMPTS],
            device=settings.device.type,
            max_tokens=EVALUATED_TOKENS,
        )


def _hash(path: Path | None) -> str | None:
    """Of a file's content: one that was changed is another one."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None else None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _split(dialogues: Sequence[Dialogue]) -> tuple[list[Dialogue], list[Dialogue]]:
    """Those held out, and those to learn from."""
    count = min(MAX_HELD_OUT, max(1, len(dialogues) // 20))
    held_out = range(0, len(dialogues), len(dialogues) // count)[:count]  # of every file some
    return [dialogues[i] for i in held_out], [d for i, d in enumerate(dialogues) if i not in held_out]


def _training_dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu" and not has_native_bfloat16():
        return torch.float32
    return torch.bfloat16


def _describe_machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores"


def _show(bar: Any, progress: Progress, settings: TrainingSettings) -> None:
    bar.n = round(100 * min(1.0, progress.share(settings)), 1)
    right, held_out = (
        " ".join(f"{share:.2f}" for share in shares) for shares in (progress.acceptance, progress.held_out)
    )
    bar.set_postfix_str(
        f"step {progress.step}, loss {progress.loss:.2f}, right {right}, held out {held_out or '-'}"
    )
