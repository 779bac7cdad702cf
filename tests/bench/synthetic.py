"""Synthetic acceptance: drafts and verification cost what they cost, but a chosen share stands.

No good draft exists for the demo's target, and what speculation gains at some acceptance is a question of
cost alone. The output is wrong on purpose, which is why this lives in the bench: the server has no
switch for it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from draftline_server.speculation.verification import Verified, VerifyTask, verify


class SyntheticVerify:
    """Takes `verify`'s place: does its work, then lets each draft token stand with probability `rate`."""

    def __init__(self, *, seed: int = 0) -> None:
        self.rate = 0.0
        self._random = random.Random(seed)

    def __call__(self, logits: Tensor, tasks: Sequence[VerifyTask]) -> list[Verified]:
        results = verify(logits, tasks)
        return [self._replace(task, result) for task, result in zip(tasks, results, strict=True)]

    def _replace(self, task: VerifyTask, result: Verified) -> Verified:
        drafted = task.draft_token_ids
        num_accepted = 0
        while num_accepted < len(drafted) and self._random.random() < self.rate:
            num_accepted += 1
        return Verified((*drafted[:num_accepted], result.token_ids[-1]))
