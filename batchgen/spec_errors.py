"""pydantic's validation errors in the words of a spec's author: key, what was given, what is allowed.

What is allowed is read off the JSON Schema of the spec, so that it cannot drift from what is checked.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

Schema = Mapping[str, Any]
Keys = tuple[str | int, ...]

_RANGE_ERRORS = frozenset(("greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of"))
_BOUNDS = {
    "exclusiveMinimum": "> {}",
    "minimum": ">= {}",
    "exclusiveMaximum": "< {}",
    "maximum": "<= {}",
    "multipleOf": "a multiple of {}",
}
_NOUNS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}
_FORMATS = {
    "template": 'a "{{ column }}" template',
    "size": 'a size such as "2GiB" (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)',
    "sha256": "64 hexadecimal digits",
    "path": "a path",
    "name": "text without slashes and control characters",
}
_INT_BOUNDS = {2**31 - 1: "2^31 - 1", 2**63 - 1: "2^63 - 1", -(2**63): "-2^63"}  # shown only to who exceeds them


@dataclass(frozen=True)
class Override:
    """A `--set` of the command line: its text, the keys it names and the value read from it."""

    text: str
    keys: tuple[str, ...]
    value: Any


def explain(error: ValidationError, schema: Schema, where: str, overrides: Sequence[Override] = ()) -> str:
    """A line per problem; each starts with the override that set the key, or with `where`.

    `schema` is the JSON Schema of the model that was validated.
    """
    problems = [_problem(detail, schema) for detail in error.errors(include_url=False)]
    return "\n".join(f"{_origin(keys, where, overrides)}: {text}" for keys, text in problems)


def explain_value(error: ValidationError, value: Any, schema: Schema) -> str:
    """Why a single `value` is refused by the type that `schema` describes."""
    return _not_allowed(error.errors(include_url=False)[0]["type"], value, schema, schema)


def _origin(keys: Keys, where: str, overrides: Sequence[Override]) -> str:
    for override in reversed(overrides):
        if keys[: len(override.keys)] == override.keys:
            return f"--set {override.text}"
    near = [override.text for override in overrides if override.keys[: len(keys)] == keys]
    return " ".join([where, *(f"with --set {text}" for text in near)])


def _problem(detail: Mapping[str, Any], root: Schema) -> tuple[Keys, str]:
    """The keys that lead to a problem, and its text."""
    keys = tuple(key for key in detail["loc"] if not str(key).startswith("#"))
    name = _dotted(keys)
    match detail["type"]:
        case "extra_forbidden":
            return keys, f"unknown key {name!r}{_suggestion(keys, root)}"
        case "missing":
            return keys, f"{name} is missing: must be {_allowed(_at(root, keys, root), root)}"
        case "value_error":
            return keys, f"{name}: {detail['ctx']['error']}" if name else str(detail["ctx"]["error"])
        case kind:
            return keys, f"{name}: {_not_allowed(kind, detail['input'], _at(root, keys, root), root)}"


def _not_allowed(kind: str, value: Any, schema: Schema, root: Schema) -> str:
    if kind == "string_unicode":
        allowed = "text that UTF-8 can hold, without lone surrogates"
    else:
        allowed = _ranges(schema, root, kind) if kind in _RANGE_ERRORS else _allowed(schema, root)
    return f"{_shown(value)} is not allowed: must be {allowed}"


def _dotted(keys: Keys) -> str:
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def _shown(value: Any) -> str:
    """`value` as YAML would write it, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    text = {"NaN": ".nan", "Infinity": ".inf", "-Infinity": "-.inf"}.get(text, text)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else text[:77] + "..."


def _suggestion(keys: Keys, root: Schema) -> str:
    """The nearest valid name, or where the key belongs, or the names there are."""
    *above, last = keys
    names = list(_properties(_at(root, tuple(above), root), root))
    near = difflib.get_close_matches(str(last), names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    for section in _properties(root, root):
        if last in _properties(_at(root, (section,), root), root):
            return f"; did you mean '{section}.{last}'?"
    return f"; the keys here are {', '.join(names)}"


def _at(schema: Schema, keys: Keys, root: Schema) -> Schema:
    """The part of the schema that describes what `keys` lead to; {} if there is none."""
    for key in keys:
        found = (_step(choice, key, root) for choice in _choices(schema, root))
        schema = next((part for part in found if part), {})
    return schema


def _step(schema: Schema, key: str | int, root: Schema) -> Schema:
    if isinstance(key, int):
        return schema.get("items", {})
    any_key = _resolve(schema, root).get("additionalProperties") or {}  # false where the keys are known
    return _properties(schema, root).get(key, any_key)


def _properties(schema: Schema, root: Schema) -> Mapping[str, Any]:
    return _resolve(schema, root).get("properties", {})


def _resolve(schema: Schema, root: Schema) -> Schema:
    """Follow a `$ref` into the definitions of `root`."""
    return root["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _choices(schema: Schema, root: Schema) -> Iterator[Schema]:
    """The alternatives of a union, flattened; a plain schema is its only one."""
    schema = _resolve(schema, root)
    parts = schema.get("oneOf") or schema.get("anyOf")
    if not parts:
        yield schema
        return
    for part in parts:
        yield from _choices(part, root)


def _allowed(schema: Schema, root: Schema) -> str:
    """What the schema admits, in words: "a number >= 0, or a template"."""
    texts = [_noun(choice, root) for choice in _choices(schema, root)]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]


def _noun(schema: Schema, root: Schema) -> str:
    if "const" in schema:
        return _shown(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    if "format" in schema:
        return _FORMATS[schema["format"]]
    if schema.get("type") == "array":
        return f"a list of which each item is {_allowed(schema.get('items', {}), root)}"
    if schema["type"] == "object" and "additionalProperties" in schema and "properties" not in schema:
        return f"keys, of which each is {_allowed(schema['additionalProperties'], root)}"
    if schema["type"] == "object":
        return f"a section of keys ({', '.join(_properties(schema, root))})"
    noun = "non-empty text" if schema.get("minLength") else _NOUNS[schema["type"]]
    return f"{noun} {_bounds(schema)}".strip()


def _ranges(schema: Schema, root: Schema, kind: str) -> str:
    return " or ".join(text for choice in _choices(schema, root) if (text := _bounds(choice, kind)))


def _bounds(schema: Schema, kind: str = "") -> str:
    """The range of a number: "> 0 and <= 1"."""
    parts = [(text, schema[key]) for key, text in _BOUNDS.items() if key in schema]
    return " and ".join(text.format(_number(bound)) for text, bound in parts if _matters(text, bound, kind))


def _matters(text: str, bound: float, kind: str) -> bool:
    """Whether a bound is a rule to know, not just the size of an integer type."""
    return bound not in _INT_BOUNDS or kind == {"<": "less_than_equal", ">": "greater_than_equal"}[text[0]]


def _number(value: float) -> str:
    return _INT_BOUNDS.get(int(value)) or (f"{value:,.0f}" if value == int(value) else f"{value:g}")
