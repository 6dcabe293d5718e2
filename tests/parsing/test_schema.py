from __future__ import annotations

import http.server
import json
import threading
import time
from pathlib import Path
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
        ({"type": "number"}, "-1e999", -1.7976931348623157e308),  # a float holds no smaller one
        ({"type": ["number", "string"]}, "1e999", "1e999"),
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
        ({"anyOf": [{"additionalProperties": False}, {"properties": {"b": INT}}]}, {"b": "1"}, {"b": 1}),
        ({"type": "array", "items": INT}, "[1, '2']", [1, 2]),
        ({"type": "array", "items": STR}, "a", ["a"]),
        ({"type": "object", "properties": {"n": INT}}, '{"n": "1"}', {"n": 1}),
        ({"type": "object", "additionalProperties": INT}, {"x": "1"}, {"x": 1}),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": 3}, "3", 3),
        ({"type": "integer", "maximum": 3}, "9", 9),
        ({"patternProperties": {"^x": STR}, "additionalProperties": INT}, {"x": "1"}, {"x": "1"}),
        ({"prefixItems": [STR], "items": INT}, ["1", 2], ["1", 2]),
        ({"required": [["a"], {}], "properties": {"a": INT}}, {"a": "1"}, {"a": 1}),
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
        ("[1e999]", False, None),  # it would be written as Infinity, which no client reads
        ("{1, 2}", False, None),
        ("b'x'", False, None),
        ("[" * 10_000, False, None),
        ("[" * 3_000 + "]" * 3_000, False, None),
        ('{"a":' * 900 + "1" + "}" * 900, False, None),
        ("9" * 5_000, False, None),
    ],
)
def test_parse_literal(text: str, found: bool, value: Any) -> None:
    assert parse_literal(text) == (found, value)


def bomb(size: int) -> dict[str, Any]:
    """A few lines that a naive reader takes 2**size steps for."""
    parts: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(size)}
    return {"$defs": parts | {f"d{size}": INT}, "$ref": "#/$defs/d0"}


CIRCLES: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}]},
    {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"oneOf": [{"allOf": [{"$ref": "#"}]}]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}},
    {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 2}}},
    {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}},
    {"$defs": {"t": {"properties": {"n": {"$ref": "#/$defs/t"}}}}, "properties": {"a": {"$ref": "#/$defs/t"}}},
]


@pytest.mark.parametrize("schema", CIRCLES)
def test_a_schema_that_refers_to_itself_allows_anything(schema: dict[str, Any]) -> None:
    for found in (Schema(schema), Schema(schema).member("a"), Schema(schema).items):
        assert found.types == frozenset()
        assert found.coerce({"a": "5"}) == {"a": "5"}


def test_a_tree_whose_nodes_refer_to_their_kind_is_read() -> None:
    tree = Schema({"type": "object", "properties": {"n": INT, "sub": {"type": "array", "items": {"$ref": "#"}}}})
    assert tree.coerce({"n": "1", "sub": [{"n": "2", "sub": []}]}) == {"n": 1, "sub": [{"n": 2, "sub": []}]}


def test_references_that_branch_are_given_up() -> None:
    began = time.process_time()
    found = Schema(bomb(40))
    assert found.types == {"integer"}
    assert found.coerce("x") == "x"
    assert [found.coerce("x") for _ in range(100)] == ["x"] * 100
    assert time.process_time() - began < 20


def chain(length: int) -> dict[str, Any]:
    """Each definition says what the next one says."""
    parts: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(length)}
    return {"$defs": parts | {f"d{length}": INT}, "properties": {"v": {"$ref": "#/$defs/d0"}}}


@pytest.mark.parametrize(("length", "value"), [(100, 5), (5_000, "5")])
def test_definitions_that_stand_too_deep_allow_anything(length: int, value: Any) -> None:
    assert Schema(chain(length)).coerce({"v": "5"}) == {"v": value}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "none"},
        {"type": ["none", 5, None]},
        {"type": {"a": 1}},
        {"multipleOf": 0},
        {"multipleOf": 10**400},
        {"maximum": 10**400},
        {"enum": {}},
        {"required": 5, "properties": []},
        {"minLength": "x"},
        {"pattern": "("},
        {"anyOf": {"a": 1}, "allOf": "x"},
        {"$ref": 5},
        {"$schema": {"a": 1}, "$id": 5},
    ],
)
def test_a_broken_schema_refuses_nothing(schema: dict[str, Any]) -> None:
    for value in ("5", 5, 1.5, 1e308, None, [], {"a": 10**400}):
        assert str(Schema(schema).coerce(value)) == str(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(a+)+$"},
        {"patternProperties": {"(a+)+$": {}}, "additionalProperties": False},
        {"allOf": [{"patternProperties": {"(a+)+$": {}}}], "unevaluatedProperties": False},
    ],
)
def test_patterns_are_left_to_grammars(schema: dict[str, Any]) -> None:
    """Python's `re` would take minutes for each, and let nobody else run."""
    text = "a" * 40 + "!"
    for value in (text, {text: "1"}):
        assert Schema(schema).coerce(value) in (value, json.dumps(value))


@pytest.mark.parametrize(
    ("schema", "value", "read"),
    [
        ({"type": "array", "items": {"$ref": "#"}}, "x", ["x"]),
        ({"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "integer"}]}, "x", ["x"]),
        ({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}, "5", [[5]]),
    ],
)
def test_a_value_is_put_into_a_list_once_for_each_schema(schema: dict[str, Any], value: str, read: Any) -> None:
    assert Schema(schema).coerce(value) == read


def test_the_values_of_an_enum_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """50,000 of them and a list of 200 values took 13 s."""
    written: list[Any] = []
    monkeypatch.setattr("start_llm.parsing.schema.dump", lambda value: written.append(value) or json.dumps(value))
    Schema({"items": {"enum": [f"v{n}" for n in range(1_000)]}}).coerce([f"v{n}" for n in range(500)] + ["w"])
    assert len(written) < 3_000


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"items": {"anyOf": [{"type": "integer"}, *[{"type": "string"}] * 2_000]}}, [1] * 500),
        ({"anyOf": [{"properties": {"a": {"type": "string"}}}] * 2_000, "type": "object", "required": ["b"]}, "names"),
        ({"anyOf": [{"items": {"type": "integer"}}] * 2_000}, "items"),
    ],
)
def test_thousands_of_alternatives_are_not_gone_through_for_each_value(
    monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any], value: Any
) -> None:
    made = 0
    resolve = Schema._resolve

    def counted(self: Schema, plain: Any) -> Any:
        nonlocal made
        made += 1
        return resolve(self, plain)

    monkeypatch.setattr(Schema, "_resolve", counted)
    asked = Schema(schema)
    if value == "items":
        assert {asked.items.types for _ in range(500)} == {frozenset({"integer"})}
    else:
        asked.coerce({f"k{n}": 1 for n in range(500)} if value == "names" else value)
    assert made < 100_000


def test_references_to_elsewhere_are_not_fetched(tmp_path: Path) -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/"
        for schema in ({"$ref": f"{url}a"}, {"$id": url, "$ref": "b"}, {"$dynamicRef": f"{url}c"}):
            assert Schema(schema).coerce("5") == "5"
        server.shutdown()
        thread.join()
    assert asked == []
    assert Schema({"$ref": (tmp_path / "schema.json").as_uri()}).coerce("5") == "5"
