"""Every format with arguments that hold its own and others' markup, and with damaged answers.

A few random cases by default; with ``--slow`` 300 for each format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kinds import rounds, some
from tests.parsing.formats import RENDER
from tests.parsing.helpers import calls, run, style_of

# What a format cannot carry in a value: where its own markup stands there, nobody can tell what is meant.
OWN: dict[str, tuple[str, ...]] = {
    "qwen3_coder": ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=path>", "</parameter>"),
    "longcat": ("<longcat_tool_call>", "</longcat_arg_value>"),
    "kimi_k3": ("<|open|>", "<|close|>call<|sep|>"),
    "minimax_m2": ("<invoke", "</invoke>", "<minimax:tool_call>", "</minimax:tool_call>", "</parameter>"),
    "muse_spark": ("<atem:invoke", "</atem:parameter>"),
    "minicpm5": ("]]>", "<![CDATA["),
    "gemma4": ('<|"|>', "<|tool_call>", "<tool_call|>"),
    "function_gemma": ("<escape>", "<start_function_call>", "<end_function_call>"),
}
for glm in ("glm47", "glm4_native", "laguna"):
    OWN[glm] = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MARKUP = (
    *{tag for tags in OWN.values() for tag in tags},
    "[TOOL_CALLS]", "[ARGS]", "<|tool_call_start|>", "<|tool_call_end|>", "<|python_tag|>", "<think>", "</think>",
    "<|im_end|>", "<|im_start|>user\n", "<|eot_id|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|start|>",
    "<tool_response>", "<|tool_call_begin|>", "<|tool_calls_section_end|>", "<name>", "</arguments>", "</div>",
)  # fmt: skip
PLAIN = (
    "a", "src/x.py", " ", "\n", "  ", '"', "'", "\\", "\\n", "{", "}", "[", "]", ",", ":", "=", "<", ">", "</", "é",
    "日本", "🙂", "5", "true", "null", "`", "```\n", "(", ")", "# x", '"}', '"}}', '",', '": "', "STOP", "&amp;", "\t",
    "```json\n", "if a < b:\n", "\\u00e9", '\\"', "''", "$y", "\n\n",
)  # fmt: skip


def texts(pieces: tuple[str, ...]) -> st.SearchStrategy[str]:
    # Line breaks and white space around a value belong to the tags of some formats.
    return st.lists(st.sampled_from(pieces), max_size=8).map("".join).filter(lambda text: text == text.strip())


def some_calls(pieces: tuple[str, ...]) -> st.SearchStrategy[list[tuple[str, dict[str, Any]]]]:
    text = texts(pieces).filter(lambda value: value.lower() not in ("null", "none"))
    more = {
        "limit": st.integers(-9, 99),
        "follow": st.booleans(),
        "ratio": st.sampled_from([0.5, 1.25, -2.75]),
        "tags": st.lists(st.sampled_from(["a", "b c", "d,e", "x]", "'q'"]), max_size=3),
        "options": st.dictionaries(st.sampled_from(["k", "key"]), st.sampled_from([1, True, "v", "w x"]), max_size=1),
    }
    one = st.one_of(
        st.tuples(st.just("bash"), st.fixed_dictionaries({"command": text})),
        st.tuples(st.just("write"), st.fixed_dictionaries({"path": texts(PLAIN), "content": text})),
        st.tuples(st.just("read"), st.fixed_dictionaries({"path": texts(PLAIN)}, optional=more)),
        st.tuples(st.just("now"), st.just({})),
    )
    return st.lists(one, min_size=1, max_size=3, unique_by=lambda call: json.dumps(call, sort_keys=True))


SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]
COUNTS = pytest.mark.parametrize("count", [rounds(5, 3), pytest.param(300, marks=SLOW)])
FORMATS = pytest.mark.parametrize("ident", some(sorted(RENDER), 9))


def examples(count: int, check: Callable[[st.DataObject], None]) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.large_base_example]
    settings(max_examples=count, deadline=None, suppress_health_check=checks)(given(st.data())(check))()


@COUNTS
@pytest.mark.parametrize("ident", sorted(RENDER))
def test_arguments_may_hold_any_markup_but_the_formats_own(ident: str, count: int) -> None:
    form = style_of(ident)
    made_of = some_calls((*PLAIN, *(tag for tag in MARKUP if tag not in OWN.get(ident, ()))))

    def check(data: st.DataObject) -> None:
        made = data.draw(made_of)
        said = data.draw(st.sampled_from(["", "Look:\n\n", "`x` and\n", "Ok.\n```\ncode\n```\n"]))
        text = said + RENDER[ident](made)
        if ident == "harmony":
            head = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
            text = head + (f"<|channel|>final<|message|>{text}" if said else text)
        elif ident == "inkling" and said:
            text = f"<|message_model|><|content_text|>{said}<|end_message|>" + RENDER[ident](made)
        elif ident != "kimi_k3":
            text = "<think>why</think>" + text
        text += data.draw(st.sampled_from(["", "\n", "<|im_end|>", "\nDone.", "\n<tool_response>\nhm"]))
        at_once = run(text, form=form)
        assert calls(at_once[1]) == [(name, dict(args)) for name, args in made]
        assert at_once[1].content.strip() == said.strip()
        assert run(text, 1, form=form)[1:] == at_once[1:]
        assert run(text, data.draw(st.integers(2, 9)), form=form, whole=True)[1:] == at_once[1:]

    examples(count, check)


@COUNTS
@FORMATS
def test_damaged_text_is_the_same_in_any_chunking(ident: str, count: int) -> None:
    def check(data: st.DataObject) -> None:
        text = RENDER[ident](data.draw(some_calls(PLAIN)))
        cut, hole = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))
        damaged = text[: min(cut, hole)] + text[max(cut, hole) :] if data.draw(st.booleans()) else text[:cut]
        damaged += data.draw(st.sampled_from(["", "\nBye", "<|im_end|>", text]))
        cuts = data.draw(st.lists(st.integers(0, len(damaged)), max_size=8))
        whole = run(damaged, form=style_of(ident))
        for chunking in (cuts, 1):
            assert run(damaged, chunking, form=style_of(ident))[1:] == whole[1:]

    examples(count, check)


@pytest.mark.parametrize(
    ("ident", "tag"), [("minimax_m2", "<parameter=path>"), ("qwen3_coder", '<parameter name="path">')]
)
def test_a_value_about_another_formats_tag_is_not_cut_there(ident: str, tag: str) -> None:
    wanted = [("write", {"content": f"{tag}\na", "path": "b"})]
    assert calls(run("<think>why</think>" + RENDER[ident](wanted), form=style_of(ident))[1]) == wanted
