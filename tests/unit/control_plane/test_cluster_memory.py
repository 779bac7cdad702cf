"""What is remembered of the cluster: never older than what was told last, and never taken for everything."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from draftline_operator.cluster.memory import ObjectMemory
from draftline_operator.cluster.remembering import RememberedCluster, RememberingCluster
from draftline_operator.constants import APP_NAME, INSTANCE_LABEL, NAME_LABEL, OUR_LABELS
from draftline_operator.errors import NotFromMemoryError
from draftline_operator.handlers.registry import News, on_child
from draftline_operator.models.kinds import CONFIG_MAP, DEPLOYMENT, POD, SECRET, SPECULATIVE_DEPLOYMENT, Kind
from draftline_operator.models.observed import Object
from draftline_operator.services.worker import WorkQueue
from support.object_store import ObjectStore

NAMESPACE = "models"
OF_CHAT = f"{NAME_LABEL}={APP_NAME},{INSTANCE_LABEL}=chat"


def pod(
    name: str, version: int, *, uid: str = "", namespace: str = NAMESPACE, labels: Any = None, **status: Any
) -> Object:
    ours = OUR_LABELS | {INSTANCE_LABEL: "chat"}
    metadata = {
        "namespace": namespace,
        "name": name,
        "uid": uid or f"uid-of-{name}",
        "resourceVersion": str(version),
        "labels": ours if labels is None else labels,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}


def make_memory() -> ObjectMemory:
    return ObjectMemory([SPECULATIVE_DEPLOYMENT, DEPLOYMENT, CONFIG_MAP, POD])


def version(memory: ObjectMemory, name: str) -> int | None:
    found = memory.get(POD, NAMESPACE, name)
    return int(found["metadata"]["resourceVersion"]) if found is not None else None


def names(memory: ObjectMemory) -> list[str] | None:
    found = memory.list(POD, NAMESPACE, OF_CHAT)
    return [body["metadata"]["name"] for body in found] if found is not None else None


def learn_all(memory: ObjectMemory, *pods: Object, since: int | None = None) -> None:
    memory.learn_list(POD, NAMESPACE, OF_CHAT, pods, since=memory.now() if since is None else since)


# --------------------------------------------------------------------------------------------- single objects


def test_what_was_told_last_is_what_is_known() -> None:
    memory = make_memory()
    assert version(memory, "a") is None
    memory.saw(POD, "ADDED", pod("a", 10))
    memory.learn(POD, pod("a", 12))  # a write of ours
    memory.saw(POD, "MODIFIED", pod("a", 11))  # its event comes late
    assert version(memory, "a") == 12
    memory.saw(POD, "MODIFIED", pod("a", 100))
    assert version(memory, "a") == 100, "compared as numbers"


def test_what_was_deleted_is_unknown_and_an_answer_on_its_way_does_not_bring_it_back() -> None:
    memory = make_memory()
    memory.saw(POD, "ADDED", pod("a", 10))
    memory.saw(POD, "DELETED", pod("a", 11))
    memory.learn(POD, pod("a", 10))
    assert version(memory, "a") is None
    memory.saw(POD, "ADDED", pod("a", 12))  # it had only lost our labels
    assert version(memory, "a") == 12


def test_the_end_of_a_namesake_is_not_that_of_its_successor() -> None:
    memory = make_memory()
    memory.saw(POD, "ADDED", pod("a", 10, uid="first"))
    memory.saw(POD, "ADDED", pod("a", 12, uid="second"))
    memory.saw(POD, "DELETED", pod("a", 11, uid="first"))
    assert version(memory, "a") == 12


def test_what_nobody_watches_is_not_remembered() -> None:
    memory = make_memory()
    memory.learn(POD, pod("foreign", 1, labels={NAME_LABEL: APP_NAME}))
    memory.learn(SECRET, pod("secret", 1) | {"kind": "Secret"})
    assert memory.get(POD, NAMESPACE, "foreign") is None
    assert memory.get(SECRET, NAMESPACE, "secret") is None
    memory.learn(SPECULATIVE_DEPLOYMENT, pod("chat", 1, labels={}))
    assert memory.get(SPECULATIVE_DEPLOYMENT, NAMESPACE, "chat") is not None, "resources need no labels"


def test_field_managers_are_left_out_and_nothing_else() -> None:
    memory, body = make_memory(), pod("a", 1, phase="Running")
    body["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    memory.learn(POD, body)
    assert memory.get(POD, NAMESPACE, "a") == pod("a", 1, phase="Running")
    assert "managedFields" in body["metadata"], "the caller's stays as it is"


# ------------------------------------------------------------------------------------------------------ lists


def test_a_list_is_known_once_it_was_asked_for_and_follows_events() -> None:
    memory = make_memory()
    memory.saw(POD, "ADDED", pod("a", 10))
    assert names(memory) is None, "there may be others"
    learn_all(memory, pod("b", 11), pod("a", 10))
    assert names(memory) == ["a", "b"]
    memory.saw(POD, "ADDED", pod("c", 12))
    memory.saw(POD, "DELETED", pod("a", 13))
    memory.saw(POD, "ADDED", pod("other", 14, labels=OUR_LABELS | {INSTANCE_LABEL: "code"}))
    memory.saw(POD, "ADDED", pod("elsewhere", 15, namespace="others"))
    assert names(memory) == ["b", "c"]
    assert memory.list(POD, "others", OF_CHAT) is None


def test_a_list_takes_away_what_it_lacks_but_for_what_is_newer_than_its_question() -> None:
    memory = make_memory()
    memory.saw(POD, "ADDED", pod("ghost", 10))
    since = memory.now()
    memory.saw(POD, "ADDED", pod("new", 12))
    memory.saw(POD, "DELETED", pod("gone", 13))
    learn_all(memory, pod("gone", 11), since=since)
    assert names(memory) == ["new"]


def test_a_list_with_something_that_nobody_watches_is_asked_for_each_time() -> None:
    memory = make_memory()
    learn_all(memory, pod("a", 10), pod("foreign", 11, labels={NAME_LABEL: APP_NAME, INSTANCE_LABEL: "chat"}))
    assert names(memory) is None
    assert version(memory, "a") == 10


def test_a_list_is_asked_for_again_once_something_in_it_is_not_watched_any_more() -> None:
    """Taking a label away looks to a watch as a deletion does."""
    memory = make_memory()
    learn_all(memory, pod("a", 10), pod("b", 10))
    memory.saw(POD, "DELETED", pod("b", 11))
    assert names(memory) == ["a"]
    learn_all(memory, pod("a", 10), pod("b", 11, labels={NAME_LABEL: APP_NAME, INSTANCE_LABEL: "chat"}))
    assert names(memory) is None


@pytest.mark.parametrize("labels", [None, "", f"{NAME_LABEL}!=x"], ids=["none", "empty", "inequality"])
def test_lists_that_cannot_be_told_apart_are_asked_for_each_time(labels: str | None) -> None:
    memory = make_memory()
    memory.learn_list(POD, NAMESPACE, labels, [pod("a", 1)], since=0)
    assert memory.list(POD, NAMESPACE, labels) is None


# ------------------------------------------------------------------------------------------------- forgetting


def test_one_namespace_is_forgotten_or_all_of_them() -> None:
    memory = make_memory()
    learn_all(memory, pod("a", 1))
    memory.learn(POD, pod("b", 2, namespace="others"))
    memory.forget("others")
    assert names(memory) == ["a"]
    assert memory.get(POD, "others", "b") is None
    memory.forget()
    assert names(memory) is None
    assert version(memory, "a") is None


async def hear(handler: Any, event: str | None, body: Object) -> None:
    metadata = body["metadata"]
    told = {"type": event, "object": body}
    await handler(event=told, namespace=NAMESPACE, name=metadata["name"], labels=metadata["labels"])


async def test_a_watch_that_lists_again_makes_everything_unknown() -> None:
    """It does not tell what was deleted while it was down, and neither do those that were down with it."""
    memory = make_memory()
    queue = WorkQueue(asyncio.get_running_loop().time)
    on_pod = on_child(queue, News(memory), POD)
    for name in ("a", "b", "ghost"):
        await hear(on_pod, None, pod(name, 10))
    assert version(memory, "ghost") == 10, "what is listed first is known"
    memory.learn(CONFIG_MAP, pod("config", 10) | {"kind": "ConfigMap"})
    learn_all(memory, *(pod(name, 10) for name in ("a", "b", "ghost")))
    await hear(on_pod, "MODIFIED", pod("a", 11))
    assert version(memory, "ghost") == 10
    await hear(on_pod, None, pod("b", 20))
    assert version(memory, "ghost") is None
    assert version(memory, "b") == 20
    assert names(memory) is None
    assert memory.get(CONFIG_MAP, NAMESPACE, "config") is None


# --------------------------------------------------------------------------------------------------- clusters


class CountingStore(ObjectStore):
    """`asked` has verb and name, or labels, of each read."""

    def __init__(self, *objects: Object) -> None:
        super().__init__(objects)
        self.asked: list[tuple[str, str | None]] = []

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        self.asked.append(("get", name))
        return await super().get(kind, namespace, name)

    async def list(self, kind: Kind, namespace: str | None, **options: Any) -> Any:
        self.asked.append(("list", options.get("labels")))
        return await super().list(kind, namespace, **options)


async def test_one_asks_each_time_and_the_other_once() -> None:
    store, memory = CountingStore(pod("a", 1)), make_memory()
    remembering = RememberingCluster(store, memory)
    remembered = RememberedCluster(remembering, memory)
    for _ in range(2):
        assert await remembered.get(POD, NAMESPACE, "a")
        assert await remembered.list(POD, NAMESPACE, labels=OF_CHAT)
    assert store.asked == [("get", "a"), ("list", OF_CHAT)]
    assert await remembered.get(POD, NAMESPACE, "missing") is None
    assert await remembered.get(POD, NAMESPACE, "missing") is None
    assert store.asked[2:] == [("get", "missing")] * 2, "that nothing is there is asked each time"
    await remembering.get(POD, NAMESPACE, "a")
    await remembering.list(POD, NAMESPACE, labels=OF_CHAT)
    assert store.asked[4:] == [("get", "a"), ("list", OF_CHAT)]


async def test_what_is_written_is_known() -> None:
    store, memory = ObjectStore(), make_memory()
    remembering = RememberingCluster(store, memory)
    await remembering.create(pod("a", 0))
    assert version(memory, "a") == 1
    await remembering.patch(POD, NAMESPACE, "a", {"status": {"phase": "Running"}}, subresource="status")
    assert version(memory, "a") == 2


async def test_what_is_found_to_be_gone_is_not_known_any_more() -> None:
    memory = make_memory()
    remembering = RememberingCluster(ObjectStore(), memory)
    for name in ("read", "patched"):
        memory.saw(POD, "ADDED", pod(name, 1))
    await remembering.get(POD, NAMESPACE, "read")
    await remembering.patch(POD, NAMESPACE, "patched", {"status": {}})
    assert version(memory, "read") is None
    assert version(memory, "patched") is None


async def test_from_memory_only_a_status_is_written() -> None:
    store, memory = ObjectStore([pod("a", 1)]), make_memory()
    remembered = RememberedCluster(RememberingCluster(store, memory), memory)
    chat = {"apiVersion": SPECULATIVE_DEPLOYMENT.api_version, "kind": SPECULATIVE_DEPLOYMENT.kind}
    store.put({**chat, "metadata": {"namespace": NAMESPACE, "name": "chat", "uid": "uid"}})
    change = {"status": {"replicas": 1}}
    assert await remembered.patch(SPECULATIVE_DEPLOYMENT, NAMESPACE, "chat", change, subresource="status")
    before = dict(store.objects)
    for write in (
        remembered.patch(SPECULATIVE_DEPLOYMENT, NAMESPACE, "chat", {"spec": {"replicas": 2}}),
        remembered.patch(POD, NAMESPACE, "a", change, subresource="status"),
        remembered.create(pod("b", 1)),
        remembered.apply(pod("b", 1)),
        remembered.replace(pod("a", 1)),
        remembered.delete(POD, NAMESPACE, "a"),
    ):
        with pytest.raises(NotFromMemoryError):
            await write
    assert store.objects == before
