"""The CRD says what the operator's models say, field by field, and refuses what they refuse.

The models and the schema are walked independently of the generator. The schema is applied here as the API
server does it: defaults, types and bounds, unknown fields, then the CEL rules.
"""

from __future__ import annotations

import copy
import re
import runpy
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import cel
import jsonschema
import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from draftline_operator import constants
from draftline_operator.models.names import MAX_NAME_LENGTH
from draftline_operator.models.quantity import parse_quantity
from draftline_operator.models.spec import SpeculativeDeploymentSpec, parse_spec
from draftline_operator.models.status import (
    Condition,
    ConditionType,
    SpeculativeDeploymentStatus,
    merge_conditions,
)
from support.faulty_specs import BAD_URIS, FAULTS, GOOD_URIS, UNKNOWN_TO_THE_SCHEMA
from support.speculative_deployments import FULL, MINIMAL, PAIR, changed

CRDS = Path(__file__).resolve().parents[2] / "crds"
CRD = yaml.safe_load((CRDS / "speculativedeployments.yaml").read_text(encoding="utf-8"))
VERSION = CRD["spec"]["versions"][0]
ROOT = VERSION["schema"]["openAPIV3Schema"]
SPEC = ROOT["properties"]["spec"]
STATUS = ROOT["properties"]["status"]
EXAMPLES = sorted((CRDS / "examples").glob("*.yaml"))

# Of a structural schema; anything else is dropped or refused by the API server.
KEYWORDS = {
    "additionalProperties",
    "anyOf",
    "default",
    "description",
    "enum",
    "exclusiveMinimum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "pattern",
    "properties",
    "required",
    "type",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-validations",
}
CONSTRAINTS = {
    # pydantic's attribute: (keyword for a number or text, for a list, for a map)
    "ge": ("minimum",) * 3,
    "gt": ("minimum",) * 3,
    "le": ("maximum",) * 3,
    "min_length": ("minLength", "minItems", "minProperties"),
    "max_length": ("maxLength", "maxItems", "maxProperties"),
    "pattern": ("pattern",) * 3,
}
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", tuple: "array", dict: "object"}


# ------------------------------------------------------------------------------------ how a schema is applied


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within, with the path of what it describes."""
    yield path, schema
    for name, value in schema.get("properties", {}).items():
        yield from nodes(value, f"{path}.{name}")
    for key, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if key in schema:
            yield from nodes(schema[key], path + suffix)


def with_defaults(schema: dict[str, Any], value: Any) -> Any:
    if isinstance(value, dict):
        result = dict(value)
        for name, field in schema.get("properties", {}).items():
            if name not in result and "default" in field:
                result[name] = copy.deepcopy(field["default"])
            if name in result:
                result[name] = with_defaults(field, result[name])
        return result
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], entry) for entry in value]
    return value


def faults(schema: dict[str, Any], value: Any, path: str = "spec") -> Iterator[str]:
    """Why the API server would refuse the value, after defaults."""
    validator = jsonschema.Draft202012Validator(as_json_schema(schema))
    found = [f"{path}{error.json_path[1:]}: {error.message}" for error in validator.iter_errors(value)]
    # Rules are evaluated only on what has the right types.
    yield from found or rule_faults(schema, value, path)


def as_json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    result = {key: value for key, value in schema.items() if not key.startswith("x-")}
    if result.pop("exclusiveMinimum", False):
        result["exclusiveMinimum"] = result.pop("minimum")
    if "pattern" in result:
        # Of Go, where the end is the end, and not the line before it.
        result["pattern"] = re.sub(r"\$$", r"\\Z", result["pattern"])
    for key in ("items", "additionalProperties"):
        if key in result:
            result[key] = as_json_schema(result[key])
    if "properties" in result:
        result["properties"] = {name: as_json_schema(field) for name, field in result["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    return result


def rule_faults(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        if not holds(rule["rule"], value):
            yield f"{path}{rule.get('fieldPath', '')}: {rule['message']}"
    if isinstance(value, dict):
        for name, field in schema.get("properties", {}).items():
            if name in value:
                yield from rule_faults(field, value[name], f"{path}.{name}")
    elif isinstance(value, list) and "items" in schema:
        for index, entry in enumerate(value):
            yield from rule_faults(schema["items"], entry, f"{path}[{index}]")


def holds(rule: str, value: Any) -> bool:
    context = cel.Context()
    context.add_variable("self", value)
    context.add_function("isQuantity", lambda text: is_quantity(text))
    context.add_function("quantity", lambda text: float(parse_quantity(text)))
    context.add_function("isGreaterThan", lambda number, other: number > other)
    result = cel.evaluate(rule, context)
    assert isinstance(result, bool)
    return result


def is_quantity(text: str) -> bool:
    try:
        parse_quantity(text)
    except ValueError:
        return False
    return True


def refusals(spec: dict[str, Any]) -> list[str]:
    return list(faults(SPEC, with_defaults(SPEC, spec)))


# -------------------------------------------------------------------------------------------------- the frame


def test_the_file_is_what_the_generator_writes() -> None:
    text = (CRDS / "speculativedeployments.yaml").read_text(encoding="utf-8")
    render = runpy.run_path(str(CRDS / "generate.py"))["render"]
    assert text == render(), "run crds/generate.py"


def test_names_are_those_that_the_operator_uses() -> None:
    spec = CRD["spec"]
    assert (spec["group"], spec["scope"]) == (constants.GROUP, "Namespaced")
    assert [version["name"] for version in spec["versions"]] == [constants.VERSION]
    assert (spec["names"]["kind"], spec["names"]["plural"]) == (constants.KIND, constants.PLURAL)
    assert spec["names"]["shortNames"] == ["specdep"]
    assert CRD["metadata"]["name"] == f"{constants.PLURAL}.{constants.GROUP}"


def test_scale_and_status_are_subresources() -> None:
    assert VERSION["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }


def test_columns_show_the_fields_that_there_are() -> None:
    columns = {column["name"]: column for column in VERSION["additionalPrinterColumns"]}
    always = [name for name, column in columns.items() if not column.get("priority")]
    assert always == ["Target", "Draft", "Ready", "Replicas", "Acceptance", "Queue", "Age"]
    paths = {path for path, _ in nodes(ROOT)}
    for column in columns.values():
        path = column["jsonPath"]
        assert path.startswith((".metadata.", ".status.conditions[?")) or path in paths


# ------------------------------------------------------------------------------------------------- the schema


def test_the_schema_is_structural() -> None:
    for path, node in nodes(ROOT):
        assert node.keys() <= KEYWORDS, path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        assert not ("properties" in node and "additionalProperties" in node), path
        if "default" in node:  # checked as it is, before defaults within it are filled in
            assert list(faults(node, node["default"], path)) == []


def test_every_field_is_described_in_a_sentence() -> None:
    for path, node in nodes(ROOT):
        if path.endswith(("[]", "{}")) or path in ("", ".metadata"):
            continue
        description = node.get("description", "")
        assert description.endswith("."), path
        assert "\n" not in description, path


def test_every_value_is_bounded() -> None:
    for path, node in nodes(ROOT):
        kind = node.get("type")
        if kind == "string" and path not in (".apiVersion", ".kind"):
            assert {"maxLength", "enum", "format"} & node.keys(), path
        elif kind in ("integer", "number"):
            assert {"minimum", "maximum"} <= node.keys(), path
        elif kind == "array":
            assert "maxItems" in node, path
        elif "additionalProperties" in node:
            assert "maxProperties" in node, path
        elif node.get("x-kubernetes-int-or-string"):
            assert {"maxLength", "pattern"} <= node.keys(), path


def test_every_rule_has_a_message_and_the_path_of_a_field() -> None:
    num_rules = 0
    for path, node in nodes(ROOT):
        paths = {field for field, _ in nodes(node)}
        for rule in node.get("x-kubernetes-validations", []):
            num_rules += 1
            assert rule["message"], path
            assert rule.get("fieldPath", "") in paths, path
    assert num_rules > 12


def test_core_types_are_kept_as_they_are() -> None:
    kept = {path for path, node in nodes(ROOT) if node.get("x-kubernetes-preserve-unknown-fields")}
    template = ".spec.podTemplate"
    assert kept == {
        ".spec.autoscaling.behavior",
        f"{template}.affinity",
        f"{template}.resources",
        f"{template}.env[]",
        f"{template}.tolerations[]",
        f"{template}.topologySpreadConstraints[]",
        f"{template}.volumeMounts[]",
        f"{template}.volumes[]",
    }


# -------------------------------------------------------------------------------- models and schema, by field


def plain(annotation: Any) -> tuple[Any, list[Any]]:
    """A field's type without None and Annotated, and the constraints on it."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        found, constraints = plain(inner)
        return found, [*constraints, *metadata]
    if get_origin(annotation) in (Union, types.UnionType):
        (only,) = (option for option in get_args(annotation) if option is not type(None))
        return plain(only)
    return annotation, []


def differences(model: type[BaseModel], schema: dict[str, Any], path: str) -> Iterator[str]:
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    if fields.keys() != schema["properties"].keys():
        yield f"{path}: {fields.keys() ^ schema['properties'].keys()}"
    required = [name for name, field in fields.items() if field.is_required()]
    if required != schema.get("required", []):
        yield f"{path}: required {required}"
    for name, field in fields.items():
        yield from field_differences(field, schema["properties"][name], f"{path}.{name}")


def field_differences(field: FieldInfo, node: dict[str, Any], path: str) -> Iterator[str]:
    if node.get("description") != " ".join((field.description or "").split()):
        yield f"{path}: description"
    annotation = field.annotation
    found, constraints = plain(annotation)
    yield from type_differences(found, [*constraints, *field.metadata], node, path)
    yield from default_differences(field, node, path)


def type_differences(found: Any, constraints: list[Any], node: dict[str, Any], path: str) -> Iterator[str]:
    if node.get("x-kubernetes-int-or-string"):
        if found is not str:
            yield f"{path}: a quantity is text"
        return
    if isinstance(found, type) and issubclass(found, BaseModel):
        yield from differences(found, node, path)
        return
    if get_origin(found) is Literal:
        if node.get("enum") != list(get_args(found)):
            yield f"{path}: enum"
        return
    origin = get_origin(found) or found
    if node["type"] != TYPES[origin]:
        yield f"{path}: type {node['type']}"
    if origin is tuple:
        yield from type_differences(*plain(get_args(found)[0]), node["items"], f"{path}[]")
    yield from constraint_differences(constraints, node, path)


def constraint_differences(constraints: list[Any], node: dict[str, Any], path: str) -> Iterator[str]:
    column = {"array": 1, "object": 2}.get(node["type"], 0)
    expected: dict[str, Any] = {}
    for constraint in flattened(constraints):
        for attribute, keywords in CONSTRAINTS.items():
            value = getattr(constraint, attribute, None)
            if value is not None:
                expected[keywords[column]] = value
    known = {keyword for names in CONSTRAINTS.values() for keyword in names}
    stated = {key: value for key, value in node.items() if key in known}
    if stated != expected:
        yield f"{path}: {stated} in the schema, {expected} in the model"


def flattened(constraints: list[Any]) -> Iterator[Any]:
    for constraint in constraints:
        if isinstance(constraint, FieldInfo):
            yield from constraint.metadata
        else:
            yield constraint


def default_differences(field: FieldInfo, node: dict[str, Any], path: str) -> Iterator[str]:
    """What is empty or None has no default in the schema: it would only be stored in every object."""
    default = None if field.is_required() else field.default
    if isinstance(default, BaseModel):
        default = default.model_dump(by_alias=True, exclude_none=True, mode="json")
        default = {name: value for name, value in default.items() if value not in ({}, [])}
    expected = list(default) if isinstance(default, tuple) else default
    stated = with_defaults(node, node["default"]) if "default" in node else None
    if stated != (None if expected in ({}, []) else expected):
        yield f"{path}: default {stated} in the schema, {expected} in the model"


@pytest.mark.parametrize(
    ("model", "schema"),
    [(SpeculativeDeploymentSpec, SPEC), (SpeculativeDeploymentStatus, STATUS)],
    ids=["spec", "status"],
)
def test_models_and_schema_agree_field_by_field(model: type[BaseModel], schema: dict[str, Any]) -> None:
    assert list(differences(model, schema, "")) == []


@pytest.mark.parametrize("spec", [MINIMAL, PAIR, FULL], ids=["minimal", "pair", "full"])
def test_the_schemas_defaults_are_the_models(spec: dict[str, Any]) -> None:
    assert parse_spec(with_defaults(SPEC, spec)) == parse_spec(spec)


# -------------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize("spec", [MINIMAL, PAIR, FULL], ids=["minimal", "pair", "full"])
def test_sound_specs_are_taken(spec: dict[str, Any]) -> None:
    assert refusals(spec) == []


@pytest.mark.parametrize(
    ("spec", "message"),
    [case[1:] for case in FAULTS if case[0] not in UNKNOWN_TO_THE_SCHEMA],
    ids=[case[0] for case in FAULTS if case[0] not in UNKNOWN_TO_THE_SCHEMA],
)
def test_what_the_operator_refuses_the_api_server_refuses_first(spec: dict[str, Any], message: str) -> None:
    found = refusals(spec)
    assert found
    rules = {rule["message"] for _, node in nodes(SPEC) for rule in node.get("x-kubernetes-validations", [])}
    if any(message.endswith(rule) for rule in rules):
        assert message in found  # word for word, with the same path


@pytest.mark.parametrize("uri", BAD_URIS)
def test_a_uri_of_another_form_is_refused(uri: str) -> None:
    assert refusals({"target": {"model": {"uri": uri}}})


@pytest.mark.parametrize("uri", GOOD_URIS)
def test_uris_of_every_scheme_are_taken(uri: str) -> None:
    assert refusals({"target": {"model": {"uri": uri}}}) == []


@pytest.mark.parametrize(
    ("name", "is_fine"),
    [
        ("chat", True),
        ("c", True),
        ("chat-2", True),
        ("n" * MAX_NAME_LENGTH, True),
        ("n" * (MAX_NAME_LENGTH + 1), False),
        ("2-chat", False),
        ("chat.v2", False),
        ("chat-", False),
    ],
)
def test_a_name_must_fit_a_service_and_every_longer_name(name: str, is_fine: bool) -> None:
    document = {"metadata": {"name": name}}
    found = [rule for rule in ROOT["x-kubernetes-validations"] if not holds(rule["rule"], document)]
    assert (found == []) is is_fine


def test_another_kind_of_cache_can_be_chosen_later() -> None:
    # A default that is stored would be there beside what a later manifest adds.
    stored = with_defaults(SPEC, MINIMAL)
    assert refusals(changed(stored, modelCache__persistentVolumeClaim="cache")) == []


def test_replicas_are_not_made_up() -> None:
    # A default would undo what the autoscaler wrote whenever a manifest replaces the resource.
    assert "replicas" not in with_defaults(SPEC, MINIMAL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_taken(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert (document["apiVersion"], document["kind"]) == (constants.API_VERSION, constants.KIND)
    assert refusals(document["spec"]) == []
    parse_spec(document["spec"])


def test_there_are_examples_for_both_kinds_of_nodes() -> None:
    specs = [yaml.safe_load(path.read_text(encoding="utf-8"))["spec"] for path in EXAMPLES]
    assert {"accelerator" in spec for spec in specs} == {True, False}


def test_merged_conditions_are_what_the_schema_stores() -> None:
    decided = [Condition(kind, "Unknown", "Pending", "nothing is known yet") for kind in ConditionType]
    merged = merge_conditions([], decided, generation=3, now="2026-01-01T00:00:00Z")
    assert list(faults(STATUS, {"observedGeneration": 3, "conditions": merged}, "status")) == []
