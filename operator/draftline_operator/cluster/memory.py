"""What is known of watched objects without asking: kept current by watches, by reads and by our own writes.

Never certain. A watch is late by a moment, and what was deleted while it was down it never tells; so all is
forgotten at each periodic look, and whoever is about to write asks the API server first.
"""

from __future__ import annotations

import builtins
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from draftline_operator.constants import OUR_LABELS
from draftline_operator.models.kinds import SPECULATIVE_DEPLOYMENT, Kind
from draftline_operator.models.observed import Object

_REMEMBERED_DELETIONS: Final = 4096
"""Far more than there are during one request, for whose answer they matter."""


@dataclass(slots=True)
class _Entry:
    body: Object
    kept_at: int


@dataclass(slots=True)
class _Shelf:
    """Of one kind."""

    entries: defaultdict[str, dict[str, _Entry]] = field(default_factory=lambda: defaultdict(dict))
    """By namespace and name."""
    complete: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By namespace, labels of lists of which nothing is missing."""
    deleted: dict[str, None] = field(default_factory=dict)
    """Uids of late: an answer that was on its way does not bring them back."""


class ObjectMemory:
    """Of these kinds what carries our labels, which is what is watched; of resources all."""

    def __init__(self, kinds: Iterable[Kind]) -> None:
        self._shelves = {kind: _Shelf() for kind in kinds}
        self._now = 0

    # ------------------------------------------------------------------------------------------------- asking

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """None where it is not known, which says nothing about whether it exists."""
        shelf = self._shelves.get(kind)
        entry = shelf.entries[namespace].get(name) if shelf is not None and namespace is not None else None
        return entry.body if entry is not None else None

    def list(self, kind: Kind, namespace: str | None, labels: str | None) -> builtins.list[Object] | None:
        """By name; None where not all of them are known."""
        shelf = self._shelves.get(kind)
        if shelf is None or namespace is None or labels is None or labels not in shelf.complete[namespace]:
            return None
        entries = shelf.entries[namespace]
        return [entries[name].body for name in sorted(_matching(entries, labels))]

    # ----------------------------------------------------------------------------------------------- learning

    def now(self) -> int:
        """To be taken before a request whose answer is to be learned."""
        return self._now

    def saw(self, kind: Kind, event: str | None, body: Object) -> None:
        """Of a watch; `event` is None for what it lists."""
        shelf = self._shelves[kind]
        if event == "DELETED":  # or it lost our labels
            _delete(shelf, body)
            return
        shelf.deleted.pop(body["metadata"]["uid"], None)
        self._keep(kind, body)

    def learn(self, kind: Kind, body: Object) -> None:
        """Answered to a read or a write."""
        shelf = self._shelves.get(kind)
        if shelf is not None and body["metadata"]["uid"] not in shelf.deleted:
            self._keep(kind, body)

    def learn_missing(self, kind: Kind, namespace: str | None, name: str, *, since: int) -> None:
        """That there was no such object."""
        shelf = self._shelves.get(kind)
        if shelf is not None and namespace is not None:
            _drop(shelf.entries[namespace], [name], since)

    def learn_list(
        self, kind: Kind, namespace: str | None, labels: str | None, found: Iterable[Object], *, since: int
    ) -> None:
        """That these are all; only what equalities select can be told apart later."""
        shelf = self._shelves.get(kind)
        if shelf is None or namespace is None or not labels or "!=" in labels:
            return
        bodies = list(found)
        entries = shelf.entries[namespace]
        _drop(entries, _matching(entries, labels) - {body["metadata"]["name"] for body in bodies}, since)
        for body in bodies:
            self.learn(kind, body)
        if all(_is_watched(kind, body) for body in bodies):
            shelf.complete[namespace].add(labels)
        else:
            shelf.complete[namespace].discard(labels)

    def forget(self, namespace: str | None = None) -> None:
        """All of a namespace or, for None, of all."""
        for shelf in self._shelves.values():
            for known in (shelf.entries, shelf.complete):
                if namespace is None:
                    known.clear()
                else:
                    known.pop(namespace, None)

    def _keep(self, kind: Kind, body: Object) -> None:
        """Unless a newer state is known."""
        if not _is_watched(kind, body):
            return
        entries, name = self._shelves[kind].entries[body["metadata"]["namespace"]], body["metadata"]["name"]
        known = entries.get(name)
        if known is None or _version(known.body) <= _version(body):
            self._now += 1
            entries[name] = _Entry(_without_managers(body), self._now)


def _delete(shelf: _Shelf, body: Object) -> None:
    metadata = body["metadata"]
    entries, uid = shelf.entries[metadata["namespace"]], metadata["uid"]
    known = entries.get(metadata["name"])
    if known is not None and known.body["metadata"]["uid"] == uid:  # else it is a namesake made since
        del entries[metadata["name"]]
    shelf.deleted[uid] = None
    if len(shelf.deleted) > _REMEMBERED_DELETIONS:
        del shelf.deleted[next(iter(shelf.deleted))]


def _drop(entries: dict[str, _Entry], names: Iterable[str], since: int) -> None:
    """What was kept since then is newer than the answer that lacks it."""
    for name in names:
        if name in entries and entries[name].kept_at <= since:
            del entries[name]


def _matching(entries: Mapping[str, _Entry], labels: str) -> set[str]:
    wanted = dict(part.split("=", 1) for part in labels.split(",")).items()
    return {name for name, entry in entries.items() if wanted <= _labels(entry.body).items()}


def _is_watched(kind: Kind, body: Object) -> bool:
    return kind == SPECULATIVE_DEPLOYMENT or OUR_LABELS.items() <= _labels(body).items()


def _labels(body: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = body["metadata"].get("labels") or {}
    return labels


def _version(body: Object) -> int:
    """Versions of one kind can be compared: https://kubernetes.io/docs/reference/using-api/api-concepts/."""
    return int(body["metadata"]["resourceVersion"])


def _without_managers(body: Object) -> Object:
    """Half of an object's size, and nobody asks for them."""
    metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    return {**body, "metadata": metadata}
