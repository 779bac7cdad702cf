"""Lets the target write the texts that its head learns from, in large batches by the engine itself.

Self-made dialogues begin where the chat template puts the user's words: the target makes those up, too, and
then answers. Every text has a seed of its own, so that a run which was interrupted makes the same ones.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline_server.core.admission import admit
from draftline_server.core.sampling_params import SamplingParams, SpeculationParams
from draftline_server.distill.dialogues import Dialogue
from draftline_server.engine import Engine
from draftline_server.errors import InvalidRequestError, ModelError
from draftline_server.model.tokenizer import Tokenizer

MAX_USER_TOKENS = 128
_TEMPERATURES = (0.6, 1.0)
_PROBES = ("A quick note", "Zebras: 7 of them!")


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The tokens that a chat template puts around a user's words."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatFrame:
        """Raises `ModelError` where there is no template."""
        if not tokenizer.has_chat_template:
            raise ModelError(
                "--target: its tokenizer has no chat template, so it cannot make up dialogues; give --prompts"
            )
        try:
            one, other = (tokenizer.encode_chat([("user", text)]) for text in _PROBES)
        except InvalidRequestError as error:
            raise ModelError(
                f"its chat template takes no user's words alone ({error}); give --prompts"
            ) from error
        return cls(_common(one, other), _common(one[::-1], other[::-1])[::-1])


def _common(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The tokens that both begin with."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(token_id for token_id, _ in pairs)


def read_prompts(path: Path, tokenizer: Tokenizer, *, max_length: int) -> list[tuple[int, ...]]:
    """Prompts of a file: lines of text, or JSON objects with ``prompt`` or ``messages`` (.jsonl).

    Raises `ModelError` naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ModelError(f"--prompts: {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"--prompts: {path}: not UTF-8") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompt = _encode_prompt(line, tokenizer, is_json=path.suffix == ".jsonl")
                if len(prompt) > max_length:
                    raise ValueError(f"has {len(prompt)} tokens, at most {max_length} are allowed")
                prompts.append(tuple(prompt))
            except (ValueError, TypeError, KeyError, InvalidRequestError) as error:
                raise ModelError(
                    f"--prompts: {path}: line {number}: {' '.join(str(error).split())}"
                ) from error
    if not prompts:
        raise ModelError(f"--prompts: {path}: has no prompts")
    return prompts


def _encode_prompt(line: str, tokenizer: Tokenizer, *, is_json: bool) -> list[int]:
    document = json.loads(line) if is_json else {"prompt": line}
    if not isinstance(document, dict) or not {"prompt", "messages"} & document.keys():
        raise ValueError("neither prompt nor messages is there")
    if "messages" in document:
        messages = [(_text(m, "role"), _text(m, "content")) for m in document["messages"]]
        while messages and messages[-1][0] == "assistant":  # the target gives its own answer
            messages.pop()
        return tokenizer.encode_chat(messages)
    prompt = _text(document, "prompt")
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat([("user", prompt)])
    return tokenizer.encode(prompt)


def _text(document: Any, key: str) -> str:
    value = document[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} is not a text")
    return value


def make_prompts(
    engine: Engine, frame: ChatFrame, indices: Sequence[int], *, seed: int
) -> list[tuple[int, ...]]:
    """Prompts that the target makes up, one for each index."""
    options = [
        SamplingParams(
            temperature=1.0,
            max_tokens=MAX_USER_TOKENS,
            min_tokens=4,
            stop_token_ids=frame.after[:1],
            seed=_seed_of(seed, "user", index),
        )
        for index in indices
    ]
    prompts = []
    for tokens, was_stopped in _complete(engine, [frame.before] * len(indices), options):
        words = tokens[:-1] if was_stopped else tokens
        prompts.append((*frame.before, *words, *frame.after))
    return prompts


def answer(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    indices: Sequence[int],
    *,
    seed: int,
    max_tokens: int,
) -> list[Dialogue]:
    """The target's answers."""
    options = []
    for index in indices:
        temperature = random.Random(f"{seed}/temperature/{index}").uniform(*_TEMPERATURES)
        options.append(
            SamplingParams(
                temperature=temperature, max_tokens=max_tokens, seed=_seed_of(seed, "answer", index)
            )
        )
    answered = zip(prompts, _complete(engine, prompts, options), strict=True)
    return [Dialogue((*prompt, *tokens), len(prompt)) for prompt, (tokens, _) in answered]


def _complete(
    engine: Engine, prompts: Sequence[tuple[int, ...]], options: Sequence[SamplingParams]
) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Tokens of each prompt's completion, and whether a stop token ended it, which is then the last one."""
    tokens: list[list[int]] = [[] for _ in prompts]
    was_stopped = [False] * len(prompts)
    for index, (prompt, sampling) in enumerate(zip(prompts, options, strict=True)):
        engine.add_request(
            admit(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling=sampling,
                speculation=SpeculationParams(enabled=False),
                limits=engine.limits,
                now=0.0,
            )
        )
    while engine.has_work:
        for delta in engine.step():
            index = int(delta.request_id)
            tokens[index] += delta.token_ids
            if delta.summary is not None:
                was_stopped[index] = delta.summary.matched_stop is not None
    yield from ((tuple(own), stopped) for own, stopped in zip(tokens, was_stopped, strict=True))


def _seed_of(seed: int, part: str, index: int) -> int:
    return random.Random(f"{seed}/{part}/{index}").getrandbits(63)
