from __future__ import annotations

import pytest

from start_llm.prompt.drafts import tool_result_views

CODE = 'def f(a):\n\treturn "x" + a\n'


@pytest.mark.parametrize("number", ["{:6}\t", "{:>6}→", "{}: ", "{:3}|", "{:3} | "])
def test_line_numbers_are_taken_off(number: str) -> None:
    lines = CODE.splitlines()
    numbered = "\n".join(number.format(i) + line for i, line in enumerate(lines, 9)) + "\n"
    assert tool_result_views(numbered, escaped=False) == [CODE]
    assert tool_result_views(numbered, escaped=True) == ['def f(a):\\n\\treturn \\"x\\" + a\\n']


def test_a_text_that_has_no_other_form_has_no_view() -> None:
    assert tool_result_views(CODE, escaped=False) == []
    assert tool_result_views("done", escaped=True) == []
    assert tool_result_views("", escaped=True) == []


def test_a_few_numbered_lines_among_others_are_left_alone() -> None:
    text = "Steps:\n1: go\nthen\n2: stop\n"
    assert tool_result_views(text, escaped=False) == []
    assert tool_result_views("4|\n", escaped=False) == []


def test_other_scripts_are_written_as_models_write_them() -> None:
    assert tool_result_views("å\nß", escaped=True) == ["å\\nß"]
