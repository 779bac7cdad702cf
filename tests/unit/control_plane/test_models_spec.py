"""A spec is read as strictly as by the API server, and each fault is one line that begins with its field."""

from __future__ import annotations

from typing import Any

import pytest

from draftline_operator.errors import InvalidSpecError
from draftline_operator.models.spec import parse_spec
from support.faulty_specs import BAD_URIS, FAULTS, GOOD_URIS
from support.speculative_deployments import FULL, MINIMAL, PAIR, changed


@pytest.mark.parametrize(("spec", "message"), [case[1:] for case in FAULTS], ids=[case[0] for case in FAULTS])
def test_a_fault_is_one_line_that_begins_with_its_field(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        parse_spec(spec)
    said = str(caught.value)
    assert said.startswith(message.removesuffix("…")) if message.endswith("…") else said == message
    assert "\n" not in said
    assert len(said) < 500


@pytest.mark.parametrize("uri", BAD_URIS)
def test_a_uri_of_another_form_is_refused(uri: str) -> None:
    with pytest.raises(InvalidSpecError, match=r"^spec\.target\.model\.uri: "):
        parse_spec({"target": {"model": {"uri": uri}}})


@pytest.mark.parametrize("uri", GOOD_URIS)
def test_uris_of_every_scheme_are_taken(uri: str) -> None:
    assert parse_spec({"target": {"model": {"uri": uri}}}).target.model.uri == uri


def test_every_field_is_read() -> None:
    spec = parse_spec(FULL)
    stored = spec.model_dump(by_alias=True, exclude_unset=True, mode="json")
    expected = changed(FULL, accelerator__memory=str(80 * 2**30), serving__kvCacheMemory=str(4 * 2**30))
    assert stored == expected


def test_equal_quantities_are_kept_in_one_spelling() -> None:
    one = parse_spec(changed(MINIMAL, accelerator={"memory": "1.5Gi"}))
    assert one == parse_spec(changed(MINIMAL, accelerator={"memory": "1536Mi"}))
    assert one == parse_spec(changed(MINIMAL, accelerator={"memory": 1_610_612_736}))


def test_no_replicas_are_a_number_of_replicas() -> None:
    assert parse_spec(changed(MINIMAL, replicas=0)).replicas == 0
    assert parse_spec(MINIMAL).replicas is None


@pytest.mark.parametrize(
    ("spec", "is_used"),
    [
        (PAIR, True),
        (MINIMAL, False),
        (changed(PAIR, speculation__enabled=False), False),
        (changed(PAIR, speculation__numSpeculativeTokens=0), False),
        (changed(PAIR, speculation__methods=["NGram"]), False),
        (changed(PAIR, speculation__methods=["DraftModel"]), True),
    ],
)
def test_a_draft_that_never_runs_is_no_model_of_the_pods(spec: dict[str, Any], is_used: bool) -> None:
    parsed = parse_spec(spec)
    assert parsed.uses_draft_model is is_used
    assert list(parsed.models) == (["target", "draft"] if is_used else ["target"])


def test_accelerators_follow_tensor_parallelism() -> None:
    assert parse_spec(MINIMAL).accelerator_count == 0
    assert parse_spec(changed(MINIMAL, accelerator={})).accelerator_count == 1
    assert parse_spec(changed(MINIMAL, accelerator={"count": 1})).accelerator_count == 1
