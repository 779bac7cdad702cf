"""The record of a pair has all its owners, and nothing is left in it of those that are gone."""

from __future__ import annotations

import pytest

from draftline_operator.models.names import pair_record_name
from draftline_operator.models.observed import Object
from draftline_operator.models.preflight import parse_result
from draftline_operator.models.resource import Manifest
from draftline_operator.planning.gate import Gate
from draftline_operator.resources.pair_record import RESULT_KEY, render_pair_record
from draftline_operator.services.pair_records import keep_record, read_record
from support.object_store import ObjectStore
from support.observations import KEY, result_message
from support.speculative_deployments import PAIR, resource

RECORD = ("ConfigMap", "models", pair_record_name(KEY))
FIRST, SECOND = resource(PAIR), resource(PAIR, name="second", uid="uid-2")


class Server(ObjectStore):
    """Keeps what is applied to it, and by whom; it does not merge."""

    def __init__(self, *objects: Manifest) -> None:
        super().__init__(objects)
        self.applied: list[tuple[Manifest, str | None]] = []

    async def apply(self, manifest: Manifest, *, field_manager: str | None = None) -> Object:
        self.applied.append((manifest, field_manager))
        return manifest


def gate(*, is_recorded: bool) -> Gate:
    return Gate(
        state="verified",
        pair_key=KEY,
        reason="Verified",
        message="",
        result=parse_result(result_message()),
        is_recorded=is_recorded,
    )


def record(text: str) -> Object:
    """As the first resource has left it."""
    manifest = render_pair_record(FIRST, KEY, text)
    manifest["metadata"]["uid"] = "uid-of-record"
    return manifest


async def test_the_first_owner_creates_the_record_with_the_verdict() -> None:
    server = Server()
    assert await keep_record(server, FIRST, gate(is_recorded=False), None)
    kept = server.objects[RECORD]
    assert read_record(kept) == parse_result(result_message())
    assert [owner["uid"] for owner in kept["metadata"]["ownerReferences"]] == [FIRST.uid]
    assert server.applied == []


async def test_another_owner_adds_itself_and_owns_nothing_else_of_it() -> None:
    server = Server(record(result_message()))
    assert await keep_record(server, SECOND, gate(is_recorded=True), server.objects[RECORD])
    ((manifest, manager),) = server.applied
    assert manager is not None
    assert manager.endswith(SECOND.uid)
    assert manifest.keys() == {"apiVersion", "kind", "metadata"}
    assert manifest["metadata"].keys() == {"name", "namespace", "uid", "ownerReferences"}
    assert [owner["uid"] for owner in manifest["metadata"]["ownerReferences"]] == [SECOND.uid]
    assert manifest["metadata"]["uid"] == "uid-of-record", "one that is gone is not made anew"


async def test_an_owner_has_nothing_to_add() -> None:
    server = Server(record(result_message()))
    assert not await keep_record(server, FIRST, gate(is_recorded=True), server.objects[RECORD])
    assert server.applied == []


@pytest.mark.parametrize("text", ["no JSON at all", "{}x"])
async def test_a_spoiled_record_gets_its_verdict_back_and_keeps_its_owners(text: str) -> None:
    server = Server(record(text))
    before = server.objects[RECORD]["metadata"]["ownerReferences"]
    assert await keep_record(server, SECOND, gate(is_recorded=False), server.objects[RECORD])
    kept = server.objects[RECORD]
    assert parse_result(kept["data"][RESULT_KEY]) == parse_result(result_message())
    assert kept["metadata"]["ownerReferences"] == before
