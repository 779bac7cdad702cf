"""What the operator's bench makes of an audit log."""

from __future__ import annotations

from support.audit_log import Request
from support.operator_phases import OPERATOR, USER, Phase, delays_of, faults_of, preflights_in


def request(user: str, verb: str, resource: str, name: str, *, at: float, code: int = 200) -> Request:
    return Request(user, verb, resource, name, code, began=at, ended=at + 0.25)


def asked(verb: str, name: str, *, at: float) -> Request:
    return request(USER, verb, "speculativedeployments", name, at=at)


def wrote(resource: str, name: str, *, at: float, verb: str = "patch", code: int = 200) -> Request:
    return request(OPERATOR, verb, resource, name, at=at, code=code)


def phase(delays: dict[str, float | None], preflights: int) -> Phase:
    return Phase("all changed", 1.0, 1.0, 2.0, 1.0, 1, 1, 0, delays, preflights)


def test_a_delay_ends_with_the_last_child_that_was_made_or_changed() -> None:
    log = [
        asked("create", "chat-1", at=1.0),
        asked("patch", "chat-2", at=2.0),
        wrote("serviceaccounts", "chat-1", at=1.5, verb="create", code=201),
        wrote("horizontalpodautoscalers", "chat-1", at=3.0, code=201),
        wrote("configmaps", "chat-1-config-1", at=9.0, verb="delete"),
        wrote("speculativedeployments/status", "chat-1", at=9.0),
        wrote("deployments", "chat-2", at=2.5),
        request("system:controller", "patch", "deployments", "chat-2", at=8.0),
    ]
    assert delays_of(log) == {"chat-1": 2.25, "chat-2": 0.75}


def test_a_change_that_no_child_was_written_for_is_not_lost() -> None:
    log = [
        wrote("deployments", "chat-1", at=0.5),
        asked("patch", "chat-1", at=1.0),
        wrote("deployments", "chat-10", at=1.5),
    ]
    delays = delays_of(log)
    assert delays == {"chat-1": None}
    assert faults_of([phase(delays, preflights=1)]) == ["all changed: no child was written of 1: chat-1"]


def test_preflights_are_counted_when_they_are_made() -> None:
    log = [
        wrote("jobs", "chat-1-preflight-1", at=1.0, code=201),
        wrote("jobs", "chat-1-preflight-1", at=2.0),
        wrote("jobs", "chat-1-preflight-1", at=3.0, verb="delete"),
        wrote("jobs", "chat-2-preflight-1", at=4.0, code=201),
    ]
    assert preflights_in(log) == 2
    assert faults_of([phase({}, 2), phase({}, 0)]) == ["the pair was checked 2 times"]
    assert faults_of([phase({"chat-1": 0.1}, 1), phase({}, 0)]) == []
