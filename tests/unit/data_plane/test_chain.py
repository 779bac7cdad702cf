"""Proposers make their offers in the order of a request's methods, within its own wishes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from draftline_server.core.request import Request
from draftline_server.core.sampling_params import SpeculationParams
from draftline_server.speculation.chain import Offer, ProposerChain
from draftline_server.speculation.proposer import Draft, DraftTask
from support.requests import make_request

BOTH = {"first", "second"}


class FakeProposer:
    """Offers up to `longest` tokens to every request but those it was told to leave out."""

    reads_hidden_states = False

    def __init__(
        self,
        name: str,
        *,
        longest: int = 9,
        unwilling: Sequence[str] = (),
        lagging: Sequence[str] = (),
        delivers: int = 9,
    ) -> None:
        self.name = name
        self.asked: list[str] = []
        self.tasks: list[tuple[str, int]] = []
        self.followed: list[str] = []
        self.released: list[str] = []
        self._longest = longest
        self._unwilling = unwilling
        self._lagging = lagging
        self._delivers = delivers

    def max_length(self, request: Request, limit: int) -> int:
        self.asked.append(request.request_id)
        return 0 if request.request_id in self._unwilling else min(limit, self._longest)

    def kind(self, request: Request) -> str:
        return f"{self.name} of {request.request_id}"

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        self.tasks += [(t.request.request_id, t.length) for t in tasks]
        return [Draft(self.name, tuple(range(min(t.length, self._delivers)))) for t in tasks]

    def observe(self, request: Request, start: int, hidden_states: Tensor) -> None:
        raise AssertionError("it reads tokens alone")

    def follow(self, requests: Sequence[Request]) -> None:
        self.followed += [r.request_id for r in requests]

    def lags(self, request: Request) -> bool:
        return request.request_id in self._lagging

    def release(self, request: Request) -> None:
        self.released.append(request.request_id)


def request_with(**speculation: object) -> Request:
    return make_request("r", speculation=SpeculationParams(**speculation))  # type: ignore[arg-type]


FIRST, SECOND = ("first", 3), ("second", 5)


@pytest.mark.parametrize(
    ("speculation", "limit", "expected"),
    [
        pytest.param({}, 5, [FIRST, SECOND], id="each-with-what-it-has"),
        pytest.param({}, 2, [("first", 2), ("second", 2)], id="at-most-the-limit"),
        pytest.param({}, 0, [], id="no-room"),
        pytest.param({}, -1, [], id="less-than-no-room"),
        pytest.param({"enabled": False}, 5, [], id="switched-off"),
        pytest.param({"enabled": True}, 5, [FIRST, SECOND], id="switched-on"),
        pytest.param({"max_draft_tokens": 1}, 5, [("first", 1), ("second", 1)], id="fewer-wanted"),
        pytest.param({"max_draft_tokens": 0}, 5, [], id="none-wanted"),
        pytest.param({"max_draft_tokens": 9}, 2, [("first", 2), ("second", 2)], id="more-than-there-is-room"),
        pytest.param({"methods": ("second",)}, 5, [SECOND], id="another-method"),
        pytest.param({"methods": ("second", "first")}, 5, [SECOND, FIRST], id="in-another-order"),
    ],
)
def test_the_offers_to_a_request(
    speculation: dict[str, object], limit: int, expected: list[tuple[str, int]]
) -> None:
    chain = ProposerChain([FakeProposer("first", longest=3), FakeProposer("second")])
    request = request_with(**speculation)
    assert chain.offers(request, limit, BOTH) == [
        Offer(request, name, length, f"{name} of r") for name, length in expected
    ]


def test_who_has_nothing_or_is_not_usable_offers_nothing() -> None:
    first, second = FakeProposer("first", unwilling=["r"]), FakeProposer("second")
    chain = ProposerChain([first, second])
    assert [offer.proposer for offer in chain.offers(request_with(), 4, BOTH)] == ["second"]
    assert chain.offers(request_with(), 4, {"first"}) == []
    assert second.asked == ["r"], "who is not usable is not even asked"


def test_a_server_without_proposers_offers_nothing() -> None:
    chain = ProposerChain([])
    assert chain.names == ()
    assert chain.offers(request_with(), 4, BOTH) == []
    assert chain.propose({}) == {}


def test_each_proposer_gets_its_own_tasks() -> None:
    first, second = FakeProposer("first"), FakeProposer("second")
    chain = ProposerChain([first, second])
    requests = {name: make_request(name) for name in "ab"}
    tasks = {"first": [DraftTask(requests["a"], 2)], "second": [DraftTask(requests["b"], 3)]}
    drafts = chain.propose(tasks)
    assert first.tasks == [("a", 2)]
    assert second.tasks == [("b", 3)]
    assert {name: (d.proposer, len(d.token_ids)) for name, d in drafts.items()} == {
        "a": ("first", 2),
        "b": ("second", 3),
    }


def test_an_empty_draft_is_no_draft() -> None:
    chain = ProposerChain([FakeProposer("first", delivers=0)])
    assert chain.propose({"first": [DraftTask(request_with(), 4)]}) == {}


def test_proposers_follow_only_requests_that_may_use_them_and_all_forget() -> None:
    first, second = FakeProposer("first"), FakeProposer("second")
    chain = ProposerChain([first, second])
    any_method = make_request("any")
    only_second = make_request("only-second", speculation=SpeculationParams(methods=("second",)))
    off = make_request("off", speculation=SpeculationParams(enabled=False))
    chain.follow([any_method, only_second, off])
    assert first.followed == ["any"]
    assert second.followed == ["any", "only-second"]
    chain.release(off)
    assert (first.released, second.released) == (["off"], ["off"])


def test_one_lagging_request_catches_up_at_a_time_where_it_may_use_the_proposer() -> None:
    proposer = FakeProposer("first", lagging=("off", "b", "c"))
    requests = [
        make_request("a"),
        make_request("off", speculation=SpeculationParams(enabled=False)),
        make_request("b"),
        make_request("c"),
    ]

    ProposerChain([proposer]).catch_up(requests)

    assert proposer.followed == ["b"]
