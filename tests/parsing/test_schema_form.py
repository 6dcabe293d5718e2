"""Schemas are checked for their form as jsonschema would, and quickly."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from llguidance import LLMatcher

from start_llm.core.errors import BadRequest
from start_llm.core.limits import ENUM, LITERAL, MULTIPLE, SUBSCHEMAS
from start_llm.core.messages import Tool
from start_llm.core.request import ResponseFormat, ToolChoice
from start_llm.engine.decode.constraint import LIMITS
from start_llm.parsing.schema_form import KINDS, LEAST, endless, malformed, size, subschemas
from tests.kinds import some
from tests.parsing.test_schema import CIRCLES
from tests.parsing.vocabulary import BOTH, BYTES, Vocabulary, constraint

VALUES: list[Any] = [
    None, True, 0, -1, 5, 0.5, 2.0, "", "object", "none", [], ["a"], ["a", "a"], [1], ["string", "null"], {}, {"a": {}},
    {"a": 1}, {"a": ["b"]}, {"a": True}, [{}], [True], [[]], "#", "^a$",
]  # fmt: skip
OUR_OWN = {("multipleOf", 2.0)}


@pytest.mark.parametrize("keyword", sorted(KINDS))
def test_each_keyword_is_judged_as_by_the_meta_schema(keyword: str) -> None:
    for value in VALUES:
        wanted = valid({keyword: value})
        if keyword == "items" and isinstance(value, list):
            wanted = value == [] or valid({"prefixItems": value})  # as in older drafts
        if keyword == "additionalItems":
            wanted = isinstance(value, dict | bool) and valid({"not": value})
        if keyword in ("$id", "$ref", "$schema", "$anchor", "$dynamicRef", "$recursiveRef"):
            wanted = isinstance(value, str)  # what it says is looked at elsewhere
        if keyword == "definitions":
            wanted = valid({"$defs": value})
        assert (malformed({keyword: value}) is None) == wanted, value


def valid(schema: Any) -> bool:
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError:
        return False
    return True


def test_what_is_wrong_is_told_with_its_place() -> None:
    inside = {"properties": {"a": {"items": {"anyOf": [{}, {"type": "none"}]}}}}
    problem = malformed(inside) or ""
    assert problem.startswith("'type' at $.properties.a.items.anyOf[1].type must be one of array,")
    assert malformed({"enum": list(range(ENUM.most + 1))}) is not None
    assert malformed({"multipleOf": MULTIPLE.most}) is None
    assert malformed({"multipleOf": MULTIPLE.most + 1}) is not None
    assert len(malformed({"type": "x" * 1000}) or "") < 250


def test_size_counts_every_schema_once() -> None:
    assert size({}) == size(True) == size(None) == 1
    assert size({"properties": {"a": {}, "b": {"items": {}}}, "anyOf": [{}], "enum": [{}, {}]}) == 5
    assert [path for path, _ in subschemas({"not": {"not": {}}})] == ["$", "$.not", "$.not.not"]


def integers(*multiples: float) -> list[dict[str, Any]]:
    return [{"type": "integer", "multipleOf": multiple} for multiple in multiples]


def named(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": schema for i, schema in enumerate(schemas)}}


DEAR: dict[str, dict[str, Any]] = {
    "a multiple of several": {"allOf": integers(97, 89, 83)},
    "one of several multiples": {"anyOf": integers(*range(9_000, 9_100))},
    "a multiple of its own and of another": {"multipleOf": 9_973, "anyOf": integers(9_967)},
    "multiples in many places": named(integers(*range(9_000, 9_400))),
    "15,000 names that are only required": {"type": "object", "required": [f"r{i}" for i in range(15_000)]},
    "1,400 patterns of names": {"type": "object", "patternProperties": {f"^x{i:04}y.*z$": {} for i in range(1_400)}},
    "2,000 ranges of numbers": named([{"type": "number", "minimum": i + 0.5, "maximum": i + 9} for i in range(2_000)]),
    "20,000 alternatives": {"anyOf": [{"const": i} for i in range(20_000)]},
    "a pattern of a megabyte": {"type": "string", "pattern": "|".join(f"word{i}" for i in range(100_000))},
}
"""Each took from ten seconds to hours, and some gigabytes of memory, though few of them are long."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", DEAR)
def test_what_costs_as_much_as_a_large_schema_counts_as_one(name: str) -> None:
    with pytest.raises(BadRequest, match=f"at most {SUBSCHEMAS.most:,} schemas"):
        constraint(BYTES, response_format=ResponseFormat("json_schema", DEAR[name]))
    loose = constraint(BYTES, tools=(Tool("f", "", named([DEAR[name]])),), tool_choice=ToolChoice("required"))
    assert BYTES.accepts(loose, '<tool_call>\n{"name": "f", "arguments": {"q": 1}}\n</tool_call>')


def test_what_people_write_is_cheap() -> None:
    prices = named([{"type": "number", "minimum": 0, "maximum": 1_000, "multipleOf": 0.01}] * 20)
    versions = {"type": "object", "patternProperties": {"^v[0-9]+$": prices, "^x-": {"type": "string"}}}
    steps = {"$defs": {"step": {"type": "integer", "multipleOf": 5}}, "anyOf": [{"$ref": "#/$defs/step"}, prices]}
    assert size(prices) < 250 and size(versions) < 270 and size(steps) < 400
    assert size({"properties": {"a": {}}, "required": ["a"]}) == 2
    assert size({"required": 5, "patternProperties": [], "pattern": {}, "multipleOf": "x", "minimum": None}) < 10


def test_large_tools_are_refused_before_anything_is_made_of_them() -> None:
    large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}
    many = {"type": "object", "properties": {f"p{i}": {} for i in range(60)}}
    tools = tuple(Tool(f"f{i}", "", many, strict=True) for i in range(60))
    began = time.process_time()
    for each in ((Tool("f", "", large, strict=True),), tools):
        with pytest.raises(BadRequest, match=f"at most {SUBSCHEMAS.most:,} schemas"):
            constraint(BYTES, tools=each)
    # Nobody asked that the arguments of a tool that is not strict be held to its schema.
    forced = constraint(BYTES, tools=(Tool("f", "", large), *tools[:3]), tool_choice=ToolChoice("required"))
    assert BYTES.accepts(forced, '<tool_call>\n{"name": "f", "arguments": {"q": 1}}\n</tool_call>')
    assert time.process_time() - began < 20


@BOTH
@pytest.mark.parametrize("tool_format", some(["qwen3_coder", "hermes_json", "glm47"]))
@pytest.mark.parametrize("schema", [*CIRCLES, {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}])
@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_that_refers_to_itself_is_kept_or_refused(
    schema: dict[str, Any], tool_format: str, words: Vocabulary, strict: bool
) -> None:
    tool = Tool("f", "", schema, strict=strict)
    try:
        made = constraint(words, tool_format, tools=(tool,), tool_choice=ToolChoice("required"))
    except BadRequest as error:
        assert strict and error.param == "tools[0].function.parameters"
    else:
        assert made is not None


X = {"$ref": "#/$defs/x"}
NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ({"$ref": "#"}, "$"),
        ({**X, "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}}, "$"),
        ({"properties": {"a": X}, "$defs": {"x": {"anyOf": [X, {"allOf": [X, {}]}]}}}, "$.properties.a"),
        ({**NODE, "required": ["next"]}, "$.properties.next"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "$.items"),
        ({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2}, "$.prefixItems[1]"),
        ({"additionalProperties": {"oneOf": [X]}, "$defs": {"x": X}}, "$.additionalProperties.oneOf[0]"),
        ({"oneOf": [{"$ref": "#"}, {"enum": []}, False]}, "$.oneOf[0]"),
        ({"oneOf": [{"$ref": "#"}, {"enum": [False]}]}, None),
        (NODE, None),
        ({"type": "array", "items": {"$ref": "#"}}, None),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, None),
        ({**NODE, "type": ["object", "null"], "required": ["next"]}, None),
        ({"type": "array", "prefixItems": [{}], "items": {"$ref": "#"}, "minItems": 1}, None),
        ({**X, "$defs": {"x": {"type": "string"}, "unused": {"$ref": "#/$defs/unused"}}}, None),
        ({"$ref": "#/$defs/nothing"}, None),
    ],
)
def test_a_reference_that_never_ends_is_found(asked: dict[str, Any], place: str | None) -> None:
    assert malformed(asked) is None
    assert endless(asked) == place


def test_a_ring_of_thousands_of_references_is_found_at_once() -> None:
    ring: dict[str, Any] = {f"r{i}": {"$ref": f"#/$defs/r{(i + 1) % 2_900}"} for i in range(2_900)}
    members = {f"p{i}": {"$ref": f"#/$defs/r{i}"} for i in range(2_900)}
    chain = {**ring, "r2899": {"type": "object", "properties": members, "required": list(members)}}
    begun = time.process_time()
    assert endless({"$ref": "#/$defs/r0", "$defs": ring})
    assert endless({"$ref": "#/$defs/r0", "$defs": chain})
    assert not endless({"$ref": "#/$defs/r0", "$defs": {**ring, "r2899": {}}})
    assert time.process_time() - begun < 20.0


@pytest.mark.parametrize(
    "asked",
    [
        {"const": -(2**63)},
        {"type": "integer", "const": -9.3e18},
        {"enum": [1, {"a": [-(2**63) + 1]}]},
        {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 5},
        {"properties": {"a": {"const": -(10**300)}}},
    ],
)
def test_a_number_that_ends_the_process_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="numbers below -9,000,000,000,000,000,000 are not allowed"):
        constraint(BYTES, response_format=ResponseFormat("json_schema", asked))
    loose = Tool("f", "", {"type": "object", "properties": {"a": asked}})
    assert constraint(BYTES, tools=(loose,), tool_choice=ToolChoice("required")) is not None
    assert constraint(BYTES, response_format=ResponseFormat("json_schema", {"enum": [LEAST, 2**64]})) is not None


@pytest.mark.parametrize("keyword", ["const", "enum", "pattern", "properties"])
def test_a_text_that_is_too_long_for_a_grammar_is_refused(keyword: str) -> None:
    def with_text(length: int) -> dict[str, Any]:
        text = "x" * length
        return {keyword: {"const": {"a": [text]}, "enum": [text], "pattern": text, "properties": {text: {}}}[keyword]}

    assert malformed(with_text(LITERAL.most)) is None
    assert f"'{keyword}' at $.{keyword}: at most 20,000 characters" in str(malformed(with_text(LITERAL.most + 1)))


def test_hundreds_of_optional_properties_can_be_followed() -> None:
    asked = {"type": "object", "properties": {f"m{i}": {"type": "string"} for i in range(1_000)}}
    made = constraint(BYTES, response_format=ResponseFormat("json_schema", asked))
    assert made is not None
    matcher = LLMatcher(BYTES.tokenizer, made.grammar, log_level=0, limits=LIMITS)
    text = json.dumps({"m5": "a", "m999": "b"})
    assert matcher.try_consume_tokens(BYTES.backend.encode(text).ids) == len(text), matcher.get_error()
