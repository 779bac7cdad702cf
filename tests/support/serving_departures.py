"""Watches pods leave, and what each of them had to do at that moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from support.serving_pods import ServingPods, is_leaving

_INTERVAL_SECONDS = 0.3


@dataclass
class Departures:
    """By the name of the pod, requests in flight when it was first seen to be leaving."""

    in_flight: dict[str, int | None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.in_flight)

    def see(self, serving: ServingPods) -> None:
        """It still answers: for some seconds it does not even know."""
        for pod in serving.pods():
            name = pod["metadata"]["name"]
            if is_leaving(pod) and name not in self.in_flight:
                self.in_flight[name] = serving.in_flight(name)


@contextmanager
def departures_of(serving: ServingPods) -> Iterator[Departures]:
    """Looks all the time while the block runs."""
    departures, is_over = Departures(), threading.Event()
    failures: list[BaseException] = []

    def look() -> None:
        try:
            while not is_over.wait(_INTERVAL_SECONDS):
                departures.see(serving)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield departures
    finally:
        is_over.set()
        thread.join()
    assert not failures, failures
