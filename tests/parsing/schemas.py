"""Generated JSON schemas: most of them sound, many with rings, contradictions, odd values or something huge in them."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "b", "c", "path", "ä", "x y", "a/b", "~", "", "$ref", 'q"', "n\n")
SCALARS = (None, True, False, 0, -1, 1.5, 1e300, "", "a", "null", "é\u2028", "</parameter>", [], {}, [1], {"a": None})
PATTERNS = ("^a$", "a|b", "(a|b)*c", "[0-9]{1,3}", "^\\S+$", "(", "(?=a)b", "\\d{4}-\\d{2}", "a{1,500}")
PATTERNS += ("(a{1,30}){1,30}", ".*")
FORMATS = ("date-time", "uuid", "email", "uri", "ipv4", "hostname", "made-up")
COUNTS = (*(0, 1, 2, 3, 10) * 10, 2**31, 2**63, -5, 0.5)
NUMBERS = (*(1, 2, 3, 7, 10, 100, 0.1) * 5, 0, -5, 1e-9, 2**31, 2**63, 10**40, -(10**30))
REFERENCES = ("#", "#/$defs/x", "#/$defs/y", "#/$defs/z", "#/properties/a", "#x", "http://x/y")
EXTRAS: tuple[dict[str, Any], ...] = (
    {"not": {}}, {"if": {}, "then": {}}, {"type": "object"}, {"$ref": "#"}, {"minProperties": 1}, {"title": 5},
    {"dependentRequired": {"a": ["b"]}}, {"propertyNames": {"pattern": "^a"}}, {"uniqueItems": True},
    {"description": "x"}, {"default": 1}, {"title": 5}, {"$id": "x"}, {"$anchor": "x"},
    {"unevaluatedProperties": False},
)  # fmt: skip


def schema(chance: random.Random) -> Any:
    """One whole schema, with definitions that its references name (or do not)."""
    found = _part(chance, chance.randrange(1, 5))
    if not isinstance(found, dict):
        return found if chance.random() < 0.05 else {"anyOf": [found, {"type": "null"}]}
    if chance.random() < 0.9:
        found["$defs"] = {name: _part(chance, 2) for name in "xyz"}
    if chance.random() < 0.3:
        _grow(chance, found)
    return found


def _part(chance: random.Random, depth: int) -> Any:
    roll = chance.random()
    if roll < 0.03:
        return chance.random() < 0.5
    if roll < 0.15:
        return {"$ref": chance.choice(REFERENCES)}
    if roll < 0.25 or not depth:
        return _scalar(chance)
    if roll < 0.45:
        words = chance.choice(("anyOf", "oneOf", "allOf"))
        return {words: [_part(chance, depth - 1) for _ in range(chance.randrange(1, 4))]} | _extras(chance)
    if roll < 0.6:
        found: dict[str, Any] = {"type": "array", "items": _part(chance, depth - 1)}
        if chance.random() < 0.3:
            found["prefixItems"] = [_part(chance, depth - 1) for _ in range(chance.randrange(1, 3))]
        return found | _numbers(chance, COUNTS, "minItems", "maxItems")
    names = chance.sample(NAMES, chance.randrange(0, 4))
    found = {"type": "object", "properties": {name: _part(chance, depth - 1) for name in names}}
    if chance.random() < 0.5:
        found["required"] = chance.sample(NAMES, chance.randrange(0, 3)) if chance.random() < 0.2 else names
    if chance.random() < 0.4:
        found["additionalProperties"] = _part(chance, depth - 1) if chance.random() < 0.4 else False
    if chance.random() < 0.1:
        found["patternProperties"] = {chance.choice(PATTERNS): _part(chance, depth - 1)}
    return found | _extras(chance)


def _scalar(chance: random.Random) -> dict[str, Any]:
    match chance.randrange(6):
        case 0:
            return {"const": chance.choice(SCALARS)}
        case 1:
            return {"enum": chance.sample(SCALARS, chance.randrange(0, 4))}
        case 2:
            found: dict[str, Any] = {"type": "string"} | _numbers(chance, COUNTS, "minLength", "maxLength")
            if chance.random() < 0.4:
                found["pattern"] = chance.choice(PATTERNS)
            if chance.random() < 0.2:
                found["format"] = chance.choice(FORMATS)
            return found
        case 3:
            kind = chance.choice(("number", "integer"))
            return {"type": kind} | _numbers(chance, NUMBERS, "minimum", "maximum", "exclusiveMinimum", "multipleOf")
        case 4:
            return {"type": chance.choice((*("boolean", "null", "object", "array", ["string", "null"]) * 5, "any", []))}
        case _:
            return {}


def _numbers(chance: random.Random, numbers: tuple[float, ...], *words: str) -> dict[str, Any]:
    return {word: chance.choice(numbers) for word in words if chance.random() < 0.2}


def _extras(chance: random.Random) -> dict[str, Any]:
    if chance.random() > 0.1:
        return {}
    return chance.choice(EXTRAS)


def _grow(chance: random.Random, found: dict[str, Any]) -> None:
    """Makes one thing in it large."""
    size = chance.choice((20, 200, 2_000))
    members = found.setdefault("properties", {})
    match chance.randrange(8):
        case 0:
            members["large"] = {"const": "x" * size * 100}
        case 1:
            members["large"] = {"enum": [f"{i}{'y' * 20}" for i in range(size)]}
        case 2:
            found["allOf"] = [{"properties": {f"p{i}_{j}": {} for j in range(20)}} for i in range(size // 10)]
        case 3:
            members["large"] = {"type": "string", "pattern": f"^(ab?){{1,{size}}}c{{1,{size}}}$"}
        case 4:
            members["large"] = {"type": "array", "items": {"type": "string"}, "minItems": size, "maxItems": size * 2}
        case 5:
            members.update({f"m{i}": {"type": "string"} for i in range(size)})
        case 6:
            ring = {f"r{i}": {"$ref": f"#/$defs/r{(i + 1) % 20}"} for i in range(20)}
            found["$defs"] = ring | found.get("$defs", {})
            members["large"] = {"$ref": "#/$defs/r0"}
        case _:
            large: dict[str, Any] = {"type": "string"}
            for _ in range(size // 4):
                large = {"type": "object", "properties": {"a": large}, "required": ["a"]}
            members["large"] = large
    if "large" in members and chance.random() < 0.7:
        found["required"] = ["large"]
        found["type"] = "object"
