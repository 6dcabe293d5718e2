"""Answers as models of newer families were seen to write them (tests and captures of vLLM, SGLang and others)."""

from __future__ import annotations

import pytest

from tests.parsing.helpers import calls, run, style

SEEN = [
    (
        ("deepseek_v4", "think_tag"),
        '<think>so</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="read">\n<｜DSML｜ parameter name="path" '
        'string="true">杭州</｜DSML｜ parameter>\n<｜DSML｜ parameter name="limit" '
        'string="false">42</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n"
        "</｜DSML｜ calls>",
        {"path": "杭州", "limit": 42},
    ),
    (
        ("hy_v4", "hy_v4"),
        "<think:6124c78e>so</think:6124c78e>\n<tool_calls:6124c78e>\n<tool_call:6124c78e>read\n<arg_key:6124c78e>path"
        "</arg_key:6124c78e>\n<arg_value:6124c78e>a.py</arg_value:6124c78e>\n</tool_call:6124c78e>\n</tool_calls:6124c78e>",
        {"path": "a.py"},
    ),
    (
        ("k2_horizon", "ifm"),
        "<ifm|think>so</ifm|think_faster>\n<ifm|tool_calls>\n<ifm|tool_call>read\n<ifm|arg_key>path</ifm|arg_key>\n"
        "<ifm|arg_value>a.py</ifm|arg_value>\n</ifm|tool_call>\n</ifm|tool_calls>",
        {"path": "a.py"},
    ),
    (
        ("k2_horizon", "ifm"),
        '<ifm|think>so</ifm|think><ifm|tool_calls><ifm|tool_call>{"name": "read", "arguments": {"path": "a.py"}}'
        "</ifm|tool_call></ifm|tool_calls>",
        {"path": "a.py"},
    ),
    (
        ("inkling", "inkling"),
        "<|content_thinking|>so<|end_message|><|message_model|>read<|content_invoke_tool_json|>"
        '{"name":"read","args":{"path":"a.py"}}<|end_message|>',
        {"path": "a.py"},
    ),
    (
        ("minimax_m3", "think_tag"),
        '<think>so</think>]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="read">]<]minimax[>[<path>a.py]<]'
        "minimax[>[</path>]<]minimax[>[<options>]<]minimax[>[<deep>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[</deep>"
        "]<]minimax[>[</options>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        {"path": "a.py", "options": {"deep": [1]}},
    ),
]


@pytest.mark.parametrize(("ids", "text", "arguments"), SEEN)
def test_a_call_is_read(ids: tuple[str, str], text: str, arguments: dict[str, object]) -> None:
    answer = run(text, 3, form=style(*ids))[1]
    assert calls(answer) == [("read", arguments)]
    assert (answer.content, answer.reasoning) == ("", "so")


def test_what_is_nested_without_end_ends() -> None:
    mark = "]<]minimax[>["
    text = f'{mark}<tool_call>{mark}<invoke name="read">' + f"{mark}<options>" * 5000
    assert run(text, form=style("minimax_m3"))[1] is not None
