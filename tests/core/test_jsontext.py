"""Counting the structure of JSON text agrees with reading it, wherever the text is cut into pieces."""

from __future__ import annotations

import json
import re
import threading
import time
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from start_llm.core import jsontext
from start_llm.core.errors import BadRequest, TooLarge
from start_llm.core.jsontext import check_structure, parse_inner, parse_json, too_much_to_read
from start_llm.core.limits import DEPTH, Limit
from tests.kinds import rounds
from tests.together import together

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text('ab"\\[{]},:é\n')
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('ab"\\[{'), inner),
    max_leaves=30,
)


def depth(value: Any) -> int:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(map(depth, inner), default=0)
    return 0


def values(value: Any) -> int:
    """Values as they are counted: one, one for each comma, one for each list or object."""
    if isinstance(value, dict | list):
        inner = list(value.values()) if isinstance(value, dict) else value
        return max(len(inner) - 1, 0) + 1 + sum(values(item) - 1 for item in inner) + 1
    return 1


def keys(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(keys, value.values()))
    return sum(map(keys, value)) if isinstance(value, list) else 0


@settings(deadline=None, max_examples=rounds(80))
@given(value=VALUES, chunk=st.integers(1, 40), ascii_only=st.booleans())
def test_counts_are_those_of_the_value(value: Any, chunk: int, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    wanted = {"DEPTH": depth(value), "VALUES": values(value), "KEYS": keys(value), "ESCAPES": raw.count(b"\\")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsontext, "CHUNK", chunk)
        for name, count in wanted.items():
            patch.setattr(jsontext, name, Limit("x", count))
        check_structure(raw)
        assert parse_json(raw) == value
        for name, count in wanted.items():
            if count > (name == "VALUES"):
                patch.setattr(jsontext, name, Limit("x", count - 1))
                with pytest.raises((BadRequest, TooLarge)):
                    check_structure(raw)
                patch.setattr(jsontext, name, Limit("x", count))


def test_json_in_a_string_has_the_same_bounds() -> None:
    assert parse_inner('{"a": [1.5]}') == {"a": [1.5]}
    for text in ("[" * (DEPTH.most + 1) + "]" * (DEPTH.most + 1), "[" * 100_000, "NaN", "1e999", "9" * 5000, "{"):
        with pytest.raises(ValueError):
            parse_inner(text)


@pytest.mark.parametrize(
    ("text", "much"),
    [
        ("[" * 101 + "]" * 101, True),
        ("[1]" * 101, False),
        ("[" + "1," * jsontext.INNER_VALUES + "1]", True),
        ("[" + "1," * (jsontext.INNER_VALUES - 10) + "1]", False),
        ("{}" * 200_000, True),
        ('{"code": "' + "f(a, b)[0], {}; " * 100_000 + '"}', False),
        ('["' + "x" * 1_000_000 + '"]', False),
    ],
)
def test_what_is_too_much_to_read_of_text_in_a_body(text: str, much: bool) -> None:
    assert too_much_to_read(text) is much
    if much:
        with pytest.raises(ValueError, match="too deeply, or holds too many"):
            parse_inner(text)


def test_a_number_has_at_most_640_digits() -> None:
    """60 MB of numbers with 4,000 digits each kept the interpreter's lock for more than 4 s."""
    assert parse_json(b"9" * 640) == 10**640 - 1
    with pytest.raises(BadRequest, match="a number has too many digits"):
        parse_json(b"9" * 641)
    for read in (parse_inner, json.loads):  # a call's arguments
        with pytest.raises(ValueError, match="digits"):
            read("9" * 641)


def test_json_in_a_string_has_no_halves_of_characters_either() -> None:
    """No database takes them: of a session's name they took the audit's rows of other requests along."""
    assert parse_inner('{"session_id": "a\\ud83d", "\\uDE00": "\\ud83d\\ude00"}') == {
        "session_id": "a\ufffd",
        "\ufffd": "😀",
    }


@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00"])
def test_many_halves_of_characters_are_replaced_in_pieces(monkeypatch: pytest.MonkeyPatch, half: str) -> None:
    """24 MB of them kept the interpreter's lock for more than 3 s."""
    monkeypatch.setattr(jsontext, "CHUNK", 10)
    sub = Mock(side_effect=re.compile("[\ud800-\udfff]").sub)
    monkeypatch.setattr(jsontext, "_HALF", Mock(sub=sub))
    body = f'{{"{half}a": ["{half * 25}", "\\ud83d\\ude00{half}", "", "{"b" * 9}\\ud83d\\ude00", 1]}}'
    halves = "\ufffd" * 25
    assert parse_json(body.encode()) == {"\ufffda": [halves, "\U0001f600\ufffd", "", "b" * 9 + "\U0001f600", 1]}
    assert max(len(call.args[1]) for call in sub.call_args_list) == 10


def test_large_bodies_are_decoded_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds the interpreter's lock from its first byte to its last: in turn, they leave room for others."""
    raw = b'["' + b"x" * jsontext.LARGE + b'"]'
    at_once: list[int] = []
    running = threading.Semaphore(0)

    class Slow:
        def decode(self, text: str) -> object:
            running.release()
            at_once.append(running._value)
            time.sleep(0.01)
            assert running.acquire(blocking=False)
            return json.loads(text)

    monkeypatch.setattr(jsontext, "_DECODER", Slow())
    together([partial(parse_json, raw)] * 8)
    assert at_once == [1] * 8
