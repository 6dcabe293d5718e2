"""Random JSON schemas and tool signatures, of keywords that can be enforced. Same seed, same schemas.

Numbers have bounds: without them an exponent may be one that no float has.
"""

from __future__ import annotations

import random
from typing import Any

from start_llm.core.messages import Tool

NAMES = ("name", "id", "kind", "path", "line", "count", "on", "the_value", "größe", "x-y")
WORDS = ("red", "green", "a b", 'say "hi"', "back\\slash", "naïve", "")
PATTERNS = ("^[a-z]{1,5}$", "^\\d{2}-\\d{2}$", "^(yes|no)$", "^[A-Z][a-z]{0,3}$")
FORMATS = ("date", "time", "uuid", "ipv4")


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema for an object or an array; sometimes with a recursive definition."""
    schema = _object(rng, depth) if rng.random() < 0.8 else _array(rng, depth)
    if rng.random() < 0.15:
        node = {
            "type": "object",
            "properties": {"v": _scalar(rng), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
        schema = {"type": "object", "properties": {"more": _any(rng, 1), "tree": {"$ref": "#/$defs/node"}}}
        schema |= {"required": ["tree"], "additionalProperties": False, "$defs": {"node": node}}
    return schema


def random_tool(rng: random.Random, index: int, *, xml: bool = False) -> Tool:
    """A tool; with `xml`, one whose arguments the XML formats can write without loss."""
    properties: dict[str, Any] = {}
    for name in rng.sample(NAMES[:8], rng.randint(0, 4)):
        properties[name] = _xml_value(rng) if xml else _any(rng, 2)
    required = [name for name in properties if rng.random() < 0.6]
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.7:
        parameters["additionalProperties"] = False
    return Tool(f"tool_{index}", "", parameters, strict=rng.random() < 0.5)


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth > 0 and rng.random() < 0.45:
        return rng.choice((_object, _array))(rng, depth - 1)
    if rng.random() < 0.15:
        return {"anyOf": [_scalar(rng), {"type": "null"}]}
    return _scalar(rng)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": False,
    }
    if rng.random() < 0.1:
        keys = {"^[a-z]{1,4}$": _scalar(rng)}
        return {"type": "object", "patternProperties": keys, "additionalProperties": False, "maxProperties": 3}
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    schema = {"type": "array", "items": _any(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if rng.random() < 0.15:
        schema["prefixItems"] = [_scalar(rng)]
    return schema


def _scalar(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(-50, 50)
    return rng.choice(  # type: ignore[no-any-return]
        [
            {"type": "boolean"},
            {"type": "null"},
            {"const": rng.choice([1, "fixed", None, True, [1, "a"]])},
            {"enum": rng.sample([*WORDS, 1, 2.5, None, False], 3)},
            {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 300)},
            {"type": "integer", "multipleOf": rng.choice([2, 5, 10]), "minimum": 0, "maximum": 1000},
            {"type": "number", "exclusiveMinimum": least, "exclusiveMaximum": least + 1},
            {"type": "string", "maxLength": rng.randint(0, 8)},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(FORMATS)},
            {"type": ["string", "null"], "maxLength": 4},
        ]
    )


def _xml_value(rng: random.Random) -> dict[str, Any]:
    return rng.choice(  # type: ignore[no-any-return]
        [
            {"type": "string", "maxLength": 8},
            {"type": "string", "minLength": 2, "maxLength": 6},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "enum": ["red", "green"]},
            {"type": "boolean"},
            {"type": "integer", "minimum": 0, "maximum": 500},
            {"type": "number", "minimum": 0, "maximum": 5},
            _array(rng, 1),
            _object(rng, 1),
        ]
    )
