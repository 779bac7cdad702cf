"""A watch that is refused is tried for ever: it ends neither the others nor the operator."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import kopf

from draftline_operator.handlers.watch import kopf_settings


def test_kopf_never_gives_up() -> None:
    backoffs = kopf_settings(()).networking.error_backoffs
    assert isinstance(backoffs, Iterable)
    first = list(itertools.islice(backoffs, 1000))
    assert len(first) == 1000
    assert first[:5] == [1, 1, 2, 3, 5]
    assert max(first) == first[-1] < 30
    assert list(itertools.islice(backoffs, 1000)) == first, "each request begins anew"


def test_kopf_writes_nothing_and_needs_no_right_but_those_on_what_it_watches() -> None:
    settings = kopf_settings(())
    assert settings.scanning.disabled
    assert not settings.posting.enabled


def test_kopf_compares_nothing() -> None:
    storage = kopf_settings(()).persistence.diffbase_storage
    body = kopf.Body({"metadata": {"annotations": {"a": "b"}}, "spec": {"replicas": 1}})
    assert storage.build(body=body) == {}
    assert storage.fetch(body=body) is None
