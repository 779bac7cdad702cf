"""What transformers alone says about a model: the reference that the engine must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


class Reference:
    """One model in float32, with transformers' own attention and cache."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._greedy: dict[tuple[tuple[int, ...], int, bool], list[int]] = {}

    @cached_property
    def model(self) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(
            self._directory, dtype=torch.float32, local_files_only=True
        )
        return cast(PreTrainedModel, model.eval())

    def greedy(self, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """The new tokens of `generate` at temperature 0."""
        key = (tuple(prompt), max_tokens, ignore_eos)
        if key not in self._greedy:
            self._greedy[key] = self._generate(prompt, max_tokens, ignore_eos)
        return self._greedy[key]

    def _generate(self, prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> list[int]:
        config = self.model.generation_config
        assert config is not None
        eos = config.eos_token_id
        try:
            if ignore_eos:
                config.eos_token_id = None
            output = cast(Any, self.model).generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        finally:
            config.eos_token_id = eos
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Float32 logits after each of the tokens, ``[tokens, vocab]``: one forward, teacher-forced."""
        logits: Tensor = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits.float()

    @torch.inference_mode()
    def batch_logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits after the last token of sequences of one length, ``[sequences, vocab]``."""
        logits: Tensor = self.model(torch.tensor([list(s) for s in sequences]), use_cache=False).logits[:, -1]
        return logits.float()


ReferenceOf = Callable[[Path], Reference]
"""The reference of a model directory."""
