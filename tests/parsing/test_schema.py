from __future__ import annotations

from typing import Any

import pytest

from start_llm.parsing.schema import Schema, parse_literal

INT, BOOL, STR = {"type": "integer"}, {"type": "boolean"}, {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (INT, "5", 5),
        (INT, "5.0", 5),
        (INT, 5.0, 5.0),
        (INT, "five", "five"),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "number"}, "1e3", 1000.0),
        (BOOL, "True", True),
        (BOOL, "no", False),
        (BOOL, 1, True),
        (STR, 5, "5"),
        (STR, True, "true"),
        (STR, {"a": 1}, '{"a": 1}'),
        (STR, "5", "5"),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "", None),
        ({"anyOf": [INT, {"type": "null"}]}, "7", 7),
        ({"type": "array", "items": INT}, "[1, '2']", [1, 2]),
        ({"type": "array", "items": STR}, "a", ["a"]),
        ({"type": "object", "properties": {"n": INT}}, '{"n": "1"}', {"n": 1}),
        ({"type": "object", "additionalProperties": INT}, {"x": "1"}, {"x": 1}),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": 3}, "3", 3),
        ({"type": "integer", "maximum": 3}, "9", 9),
        ({}, "5", "5"),
        ({"type": 17}, "5", "5"),
        ({"$ref": "#/$defs/none"}, "5", "5"),
        ({"$ref": "https://example.org/x"}, "5", "5"),
    ],
)
def test_coerce(schema: dict[str, Any], value: Any, expected: Any) -> None:
    found = Schema(schema).coerce(value)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (INT, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [INT, STR]}, {"integer", "string"}),
        ({"anyOf": [INT, {}]}, set()),
        ({"allOf": [{"minimum": 1}, INT]}, {"integer"}),
        ({"enum": ["a", None]}, {"string", "null"}),
        ({}, set()),
    ],
)
def test_types(schema: dict[str, Any], types: set[str]) -> None:
    assert Schema(schema).types == types


def test_references_are_followed_and_loops_end() -> None:
    root = {"properties": {"a": {"$ref": "#/$defs/a~1b"}, "loop": {"$ref": "#/$defs/loop"}}, "$defs": {
        "a/b": INT, "loop": {"$ref": "#/$defs/loop"}}}  # fmt: skip
    assert Schema(root).member("a").types == {"integer"}
    assert Schema(root).member("loop").types == frozenset()


@pytest.mark.parametrize(
    ("text", "found", "value"),
    [
        ("1", True, 1),
        ("{'a': True}", True, {"a": True}),
        ("(1, 2)", True, [1, 2]),
        ("word", False, None),
        ("NaN", False, None),
        ("{1, 2}", False, None),
        ("b'x'", False, None),
        ("[" * 10_000, False, None),
    ],
)
def test_parse_literal(text: str, found: bool, value: Any) -> None:
    assert parse_literal(text) == (found, value)
