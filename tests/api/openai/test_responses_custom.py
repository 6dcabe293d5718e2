"""The text of a custom tool's call, while its JSON arrives."""

from __future__ import annotations

import pytest

from start_llm.api.openai.responses_tools import InputText


def input_of(arguments: str) -> str:
    reader = InputText()
    return reader.feed(arguments) + reader.finish(arguments)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    reader = InputText()
    pieces = ['{"inp', 'ut" : "ab', "c\\", "n\\u00", 'e9"', ', "more": "x"}']
    assert [reader.feed(piece) for piece in pieces] == ["", "ab", "c", "\n", "é", ""]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"more": 1, "input": "x"}', "x"),
        ('{"input": "first", "input": "second"}', "first"),
        ('"bare"', "bare"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ("", ""),
        ("not JSON", "not JSON"),
        ('{"input": "cut of', "cut of"),
        ('{"input": "line\nbreak"}', "line\nbreak"),
        ('{"input": "half \\ud83d pair"}', "half \ud83d pair"),
        ('{"input": "other half \\ude00"}', "other half \ude00"),
    ],
)
def test_other_shapes(arguments: str, text: str) -> None:
    assert input_of(arguments) == text
    reader = InputText()
    pieces = "".join(reader.feed(char) for char in arguments)
    assert pieces + reader.finish(arguments) == reader.text == text
