"""`draftline-server preflight` and `plan`: may this pair be served, and in how much memory?

Everything that a start checks before it loads weights is checked here by the same code, for a device that
need not be here. The result of a preflight is one JSON object that fits a container's termination message;
the operator reads it, whatever the outcome.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline_server.config import Config, parse_bytes
from draftline_server.errors import (
    ConfigError,
    MemoryShortageError,
    PairMismatchError,
    ResourceError,
    StartupError,
)
from draftline_server.log import configure_logging, log_failure
from draftline_server.model.memory_plan import MemoryPlan, check_memory_plan
from draftline_server.model.memory_report import describe_plan, describe_shortage, suggest
from draftline_server.model.startup import (
    ACCELERATOR_FLAG,
    InspectedModel,
    InspectedPair,
    choose_device,
    inspect_pair,
    plan_memory,
)

MAX_RESULT_BYTES = 4096
"""What Kubernetes keeps of a termination message."""

_LONGEST_MESSAGE = 3000
_LONGEST_REVISION = 128

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the pair cannot be served; `reason` is CamelCase, for conditions."""

    reason: str
    message: str


@dataclass(slots=True)
class Findings:
    """What is known, which may be only a part where there is a fault."""

    config: Config | None = None
    target: InspectedModel | None = None
    draft: InspectedModel | None = None
    pair: InspectedPair | None = None
    plan: MemoryPlan | None = None
    fault: Fault | None = None


def run_checks(read_config: Callable[[], Config], accelerator_memory: str | None) -> Findings:
    """Looks at everything; a fault is part of the findings, never raised."""
    findings = Findings()
    try:
        findings.config = config = read_config()
        configure_logging(level=config.observability.log_level, log_format=config.observability.log_format)
        _examine(config, accelerator_memory, findings)
    except StartupError as error:
        findings.fault = Fault(_reason(error), " ".join(str(error).split()))
    except Exception as error:  # a fault of ours is an outcome, too: whoever waits for one must learn of it
        error_id = log_failure(_logger, "preflight failed", error)
        findings.fault = Fault("InternalError", f"internal error {error_id}; the log has more")
    return findings


def _examine(config: Config, accelerator_memory: str | None, findings: Findings) -> None:
    """Adds to the findings, one after the other. Raises a `StartupError`."""

    def add(model: InspectedModel) -> None:
        setattr(findings, model.role, model)

    where, budget = choose_device(config, parse_accelerator_memory(accelerator_memory))
    findings.pair = inspect_pair(config, where, report=add)
    findings.plan = plan_memory(config, findings.pair, budget)
    check_memory_plan(findings.plan)


def parse_accelerator_memory(text: str | None) -> int | None:
    """Raises `ConfigError`."""
    if text is None:
        return None
    try:
        size = int(parse_bytes(text))
    except ValueError as error:
        raise ConfigError(f"{ACCELERATOR_FLAG}: {error}, not {text!r}") from error
    if size <= 0:
        raise ConfigError(f"{ACCELERATOR_FLAG}: must be above 0, not {text!r}")
    return size


def write_result(findings: Findings, file: Path) -> None:
    """In place: what a container's termination message is mounted on cannot be replaced. Raises `OSError`."""
    file.write_text(render_result(findings), encoding="ascii")


def render_result(findings: Findings) -> str:
    """JSON of at most `MAX_RESULT_BYTES`; a message that is too long is cut in its middle."""
    document = _describe(findings)
    text = json.dumps(document)
    longest = _LONGEST_MESSAGE
    while len(text) > MAX_RESULT_BYTES and findings.fault is not None and longest > 1:
        document["error"]["message"] = _shorten(findings.fault.message, longest)
        text = json.dumps(document)
        longest -= max(1, longest // 10)
    return text


def summarize(findings: Findings) -> list[str]:
    """Lines for a person; the fault itself is not among them."""
    lines = [_summarize_model(model) for model in (findings.target, findings.draft) if model is not None]
    if findings.pair is not None:
        lines += [f"pair: {findings.pair.pair_digest}", *(f"note: {note}" for note in findings.pair.notes())]
    if findings.plan is not None:
        lines += ["", *describe_plan(findings.plan), "", *_summarize_fit(findings)]
    return lines


def _summarize_model(model: InspectedModel) -> str:
    revision = f", revision {_revision(model)}" if _revision(model) else ""
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{model.role}: {model.facts.architecture} in {dtype}, {model.digest.model}{revision}"


def _summarize_fit(findings: Findings) -> list[str]:
    config, pair, plan = findings.config, findings.pair, findings.plan
    if config is None or pair is None or plan is None or not plan.budget.is_known:
        return ["whether it fits is not known"]
    shortage = describe_shortage(plan)
    if shortage is None:
        return ["it fits"]
    changes = suggest(config, pair, plan)
    return [
        shortage,
        *(["each of these would make it fit:"] if changes else []),
        *(f"  {c}" for c in changes),
    ]


def _shorten(text: str, longest: int) -> str:
    """Beginning and end, which name the key and the numbers."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def _describe(findings: Findings) -> dict[str, Any]:
    return {
        "pairDigest": findings.pair.pair_digest if findings.pair is not None else None,
        "target": _describe_model(findings.target),
        "draft": _describe_model(findings.draft),
        "memory": _describe_memory(findings.plan),
        "error": _describe_fault(findings.fault),
    }


def _describe_model(model: InspectedModel | None) -> dict[str, Any] | None:
    if model is None:
        return None
    return {
        "architecture": model.facts.architecture,
        "digest": model.digest.model,
        "revision": _revision(model),
        "weightsBytes": model.facts.num_parameters * model.dtype.itemsize,
        "kvBytesPerToken": model.facts.kv_bytes_per_token(model.compute_dtype.itemsize),
        "maxContextLength": model.facts.max_position_embeddings,
    }


def _revision(model: InspectedModel) -> str | None:
    origin = model.digest.origin
    return origin.revision[:_LONGEST_REVISION] if origin is not None and origin.revision else None


def _describe_memory(plan: MemoryPlan | None) -> dict[str, Any] | None:
    """`requiredBytes` against `availableBytes`: what serves one request, and the share that may be used."""
    if plan is None:
        return None
    weights_bytes = plan.target.weight_bytes + (plan.draft.weight_bytes if plan.draft is not None else 0)
    weights_bytes += plan.extra_weight_bytes
    return {
        "weightsBytes": weights_bytes,
        "activationBytes": plan.fixed_bytes - weights_bytes,
        "kvBytesPerToken": plan.kv_bytes_per_token,
        "kvPoolBytes": plan.pool_bytes,
        "requiredBytes": plan.required_bytes,
        "availableBytes": plan.limit_bytes if plan.budget.is_known else None,
        "fits": describe_shortage(plan) is None if plan.budget.is_known else None,
    }


def _describe_fault(fault: Fault | None) -> dict[str, str] | None:
    return {"reason": fault.reason, "message": fault.message} if fault is not None else None


def _reason(error: StartupError) -> str:
    match error:
        case MemoryShortageError():
            return "MemoryDoesNotFit"
        case PairMismatchError():
            return "PairMismatch"
        case ConfigError() | ResourceError():  # a device or dtype that cannot be had is a wrong setting, too
            return "ConfigInvalid"
        case _:
            return "FilesInvalid"
