"""What the server's preflight writes is what the operator reads, field by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from draftline_operator.models.preflight import (
    MemoryPlan,
    PreflightFault,
    PreflightModel,
    PreflightResult,
    parse_result,
)
from draftline_server.config import parse_config
from draftline_server.core.digest import Origin, write_manifest
from draftline_server.preflight import Findings, render_result, run_checks
from support.tiny_models import make_tiny_model

COMMIT = "1" * 40


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """Of a pair that is sound and for which the memory is too small: everything is said."""
    root = tmp_path_factory.mktemp("pair")
    target = make_tiny_model(root / "target")
    draft = make_tiny_model(root / "draft", layers=1, seed=1)
    write_manifest(target, origin=Origin(uri="hf://org/target", revision=COMMIT))
    models = {"target_model": {"path": str(target)}, "draft_model": {"path": str(draft)}}
    config = parse_config({"device": "cuda", "models": models})
    return run_checks(lambda: config, "1MiB")


def keys_of(model: type[BaseModel]) -> set[str]:
    return {str(field.alias) for field in model.model_fields.values()}


@pytest.mark.parametrize(
    ("part", "model"),
    [
        (None, PreflightResult),
        ("target", PreflightModel),
        ("draft", PreflightModel),
        ("memory", MemoryPlan),
        ("error", PreflightFault),
    ],
)
def test_both_sides_know_the_same_fields(
    findings: Findings, part: str | None, model: type[BaseModel]
) -> None:
    document: dict[str, Any] = json.loads(render_result(findings))
    assert (document[part] if part is not None else document).keys() == keys_of(model)


def test_the_operator_reads_what_the_server_found(findings: Findings) -> None:
    result = parse_result(render_result(findings))
    assert findings.pair is not None
    assert findings.plan is not None
    assert findings.target is not None
    assert result.pair_digest == findings.pair.pair_digest
    assert result.target is not None
    assert (result.target.architecture, result.target.revision) == ("LlamaForCausalLM", COMMIT)
    assert result.target.digest == findings.target.digest.model
    assert result.draft is not None
    assert result.draft.revision is None
    assert result.memory is not None
    assert result.memory.required_bytes == findings.plan.required_bytes > 2**20
    assert result.memory.available_bytes == int(0.9 * 2**20)
    assert result.memory.fits is False
    assert result.error is not None
    assert result.error.reason == "MemoryDoesNotFit"


def test_a_fault_without_anything_else_is_read_too(tmp_path: Path) -> None:
    result = parse_result(render_result(run_checks(lambda: parse_config({}), None)))
    assert result.error is not None
    assert result.error.reason == "ConfigInvalid"
    assert result.pair_digest is None
    assert result.memory is None
