from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from start_llm.parsing.jsonstream import MOST_DEPTH, Dialect, JsonStream, mended
from start_llm.parsing.schema import Schema
from start_llm.parsing.source import LiteralScanner, Source
from tests.kinds import rounds

TEXT = st.lists(st.sampled_from([*"ab\"\\\n\t{}[],:'<>/`é🙂u ", "</tool_call>", '"}', '", "']), max_size=8).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
DIALECT = Dialect(enders=("</tool_call>",), restart=("<tool_call>",))


def stream(text: str, cuts: list[int], schema: dict[str, Any] | None = None, dialect: Dialect = DIALECT) -> str:
    source, out = Source(), list[str]()
    reader = JsonStream(source, out.append, dialect).value(Schema(schema or {}))
    places = sorted({0, len(text), *cuts})
    for start, end in pairwise(places):
        source.push(text[start:end])
        next(reader, None)
    source.closed = True
    next(reader, None)
    return "".join(out)


@settings(max_examples=rounds(100), deadline=None)
@given(VALUES, st.data(), st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_valid_json_passes_unchanged(value: Any, data: st.DataObject, ascii_only: bool, indent: Any) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    assert stream(text, cuts) == text
    assert stream(text, list(range(len(text)))) == text


@settings(max_examples=rounds(100), deadline=None)
@given(VALUES, st.data())
def test_what_is_cut_still_parses(value: Any, data: st.DataObject) -> None:
    text = json.dumps({"a": value, "b": [value]})
    cut = text[: data.draw(st.integers(1, len(text)))]
    assert isinstance(json.loads(stream(cut, [])), dict)


@settings(max_examples=rounds(150), deadline=None)
@given(st.lists(st.sampled_from([*"{}[](),:\"'\\\n ", "a", "1", "-", ".", "true", "None", '"k": ']), max_size=20))
def test_anything_in_braces_becomes_an_object(pieces: list[str]) -> None:
    text = "{" + "".join(pieces)
    written = stream(text, [])
    assert isinstance(json.loads(written), dict)
    assert stream(text, list(range(len(text)))) == written


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{'a': True, 'b': None,}", {"a": True, "b": None}),
        ('{a: 1, b: "x"}', {"a": 1, "b": "x"}),
        ('{"a": NaN, "b": undefined}', {"a": None, "b": None}),
        ('{"a": Nan, "b": infinity}', {"a": "Nan", "b": "infinity"}),
        ('{"a": [1, 2,], "b": (3, 4)}', {"a": [1, 2], "b": [3, 4]}),
        ('{"a": "\\u00e9\\uZZ", "b": "\\x"}', {"a": "é\\uZZ", "b": "\\x"}),
        ('{"a": 12., "b": 1', {"a": 12.0, "b": 1}),
        ('{"a": {"b": [1, {"c": "d', {"a": {"b": [1, {"c": "d"}]}}),
        ('{"a" "b"}', {}),
        ('{"a": "say "yes", then go", "b": 1}', {"a": 'say "yes", then go', "b": 1}),
        ('{"a": word with blanks, "b": 1}', {"a": "word with blanks", "b": 1}),
    ],
)
def test_mended(text: str, expected: Any) -> None:
    assert json.loads(mended(text, Schema({}))) == expected


def test_nested_values_are_coerced() -> None:
    schema = {
        "properties": {
            "edits": {"type": "array", "items": {"type": "object", "properties": {"line": {"type": "integer"}}}},
            "all": {"$ref": "#/$defs/flag"},
        },
        "$defs": {"flag": {"type": "boolean"}},
    }
    text = '{"edits": [{"line": "3"}, {"line": 4}], "all": "true"}'
    assert json.loads(stream(text, [], schema)) == {"edits": [{"line": 3}, {"line": 4}], "all": True}


@pytest.mark.parametrize("opening", ['{"a":', "[", '[{"a":', "(", "{a: "])
def test_what_is_nested_too_deeply_is_a_string(opening: str) -> None:
    closing = "".join({"{": "}", "[": "]", "(": ")"}.get(char, "") for char in reversed(opening))
    text = '{"x": ' + opening * 2_000 + '"end]"' + closing * 2_000 + ', "y": 1}'
    written = stream(text, [])
    value, depth = json.loads(written), 0
    assert value["y"] == 1
    while isinstance(value, dict | list):
        value, depth = next(iter(value.values())) if isinstance(value, dict) else value[0], depth + 1
    assert depth == MOST_DEPTH
    assert value[0] in opening and '"end]"' in value
    assert stream(text, list(range(0, len(text), 7))) == written
    json.loads(mended(text[: len(text) // 2], Schema({})))


# --- what it reads from ---

LITERALS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def naive(text: str, literals: list[str]) -> list[str]:
    """Character by character: a literal that is complete cuts; of several the longest."""
    found, rest = [], ""
    for char in text:
        rest += char
        hits = [literal for literal in literals if rest.endswith(literal)]
        if hits:
            hit = max(hits, key=len)
            found += [rest[: -len(hit)], f"[{hit}]"]
            rest = ""
    return [*found, rest]


@settings(max_examples=rounds(150), deadline=None)
@given(st.text("abcd", max_size=30), LITERALS, st.data())
def test_against_a_naive_scanner(text: str, literals: list[str], data: st.DataObject) -> None:
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=5))})
    source, scanner, pieces = Source(), LiteralScanner(literals), list[str]()

    def scan():  # type: ignore[no-untyped-def]
        while True:
            before, literal = yield from scanner.step(source)
            if not before and not literal:
                return
            pieces.append(before + (f"[{literal}]" if literal else ""))

    run = scan()
    for start, end in pairwise(cuts):
        source.push(text[start:end])
        next(run, None)
    source.closed = True
    next(run, None)
    assert "".join(pieces) == "".join(naive(text, literals))


def test_literals_that_begin_alike_cost_no_more_than_the_text() -> None:
    """Stop strings that part late, and a model that writes what they share: trying each takes 100 times as long."""
    scanner = LiteralScanner("a" * (120 - number) + str(number) for number in range(64))
    source, passed = Source(), 0

    def scan():  # type: ignore[no-untyped-def]
        nonlocal passed
        while True:
            before, _ = yield from scanner.step(source)
            passed += len(before)

    run = scan()
    began = time.process_time()
    for _ in range(2_000):
        source.push("aaaa")
        next(run)
    assert passed == 2_000 * 4 - 120
    assert time.process_time() - began < 2
