"""What the samples of pods make of a resource. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from draftline_operator.models.load import LiveFigures, PodSample, ResourceLoad

MIN_DRAFT_TOKENS: Final = 100
"""Fewer say nothing about acceptance."""


def total_load(
    samples: Iterable[PodSample | None], *, now: float, fresh_seconds: float
) -> ResourceLoad | None:
    """Of pods that take new requests. One without a fresh sample counts like the average of the others."""
    staying = [sample for sample in samples if sample is None or not sample.is_draining]
    fresh = [s for s in staying if s is not None and now - s.sampled_at <= fresh_seconds]
    if not fresh:
        return None
    share = len(staying) / len(fresh)
    return ResourceLoad(
        waiting=round(share * sum(sample.waiting for sample in fresh)),
        running=round(share * sum(sample.running for sample in fresh)),
        sampled_at=min(sample.sampled_at for sample in fresh),
    )


def live_figures(
    samples: Mapping[str, PodSample],
    load: ResourceLoad | None,
    *,
    drafted: Mapping[str, float],
    accepted: Mapping[str, float],
    last: LiveFigures | None,
) -> LiveFigures:
    """`drafted` and `accepted` are the pods' counters at the time of `last`; a pod without says nothing."""
    known = {uid: sample for uid, sample in samples.items() if uid in drafted}
    new_drafts = sum(_growth(s.draft_tokens, drafted[uid]) for uid, s in known.items())
    new_accepted = sum(_growth(s.accepted_tokens, accepted[uid]) for uid, s in known.items())
    rate = last.acceptance_rate if last is not None and samples else None
    if new_drafts >= MIN_DRAFT_TOKENS:
        rate = round(min(1.0, new_accepted / new_drafts), 2)
    return LiveFigures(
        queue_depth=_rounded(load.waiting) if load is not None else None,
        acceptance_rate=rate,
        speculation_state=_state(samples.values()),
    )


def _growth(counter: float, before: float) -> float:
    return counter - before if counter >= before else counter  # a container that started anew


def _rounded(count: int) -> int:
    """To two digits: a status is for people."""
    digits = len(str(count)) - 2
    return round(count, -digits) if digits > 0 else count


def _state(samples: Iterable[PodSample]) -> str | None:
    said = {sample.is_speculating for sample in samples if sample.is_speculating is not None}
    if not said:
        return None
    return "Mixed" if len(said) > 1 else "Active" if True in said else "Off"
