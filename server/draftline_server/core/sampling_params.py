"""What a client may ask for, checked once at the door."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field

from draftline_server.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1
SMALLEST_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. The proto explains each field."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    include_stop_string: bool = False
    skip_special_tokens: bool = True

    @property
    def is_greedy(self) -> bool:
        """Temperature 0, and what is so close to it that logits divided by it would overflow."""
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    def validate(self, vocab_size: int) -> None:
        """Raises `InvalidRequestError` naming the first field that is out of its bounds."""
        check_counts(stop=self.stop, stop_token_ids=self.stop_token_ids, logit_bias=self.logit_bias)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_is_open=True)
        _check_range("top_k", self.top_k, -1, 2**63 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_is_open=True)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, 2**63 - 1)
        _check_range("min_tokens", self.min_tokens, 0, 2**63 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"{self.min_tokens} is above max_tokens ({self.max_tokens})")
        if self.seed is not None:
            _check_range("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _check_range("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        self._validate_stops(vocab_size)
        self._validate_logit_bias(vocab_size)

    def _validate_stops(self, vocab_size: int) -> None:
        for index, stop in enumerate(self.stop):
            if not stop:
                _refuse(f"stop[{index}]", "must not be empty")
            if len(stop) > MAX_STOP_STRING_LENGTH:
                _refuse(
                    f"stop[{index}]",
                    f"{len(stop)} characters, at most {MAX_STOP_STRING_LENGTH} are allowed",
                )
        for index, token_id in enumerate(self.stop_token_ids):
            check_token_id(f"sampling.stop_token_ids[{index}]", token_id, vocab_size)

    def _validate_logit_bias(self, vocab_size: int) -> None:
        for token_id, bias in self.logit_bias.items():
            check_token_id("sampling.logit_bias", token_id, vocab_size)
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Speculation of one request; None leaves the choice to the server's configuration."""

    enabled: bool | None = None
    max_draft_tokens: int | None = None
    methods: tuple[str, ...] = ()

    def validate(self, *, available_methods: tuple[str, ...], num_speculative_tokens: int) -> None:
        """Raises `InvalidRequestError` for what this server cannot do."""
        if self.max_draft_tokens is not None and not 0 <= self.max_draft_tokens <= num_speculative_tokens:
            _refuse(
                "speculation.max_draft_tokens",
                f"{self.max_draft_tokens} is not in [0, {num_speculative_tokens}], this server's limit",
            )
        for index, method in enumerate(self.methods):
            if method not in available_methods:
                offered = ", ".join(available_methods) or "none"
                _refuse(
                    f"speculation.methods[{index}]", f"{method} is not available here (there is: {offered})"
                )
        if len(set(self.methods)) != len(self.methods):
            _refuse("speculation.methods", "names a method twice")


def check_counts(*, stop: Sized, stop_token_ids: Sized, logit_bias: Sized) -> None:
    """Raises `InvalidRequestError` where one of these has too many entries, without looking at any."""
    if len(stop) > MAX_STOP_STRINGS:
        _refuse("stop", f"{len(stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        _refuse("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} are allowed")
    if len(logit_bias) > MAX_LOGIT_BIASES:
        _refuse("logit_bias", f"at most {MAX_LOGIT_BIASES} entries are allowed")


def check_token_id(path: str, token_id: int, vocab_size: int) -> None:
    """Raises `InvalidRequestError` where `token_id` is not in the vocabulary."""
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(path, f"token id {token_id} is not in [0, {vocab_size})")


def _check_range(name: str, value: float, low: float, high: float, *, low_is_open: bool = False) -> None:
    # Written so that NaN fails: every comparison with it is false.
    if not math.isfinite(value) or not (low < value if low_is_open else low <= value) or not value <= high:
        bracket = "(" if low_is_open else "["
        numbers = [str(n) if isinstance(n, int) else f"{n:g}" for n in (value, low, high)]
        _refuse(name, f"{numbers[0]} is not in {bracket}{numbers[1]}, {numbers[2]}]")


def _refuse(name: str, reason: str) -> None:
    path = name if name.startswith("speculation.") else f"sampling.{name}"
    raise InvalidRequestError(path, reason)
