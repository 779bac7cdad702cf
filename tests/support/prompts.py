"""Prompts of all kinds and lengths, deterministic."""

from __future__ import annotations

import random

from support.tiny_tokenizers import DEFAULT_VOCAB_SIZE, SPECIAL_TOKENS


def random_prompt(length: int, *, seed: int, vocab_size: int = DEFAULT_VOCAB_SIZE) -> list[int]:
    """Plain tokens, none of them special."""
    source = random.Random(seed)
    return [source.randrange(len(SPECIAL_TOKENS), vocab_size) for _ in range(length)]


def mixed_prompts(count: int, *, longest: int = 70, seed: int = 0) -> list[list[int]]:
    """Lengths from one token to `longest`; among the first four is one word repeated 48 times."""
    source = random.Random(seed)
    prompts: list[list[int]] = []
    for index in range(count):
        if index % 8 == 1:
            word = random_prompt(1 + index // 8 % 3, seed=seed * 1000 + index)
            prompts.append(word * 48)
        elif index % 8 == 3:
            # A text that comes back to its beginning, so that the n-gram proposer has something to say.
            passage = random_prompt(12, seed=seed * 1000 + index)
            prompts.append([*passage, *random_prompt(5, seed=index), *passage[:6]])
        else:
            length = 1 if index == 0 else source.randint(2, longest)
            prompts.append(random_prompt(length, seed=seed * 1000 + index))
    return prompts
