"""Prompts of all kinds and lengths, deterministic."""

from __future__ import annotations

import random

from support.tiny_tokenizers import DEFAULT_VOCAB_SIZE, SPECIAL_TOKENS


def random_prompt(length: int, *, seed: int, vocab_size: int = DEFAULT_VOCAB_SIZE) -> list[int]:
    """Plain tokens, none of them special."""
    source = random.Random(seed)
    return [source.randrange(len(SPECIAL_TOKENS), vocab_size) for _ in range(length)]


def mixed_prompts(
    count: int, *, longest: int = 70, seed: int = 0, vocab_size: int = DEFAULT_VOCAB_SIZE
) -> list[list[int]]:
    """Lengths from one token to `longest`; among the first four is one word repeated 48 times."""
    source = random.Random(seed)
    prompts: list[list[int]] = []

    def passage(length: int, seed: int) -> list[int]:
        return random_prompt(length, seed=seed, vocab_size=vocab_size)

    for index in range(count):
        if index % 8 == 1:
            prompts.append(passage(1 + index // 8 % 3, seed * 1000 + index) * 48)
        elif index % 8 == 3:
            # A text that comes back to its beginning, so that the n-gram proposer has something to say.
            begin = passage(12, seed * 1000 + index)
            prompts.append([*begin, *passage(5, index), *begin[:6]])
        else:
            length = 1 if index == 0 else source.randint(2, longest)
            prompts.append(passage(length, seed * 1000 + index))
    return prompts
