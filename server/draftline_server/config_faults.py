"""Turns a fault of the configuration into one line that a person can act on.

pydantic says what is wrong; this module adds the full path of the key, what is allowed there and, for an
unknown key, the known one that was probably meant. It knows no key of its own: everything is read from
the JSON schema of the model. It also reads YAML more strictly than PyYAML does: a key given twice is
refused, because the first value would be lost silently.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Hashable
from typing import Any

import pydantic
import yaml
from pydantic import BaseModel

Location = tuple[int | str, ...]
Schema = dict[str, Any]

_SHOWN_CHARACTERS = 60


class DuplicateKeyError(Exception):
    """A key stands twice in one mapping of the file."""


def explain(error: pydantic.ValidationError, model: type[BaseModel]) -> str:
    """One line for the first fault; an unknown key goes first, since it may be a missing one misspelt."""
    faults = error.errors(include_url=False)
    fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    location, kind = fault["loc"], fault["type"]
    schema = model.model_json_schema(mode="validation")
    path = format_path(location)
    if kind == "inconsistent":  # raised by our own validators, which know the path
        return _one_line(fault["msg"])
    if kind == "invalid_key":
        return f"{format_path(tuple(map(str, location)))}: unknown key; every key is text"
    if kind == "extra_forbidden":
        return f"{path}: unknown key; {_suggest(location, schema)}"
    if kind == "missing":
        return f"{path}: missing; it must be {_allowed(_descend(location, schema), schema)}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{path}: must be a mapping of keys, not {describe_value(fault['input'])}"
    if kind == "value_error":
        return f"{path}: {_one_line(str(fault['ctx']['error']))}, not {describe_value(fault['input'])}"
    allowed = _allowed(_descend(location, schema), schema)
    return f"{path}: must be {allowed}, not {describe_value(fault['input'])}"


def format_path(location: Location) -> str:
    """``("a", "b", 0)`` becomes ``a.b[0]``."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f"{'.' if path else ''}{part}"
    return path or "(the file)"


def describe_value(value: object) -> str:
    """The value as it may stand in a message: short, one line, nothing of a collection's content."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping of keys"
    if isinstance(value, (list, tuple, set)):
        return "a list"
    if isinstance(value, (str, bool)):
        return _shorten(json.dumps(value, ensure_ascii=False))
    return _shorten(str(value))


def parse_yaml(text: str) -> object:
    """Parses one YAML document; raises `yaml.YAMLError` or `DuplicateKeyError`."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_duplicates(node, path=(), seen=set())
        document: object = loader.construct_document(node)
        return document
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """Refuses a scalar that its type does not fit as YAML's own faults are; PyYAML raises anything."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            if not isinstance(node, yaml.ScalarNode):
                raise
            kind = node.tag.rpartition(":")[2]
            reason = f"{describe_value(node.value)} is no {kind}"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from error


def _refuse_duplicates(node: yaml.Node, *, path: Location, seen: set[int]) -> None:
    if id(node) in seen:  # an alias, perhaps of one of its own parents
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _refuse_duplicates(item, path=(*path, index), seen=seen)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[Hashable, int] = {}
    for key, value in node.value:
        name = str(key.value)
        line = key.start_mark.line + 1
        if name in lines and key.tag != "tag:yaml.org,2002:merge":
            where = format_path((*path, name))
            raise DuplicateKeyError(f"{where}: given twice, in lines {lines[name]} and {line}")
        lines[name] = line
        _refuse_duplicates(value, path=(*path, name), seen=seen)


def _suggest(location: Location, schema: Schema) -> str:
    known = sorted(_descend(location[:-1], schema).get("properties", {}))
    near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    elsewhere = _paths_of(str(location[-1]), schema)
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"known here: {', '.join(known)}"


def _paths_of(name: str, schema: Schema) -> list[str]:
    """Where in the file a key of this name is known: it may only stand at the wrong place."""
    found: list[str] = []

    def visit(section: Schema, path: Location) -> None:
        for key, child in section.get("properties", {}).items():
            if key == name:
                found.append(format_path((*path, key)))
            visit(_resolve(child, schema), (*path, key))

    visit(schema, ())
    return found


def _descend(location: Location, schema: Schema) -> Schema:
    section = schema
    for part in location:
        section = _resolve(section, schema)
        if isinstance(part, int):
            section = section.get("items", {})
        else:
            section = section.get("properties", {}).get(part, {})
    return _resolve(section, schema)


def _resolve(section: Schema, schema: Schema) -> Schema:
    """Follows a reference, and an "X or null" to its X."""
    if "anyOf" in section:
        section = next((choice for choice in section["anyOf"] if choice.get("type") != "null"), {})
    if "$ref" in section:
        name = section["$ref"].rpartition("/")[2]
        resolved: Schema = schema["$defs"][name]
        return resolved
    return section


def _allowed(section: Schema, schema: Schema) -> str:
    if "enum" in section:
        return f"one of {', '.join(map(str, section['enum']))}"
    if "description_of_value" in section:
        return f"{section['description_of_value']}{_range(section)}"
    kind = section.get("type")
    if kind == "array":
        return f"a list; each item {_allowed(_resolve(section.get('items', {}), schema), schema)}"
    if kind == "string" and "pattern" in section:
        return f"text that matches {section['pattern']}"
    if "maxLength" in section:
        return f"text of {section['minLength']} to {section['maxLength']} characters"
    words = {
        "integer": "an integer",
        "number": "a number",
        "boolean": "true or false",
        "string": "text that is not empty",
        "object": "a mapping of keys",
    }
    return f"{words.get(str(kind), 'another value')}{_range(section)}"


def _range(section: Schema) -> str:
    # The short names are what pydantic writes for a value with a parser of its own.
    low = section.get("minimum", section.get("ge"))
    above = section.get("exclusiveMinimum", section.get("gt"))
    high = section.get("maximum", section.get("le"))
    if low is not None and low == high:
        return f" equal to {low:g}"
    parts = []
    if low is not None:
        parts.append(f"at least {low}")
    if above is not None:
        parts.append(f"above {above}")
    if high is not None:
        parts.append(f"at most {high}")
    return f" {' and '.join(parts)}" if parts else ""


def _shorten(text: str) -> str:
    line = _one_line(text)
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 3]}..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
