"""The greedy choice is torch's, wherever it is computed."""

from __future__ import annotations

import pytest
import torch

from draftline_server.model.sampling import argmax


@pytest.mark.parametrize("size", [1, 7, 8, 9, 384, 49_152])
@pytest.mark.parametrize("rows", [1, 3, 32])
def test_it_is_that_of_torch(rows: int, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(rows, size, generator=generator)
    logits[:, : size // 3] = float("-inf")
    assert argmax(logits) == logits.argmax(dim=-1).tolist()
    assert argmax(logits.double()) == logits.argmax(dim=-1).tolist()


def test_of_equals_it_is_the_first() -> None:
    logits = torch.zeros(3, 100)
    logits[1, [17, 60, 99]] = 2.0
    logits[2, 99] = 1.0
    assert argmax(logits) == [0, 17, 99]


def test_rows_that_lie_apart_are_read_right() -> None:
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(1)).T
    assert argmax(logits) == logits.argmax(dim=-1).tolist()


def test_what_is_no_number_still_gives_a_token() -> None:
    logits = torch.full((2, 50), float("nan"))
    assert all(0 <= token_id < 50 for token_id in argmax(logits))
