"""The grammar of a call's parameters in Qwen3-Coder's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from jaxgen.core.grammar.grammar import Grammar
from jaxgen.errors import InputError, shown
from jaxgen.json_file import types_of
from jaxgen.serving.formats.format import free_text, schema_of

_DEEPEST = 8  # maximum number of references and alternatives that are followed to find the type of a value
ENDS = ("</parameter>", "<parameter=", "</function>", "</tool_call>")  # the tags that end a value
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_LENGTHS = ("minLength", "maxLength")


def properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of a function's parameters by name."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def values_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that `enum` or `const` lists."""
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else [schema["const"]] if "const" in schema else []


def target(root: Mapping[str, Any], reference: Any) -> Any:
    """Return the schema that a reference within `root` points to, or None."""
    found: Any = root if isinstance(reference, str) and reference.startswith("#") else None
    for part in str(reference).split("/")[1:]:
        found = found.get(unquote(part).replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the types that a schema names; none for a schema that names no type."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return set()
    listed = schema.get("type", [])
    found = {name for name in (listed if isinstance(listed, list) else [listed]) if name in _TYPES}
    found |= {"null"} if schema.get("nullable") is True else set()
    if not found:
        found |= {types_of(value)[0] for value in values_of(schema)}
    for keyword in ("anyOf", "oneOf", "allOf"):
        for part in schema[keyword] if isinstance(schema.get(keyword), list) else []:
            found |= types(part, root, depth + 1)
    if "$ref" in schema:
        found |= types(target(root, schema["$ref"]), root, depth + 1)
    return found


def parameters(name: str, schema: dict[str, Any], left_out: list[str] | None = None) -> list[Grammar]:
    """Return the grammar of each parameter of a function, in the order of the schema; optional ones may be left out.

    `left_out` is as in `schema_of`.

    Raises:
        InputError: the schema is not supported.
    """
    try:
        if unsupported := [key for key in schema if key in _WHOLE]:
            raise InputError(f"{name}.parameters has {unsupported[0]}: list the properties there instead")
        required = schema.get("required", [])
        if missing := [key for key in required if key not in properties(schema)]:
            raise InputError(f"{name}.parameters requires {missing}, which are not in its properties: add them there")
        tags = []
        for key, value in properties(schema).items():
            text = _text(value, schema, f"{name}.parameters.properties.{key}", left_out)
            tag = f"<parameter={key}>\n" + text + f"\n{ENDS[0]}\n"
            tags.append(tag if key in required else tag.repeat(0, 1))
        return tags
    except InputError as error:
        raise InputError(f"the tool {name}: {error}") from error


def _text(schema: Any, root: dict[str, Any], where: str, left_out: list[str] | None) -> Grammar:
    """Return the grammar of a value: a string without quotation marks, or anything else as JSON."""
    for _ in range(_DEEPEST):
        if isinstance(schema, dict) and "$ref" in schema:
            found = target(root, schema["$ref"])
            if found is None:
                raise InputError(f"{where} refers to {shown(schema['$ref'])}, which is not in the schema")
            schema = found
    if not isinstance(schema, dict):
        return free_text(*ENDS)
    if values := values_of(schema):
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        if cut := [text for text in texts if any(end in text for end in ENDS)]:
            raise InputError(
                f"{where} allows {shown(cut[0])}, which contains a tag of the model's format: leave it out"
            )
        return Grammar.choice(texts)
    named = types(schema, root)
    if named and "string" not in named:
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return schema_of({**schema, **shared}, where, left_out)
    for keyword in ("pattern", "format"):
        if keyword in schema:
            reason = (
                f"{where} has {keyword}, but this model writes strings without quotation marks, which only enum, "
                "const, minLength and maxLength can limit"
            )
            if left_out is None:
                raise InputError(f"{reason}: leave it out")
            left_out.append(reason)
    if any(key in schema for key in _LENGTHS):
        return Grammar.any_character(but="<").repeat(schema.get("minLength", 0), schema.get("maxLength"))
    return free_text(*ENDS)
