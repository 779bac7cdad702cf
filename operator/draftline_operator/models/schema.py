"""What fields of the resource are made of: types with bounds, and conditions over several of them.

The CRD's schema is generated from them, so each type also says what it is there.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from draftline_operator.errors import InvalidSpecError
from draftline_operator.models.quantity import PATTERN, canonical_quantity, parse_quantity


class Rule(NamedTuple):
    """A condition over several fields; `field` is the one to change first, relative to the section."""

    field: str
    message: str
    cel: str

    def fault(self) -> PydanticCustomError:
        return PydanticCustomError("inconsistent", self.message, {"field": self.field})

    def as_schema(self) -> dict[str, JsonValue]:
        path: dict[str, JsonValue] = {"fieldPath": f".{self.field}"} if self.field else {}
        return {"rule": self.cel, "message": self.message, **path}


def with_rules(*rules: Rule) -> ConfigDict:
    stated: list[JsonValue] = [rule.as_schema() for rule in rules]
    return ConfigDict(json_schema_extra={"x-kubernetes-validations": stated})


def _positive_quantity(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return value
    if parse_quantity(value) <= 0:
        raise ValueError("must be above 0")
    return canonical_quantity(value)


def _label_key(key: str) -> str:
    prefix, _, name = key.rpartition("/")
    if len(prefix) > 253 or not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", name):
        raise ValueError("must be a label key, such as team or example.com/team")
    return key


_QUANTITY_RULE = (
    "type(self) == int ? self > 0 : isQuantity(self) && quantity(self).isGreaterThan(quantity('0'))"
)
_KEYS_RULE = "self.all(key, size(key) <= 317)"

Quantity = Annotated[
    str,
    BeforeValidator(_positive_quantity),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": PATTERN,
            "maxLength": 32,
            "x-kubernetes-validations": [
                {"rule": _QUANTITY_RULE, "message": "must be a quantity above 0, such as 80Gi"}
            ],
        }
    ),
]
"""Kept in one spelling, so that equal specs give equal children."""
Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
"""Of an object."""

_KEYS = Field(
    max_length=64,
    json_schema_extra={
        "x-kubernetes-validations": [{"rule": _KEYS_RULE, "message": "a key has at most 317 characters"}]
    },
)
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$")]
Labels = Annotated[dict[Annotated[str, AfterValidator(_label_key)], LabelValue], _KEYS]
Annotations = Annotated[
    dict[Annotated[str, AfterValidator(_label_key)], Annotated[str, Field(max_length=16384)]], _KEYS
]

KubernetesObject = dict[str, Any]
"""A part of a core type, passed through as it is."""


def as_object(value: Any, field: str) -> KubernetesObject:
    """A part of what the schema takes as it comes; raises `InvalidSpecError` where it is no object."""
    if not isinstance(value, dict):
        raise InvalidSpecError(field, "must be an object")
    return value


def has_text(key: str) -> AfterValidator:
    def check(value: KubernetesObject) -> KubernetesObject:
        if not isinstance(value.get(key), str) or not value[key]:
            raise ValueError(f"{key} is missing")
        return value

    return AfterValidator(check)


def known_field(key: str, description: str, max_length: int) -> Any:
    """Of a passed-through object, the one field by which lists of it merge."""
    known: dict[str, JsonValue] = {
        "type": "string",
        "description": description,
        "minLength": 1,
        "maxLength": max_length,
    }
    return Field(json_schema_extra={"properties": {key: known}, "required": [key]})


def list_by(key: str, max_length: int = 64) -> Any:
    merge: dict[str, JsonValue] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
    return Field(max_length=max_length, json_schema_extra=merge)


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
