"""Language models that are plain functions of the prefix, behind the engine's real everything else.

A `FunctionRunner` takes the place of a `ModelRunner`. Its cache keeps token ids where a model's keeps keys
and values, slot by slot, and the function is applied to what the block table leads to: a wrong length, a
stale slot or a foreign block gives another text. It costs next to nothing, any text can be dictated,
and a forward can be charged to a fake clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from draftline_server.config import SpeculativeDecodingConfig
from draftline_server.core.admission import RequestLimits
from draftline_server.core.block_pool import BlockPool
from draftline_server.core.clock import Clock
from draftline_server.core.detokenizer import Decode
from draftline_server.core.scheduler import Scheduler
from draftline_server.engine import Engine, EngineParts
from draftline_server.model.runner import ModelRunner, SequenceInput
from draftline_server.speculation.chain import ProposerChain
from draftline_server.speculation.draft_model import DraftModelProposer
from draftline_server.speculation.length_controller import ControllerSettings, LengthController
from draftline_server.speculation.ngram import NgramProposer
from draftline_server.speculation.proposer import Proposer
from draftline_server.speculation.step_costs import StepCosts

NextToken = Callable[[tuple[int, ...]], int]
"""The token that follows a prefix."""

CERTAIN = 20.0
"""The logit of the token that follows; all others have 0."""


@dataclass(slots=True)
class FakeClock:
    """Time that passes only when somebody says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FunctionRunner:
    """A `ModelRunner` for a function."""

    def __init__(
        self,
        next_token: NextToken,
        *,
        vocab_size: int,
        num_slots: int,
        block_size: int,
        charge: Callable[[int], None] = lambda num_tokens: None,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_forwards = 0
        self._next_token = next_token
        self._block_size = block_size
        self._charge = charge
        self._slots: list[int | None] = [None] * num_slots

    def forward(self, inputs: Sequence[SequenceInput]) -> Tensor:
        self.num_forwards += 1
        self._charge(sum(len(item.token_ids) for item in inputs))
        rows: list[int] = []
        for item in inputs:
            for offset, token_id in enumerate(item.token_ids):
                assert 0 <= token_id < self.vocab_size
                self._slots[self._slot(item, item.start + offset)] = token_id
        for item in inputs:  # after all writes, as in a model's layer
            end = item.start + len(item.token_ids)
            prefix = tuple(self._read(item, position) for position in range(end if item.num_logits else 0))
            rows += [self._next_token(prefix[: end - back]) for back in range(item.num_logits - 1, -1, -1)]
        logits = torch.zeros(len(rows), self.vocab_size)
        if rows:
            logits[torch.arange(len(rows)), torch.tensor(rows)] = CERTAIN
        return logits

    def clear(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            first = block_id * self._block_size
            self._slots[first : first + self._block_size] = [None] * self._block_size

    def _slot(self, item: SequenceInput, position: int) -> int:
        block, offset = divmod(position, self._block_size)
        return item.block_table[block] * self._block_size + offset

    def _read(self, item: SequenceInput, position: int) -> int:
        token_id = self._slots[self._slot(item, position)]
        assert token_id is not None, "a slot is read that was never written"
        return token_id


def make_function_engine(
    target: NextToken,
    draft: NextToken | None = None,
    *,
    decode: Decode,
    vocab_size: int = 384,
    eos_token_ids: Sequence[int] = (),
    num_blocks: int = 256,
    block_size: int = 16,
    max_running: int = 32,
    max_context_length: int = 1024,
    max_batched_tokens: int = 2048,
    speculation: Mapping[str, Any] | None = None,
    clock: Clock = time.monotonic,
    charge_target: Callable[[int], None] = lambda num_tokens: None,
    charge_draft: Callable[[int], None] = lambda num_tokens: None,
    costs: StepCosts | None = None,
) -> Engine:
    """An engine around functions. Speculation is fixed-length and never off unless told so.

    `costs` is what a warm-up would have measured.
    """
    fixed = {"adaptive": False, "fallback_to_standard_decoding": False, "max_batch_size": 64}
    config = SpeculativeDecodingConfig(**(fixed | dict(speculation or {})))

    def runner(function: NextToken, charge: Callable[[int], None]) -> ModelRunner:
        built = FunctionRunner(
            function,
            vocab_size=vocab_size,
            num_slots=num_blocks * block_size,
            block_size=block_size,
            charge=charge,
        )
        return cast(ModelRunner, built)

    draft_runner = runner(draft, charge_draft) if draft is not None else None
    proposers: list[Proposer] = []
    if "ngram" in config.methods:
        proposers.append(NgramProposer(min_length=config.ngram_min, max_length=config.ngram_max))
    if draft_runner is not None:
        proposers.append(
            DraftModelProposer(
                draft_runner,
                target_vocab_size=vocab_size,
                max_batched_tokens=max_batched_tokens,
                eos_token_ids=frozenset(eos_token_ids),
            )
        )
    controller = LengthController(
        ControllerSettings(
            num_speculative_tokens=config.num_speculative_tokens if config.enabled else 0,
            max_batch_size=config.max_batch_size,
            adaptive=config.adaptive,
            fallback=config.fallback_to_standard_decoding,
            min_acceptance_rate=config.min_acceptance_rate,
        ),
        costs,
        proposers=[proposer.name for proposer in proposers],
    )
    pool = BlockPool(num_blocks=num_blocks, block_size=block_size)
    return Engine(
        EngineParts(
            target=runner(target, charge_target),
            draft=draft_runner,
            proposers=ProposerChain(proposers),
            controller=controller,
            scheduler=Scheduler(pool=pool, max_running=max_running, max_batched_tokens=max_batched_tokens),
            limits=RequestLimits(
                vocab_size=vocab_size,
                max_context_length=max_context_length,
                max_tokens_per_request=max_context_length,
                methods=tuple(proposer.name for proposer in proposers),
                num_speculative_tokens=controller.limit,
            ),
            eos_token_ids=frozenset(eos_token_ids),
            decode=decode,
            decode_plain=decode,
            clock=clock,
        )
    )


def dictated(script: Sequence[int], *, prompt_length: int, then: int = 0) -> NextToken:
    """A model that answers any prompt of this length with `script`, and repeats one token after it."""

    def next_token(prefix: tuple[int, ...]) -> int:
        index = len(prefix) - prompt_length
        return script[index] if 0 <= index < len(script) else then

    return next_token


def wrong_at(
    positions: Sequence[int], model: NextToken, *, prompt_length: int, vocab_size: int = 384
) -> NextToken:
    """`model`, but with another token at some positions of the answer: a draft that is rejected there."""
    wrong = frozenset(positions)

    def next_token(prefix: tuple[int, ...]) -> int:
        token_id = model(prefix)
        return (token_id + 1) % vocab_size if len(prefix) - prompt_length in wrong else token_id

    return next_token


def letters(token_ids: Sequence[int]) -> str:
    """A text in which token `i` is one character, so that offsets are easy to count."""
    return "".join(chr(ord("!") + token_id) for token_id in token_ids)


def ids_of_letters(text: str) -> list[int]:
    return [ord(character) - ord("!") for character in text]
