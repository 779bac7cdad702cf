"""Only the API server is believed, and only what it may vouch for."""

from __future__ import annotations

import json

import pytest

from draftline_operator.planning.front_proxy import Caller, access_review, identify, parse_front_proxy

CA = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
PUBLISHED = {
    "client-ca-file": "something else",
    "requestheader-client-ca-file": CA,
    "requestheader-allowed-names": '["front-proxy-client"]',
    "requestheader-username-headers": '["X-Remote-User"]',
    "requestheader-uid-headers": '["X-Remote-Uid"]',
    "requestheader-group-headers": '["X-Remote-Group"]',
    "requestheader-extra-headers-prefix": '["X-Remote-Extra-"]',
}
HEADERS = [
    ("Host", "draftline-metrics-api.draftline.svc"),
    ("X-Remote-User", "system:serviceaccount:kube-system:horizontal-pod-autoscaler"),
    ("X-Remote-Group", "system:serviceaccounts"),
    ("X-Remote-Group", "system:authenticated"),
    ("X-Remote-Extra-Authentication.kubernetes.io%2Fpod-name", "kcm-0"),
]


def test_the_caller_is_whom_the_api_server_names() -> None:
    caller = identify(parse_front_proxy(PUBLISHED), common_name="front-proxy-client", headers=HEADERS)
    assert caller == Caller(
        username="system:serviceaccount:kube-system:horizontal-pod-autoscaler",
        groups=("system:serviceaccounts", "system:authenticated"),
        extra=(("authentication.kubernetes.io/pod-name", ("kcm-0",)),),
    )


def test_headers_are_found_in_any_spelling_of_their_names() -> None:
    headers = [(name.upper(), value) for name, value in HEADERS] + [("x-remote-uid", "42")]
    caller = identify(parse_front_proxy(PUBLISHED), common_name="front-proxy-client", headers=headers)
    assert caller is not None
    assert (caller.uid, len(caller.groups)) == ("42", 2)


@pytest.mark.parametrize("common_name", [None, "", "admin", "Front-Proxy-Client"])
def test_headers_from_anybody_else_are_worth_nothing(common_name: str | None) -> None:
    assert identify(parse_front_proxy(PUBLISHED), common_name=common_name, headers=HEADERS) is None


def test_without_allowed_names_every_certificate_of_the_authority_will_do() -> None:
    proxy = parse_front_proxy({**PUBLISHED, "requestheader-allowed-names": "[]"})
    assert identify(proxy, common_name="anything", headers=HEADERS) is not None
    assert identify(proxy, common_name=None, headers=HEADERS) is None


def test_a_request_that_names_no_user_has_no_caller() -> None:
    headers = [header for header in HEADERS if header[0] != "X-Remote-User"]
    proxy = parse_front_proxy(PUBLISHED)
    assert identify(proxy, common_name="front-proxy-client", headers=headers) is None
    assert (
        identify(proxy, common_name="front-proxy-client", headers=[*headers, ("X-Remote-User", "")]) is None
    )


def test_a_cluster_without_aggregation_layer_is_named_as_that() -> None:
    with pytest.raises(ValueError, match="requestheader-client-ca-file"):
        parse_front_proxy({"client-ca-file": CA})
    with pytest.raises(ValueError, match="requestheader-allowed-names"):
        parse_front_proxy({**PUBLISHED, "requestheader-allowed-names": '"front-proxy-client"'})


def test_an_access_review_asks_about_the_caller_and_not_about_us() -> None:
    caller = Caller("hpa", uid="1", groups=("a", "b"), extra=(("scopes", ("x",)),))
    review = access_review(caller, {"verb": "get", "resource": "speculativedeployments.draftline.dev"})
    assert json.loads(json.dumps(review)) == {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "metadata": {},
        "spec": {
            "user": "hpa",
            "uid": "1",
            "groups": ["a", "b"],
            "extra": {"scopes": ["x"]},
            "resourceAttributes": {"verb": "get", "resource": "speculativedeployments.draftline.dev"},
        },
    }
