"""Arguments that a family writes as bare text, typed by what the tool declares."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from turnfold.schemas.messages import Tool

_NAMED = {"true": True, "false": False}
_INTEGER = re.compile(r"[+-]?[0-9]+")
_MAX_REFERENCES = 16
"""References that are followed one after another; a schema may refer to itself."""

_BIG = 2**63


def parameter_schemas(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """Schema of each parameter that the tool declares, references within it resolved."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and function.get("name") == name:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            if isinstance(schema, dict) and isinstance(properties, dict):
                return {key: _resolved(part, schema) for key, part in properties.items()}
    return {}


def tool_names(tools: Sequence[Tool]) -> frozenset[str]:
    """Names of the tools."""
    functions = [tool.get("function", tool) for tool in tools]
    return frozenset(str(f["name"]) for f in functions if isinstance(f, dict) and "name" in f)


def typed_values(values: Mapping[str, str], name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """The values in their order, each as `typed_value` reads it."""
    schemas = parameter_schemas(name, tools)
    return {key: typed_value(text, schemas.get(key)) for key, text in values.items()}


def typed_value(text: str, schema: Any) -> Any:
    """The text as a value of the declared type; as it stands when the type is unknown or a string.

    >>> typed_value('{"a": 1}', {"type": "string"})
    '{"a": 1}'
    >>> typed_value("1e5", {"type": "number"})
    100000.0
    >>> typed_value("null", {"type": ["integer", "null"]}) is None
    True

    A type that the text does not fit leaves the text: the tool says best what is wrong with it.
    Python's True, False and None count as JSON's, as some templates write them.
    """
    types = declared_types(schema)
    bare = text.strip()
    if "null" in types and bare.lower() in ("null", "none"):
        return None
    if not types or "string" in types:
        return text
    for type_ in ("boolean", "integer", "number"):
        if type_ in types:
            value = _scalar(bare, type_)
            if value is not None:
                return value
    if types & {"object", "array"}:
        return _container(text, types)
    return text


def declared_types(schema: Any) -> frozenset[str]:
    """JSON types that the schema allows; empty when it does not say.

    >>> sorted(declared_types({"anyOf": [{"type": "integer"}, {"type": "null"}]}))
    ['integer', 'null']
    """
    if not isinstance(schema, dict):
        return frozenset()
    type_ = schema.get("type")
    if isinstance(type_, str):
        return frozenset((type_,))
    if isinstance(type_, list):
        return frozenset(name for name in type_ if isinstance(name, str))
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            return frozenset().union(*map(declared_types, schema[word]))
    if "const" in schema or isinstance(schema.get("enum"), list):
        allowed = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]]
        return frozenset(map(_type_of, allowed))
    if "properties" in schema:
        return frozenset(("object",))
    return frozenset(("array",)) if "items" in schema else frozenset()


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def _scalar(text: str, type_: str) -> bool | int | float | None:
    """The text as a value of the type; None when it is none, or the log cannot hold it."""
    if type_ == "boolean":
        return _NAMED.get(text.lower())
    try:
        if _INTEGER.fullmatch(text):
            value = int(text)
            return value if -_BIG <= value < 2 * _BIG else None
        if type_ == "integer":
            return None
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and "_" not in text else None


def _container(text: str, types: frozenset[str]) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_declared = ("object" in types and isinstance(value, dict)) or (
        "array" in types and isinstance(value, list)
    )
    return value if is_declared else text


def _resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema with references at its top and in its alternatives replaced."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            break
        schema = _at_pointer(root, reference)
    if not isinstance(schema, dict):
        return schema
    alternatives = {
        word: [_referred(part, root) for part in schema[word]]
        for word in ("anyOf", "oneOf", "allOf")
        if isinstance(schema.get(word), list)
    }
    return {**schema, **alternatives}


def _referred(schema: Any, root: Mapping[str, Any]) -> Any:
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    return _at_pointer(root, reference) if isinstance(reference, str) else schema


def _at_pointer(root: Mapping[str, Any], pointer: str) -> Any:
    """What a reference like `#/$defs/Point` names; None when nothing is there."""
    value: Any = root
    for step in pointer.removeprefix("#").split("/")[1:]:
        value = (
            value.get(step.replace("~1", "/").replace("~0", "~"))
            if isinstance(value, dict)
            else None
        )
    return value
