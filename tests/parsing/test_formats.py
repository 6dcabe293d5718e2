"""Every format: what a template writes is read back exactly, in any chunking, and as mlx-lm's own parser reads it."""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from start_llm.core.events import ToolCallDelta, ToolCallStarted
from start_llm.parsing.registry import TOOL_FORMATS, OutputStyle, output_style
from start_llm.parsing.stream import OutputParser
from tests.kinds import rounds, some
from tests.parsing.formats import RENDER, deepseek_fenced, mistral_list
from tests.parsing.helpers import NOW, TOOLS, calls, run

WORDS = st.lists(
    st.sampled_from(
        [
            *(
                "a",
                "src/x.py",
                " ",
                "\n",
                "\n\n",
                "  ",
                '"',
                "'",
                '\\"',
                "\\",
                "\\n",
                "{",
                "}",
                "[",
                "]",
                ",",
                ":",
                "=",
            ),
            *("<", ">", "</", "</div>", "é", "日本", "🙂", "5", "true", "null", "`", "```\n", "(", ")", "# x", "$y"),
            *('"}', '"}}', '",', '": "', "<think>", "STOP", "&amp;", "\t"),
        ]
    ),
    max_size=8,
).map("".join)
# Tags and bare words cannot carry what JSON can; these are the limits of the formats themselves.
PLAIN = WORDS.filter(lambda text: not text.startswith("\n") and not text.endswith("\n"))
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "path": PLAIN,
    "limit": st.integers(-999, 999),
    "follow": st.booleans(),
    "ratio": st.sampled_from([0.5, 1.25, -2.75]),
    "tags": st.lists(st.sampled_from(["a", "b c", "d,e"]), max_size=3),
    "options": st.dictionaries(st.sampled_from(["k", "key"]), st.sampled_from([1, True, "v", "w x"]), max_size=2),
}
ARGUMENTS = st.fixed_dictionaries({}, optional=VALUES)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), ARGUMENTS),
        st.tuples(st.just("bash"), st.fixed_dictionaries({"command": PLAIN})),
        st.tuples(st.just("now"), st.just({})),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda call: json.dumps(call, sort_keys=True),
)
ROUND_TRIP = sorted(RENDER)


def style_of(ident: str) -> OutputStyle:
    reasoning = ident if ident in ("harmony", "kimi_k3", "inkling") else "think_tag"
    return output_style(tool_parser=ident, reasoning_parser=reasoning)


def test_every_format_is_tried() -> None:
    assert {*RENDER, "null"} == set(TOOL_FORMATS)


@pytest.mark.parametrize("ident", ROUND_TRIP)
@settings(max_examples=rounds(10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=CALLS, data=st.data())
def test_round_trip(ident: str, made: list[tuple[str, dict[str, Any]]], data: st.DataObject) -> None:
    form = style_of(ident)
    text = RENDER[ident](made)
    if ident == "harmony":
        text = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>Look:" + text
    elif ident == "inkling":
        text = f"<|content_thinking|>why<|end_message|><|message_model|><|content_text|>Look:<|end_message|>{text}"
    else:
        text = f"<think>why</think>Look:\n\n{text}" if ident != "kimi_k3" else f"Look:\n{text}"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = run(text, form=form)
    assert calls(whole[1]) == [(name, dict(args)) for name, args in made]
    assert whole[1].content == "Look:"
    for chunking in (cuts, 1):
        assert run(text, chunking, form=form)[1:] == whole[1:]


@pytest.mark.parametrize("ident", some(ROUND_TRIP, 9))
@settings(max_examples=rounds(10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=CALLS, data=st.data())
def test_damaged_text_is_the_same_in_any_chunking(
    ident: str, made: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    text = RENDER[ident](made)
    cut, hole = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))
    damaged = text[: min(cut, hole)] + text[max(cut, hole) :] if data.draw(st.booleans()) else text[:cut]
    damaged += data.draw(st.sampled_from(["", "\nBye", "<|im_end|>", text]))
    assume(damaged)
    cuts = data.draw(st.lists(st.integers(0, len(damaged)), max_size=8))
    whole = run(damaged, form=style_of(ident))
    for chunking in (cuts, 1):
        assert run(damaged, chunking, form=style_of(ident))[1:] == whole[1:]


@pytest.mark.parametrize("ident", ROUND_TRIP)
def test_arguments_come_while_they_are_written(ident: str) -> None:
    text = RENDER[ident]([("bash", {"command": "echo one two three"})])
    parser = OutputParser(style_of(ident), tools=TOOLS)
    seen: list[str] = []
    for char in text[: text.index("three")]:
        seen += [type(event).__name__ for event in parser.feed(char)]
    assert seen[0] == ToolCallStarted.__name__
    assert seen.count(ToolCallDelta.__name__) > len("echo one ") / 2


def mlx_formats() -> list[str]:
    package = pytest.importorskip("mlx_lm.tool_parsers")
    return [module.name for module in pkgutil.iter_modules(package.__path__)]


def test_all_of_mlx_lms_formats_are_known() -> None:
    assert set(mlx_formats()) <= set(TOOL_FORMATS)


SIMPLE = [("read", {"path": "a b.py", "limit": 3, "follow": True, "tags": ["x", "y"]}), ("bash", {"command": "ls"})]


NOT_MLX_LMS = {
    *("deepseek_v4", "hy_v4", "inkling", "k2_horizon", "minimax_m3"),
    "harmony",
    "hermes_json",
    "glm4_native",
    "glm4_xml",
    "llama_xml",
    "llama",
    "deepseek",
}


@pytest.mark.parametrize("ident", sorted(set(ROUND_TRIP) - NOT_MLX_LMS))
def test_mlx_lm_reads_the_same(ident: str) -> None:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{ident}")
    made = SIMPLE if ident != "function_gemma" else [("bash", {"command": "ls"})]
    ours, theirs = [], []
    for call in made:
        text = RENDER[ident]([call])
        ours += calls(run(text, form=style_of(ident))[1])
        inner = text.strip().removeprefix(module.tool_call_start)
        inner = inner.removesuffix(module.tool_call_end) if module.tool_call_end else inner
        found = module.parse_tool_call(inner, [tool.as_function() for tool in TOOLS])
        found = found if isinstance(found, list) else [found]
        theirs += [(item["name"], item["arguments"]) for item in found]
    assert ours == theirs == made


@pytest.mark.parametrize("ident", ROUND_TRIP)
def test_unknown_tools_in_sound_markup_are_calls(ident: str) -> None:
    text = RENDER[ident]([("bash", {"command": "ls"})])
    form = style_of(ident)
    for cuts in ((), 1):
        ((name, arguments),) = calls(run(text, cuts, form=form, tools=(NOW,))[1])
        assert (name.removesuffix(".call"), arguments) == ("bash", {"command": "ls"})
        assert run(text, cuts, form=form, tools=())[1].tool_calls == ()


@pytest.mark.parametrize("ident", ROUND_TRIP)
def test_unknown_tools_in_broken_markup_are_text(ident: str) -> None:
    text = "So: " + RENDER[ident]([("bash", {"command": "ls"})])
    cut = text[: text.index("ls") + 1]
    for cuts in ((), 1):
        parsed = run(cut, cuts, form=style_of(ident), tools=(NOW,))[1]
        assert parsed.tool_calls == ()
        if ident != "harmony":  # whose header is no text, nor is this
            assert parsed.content == cut.replace("<|message_model|>", "")


def test_mistral_list() -> None:
    assert calls(run(mistral_list(SIMPLE), 2, form=style_of("mistral"))[1]) == SIMPLE


def test_deepseek_with_the_kind_of_tool_and_a_fence() -> None:
    assert calls(run(deepseek_fenced(SIMPLE), 2, form=style_of("deepseek"))[1]) == SIMPLE


def test_unknown_ids_are_named() -> None:
    with pytest.raises(ValueError, match="'nope'"):
        output_style(tool_parser="nope", reasoning_parser="null")
    with pytest.raises(ValueError, match="'nope'"):
        output_style(tool_parser="null", reasoning_parser="nope")


def test_tags_that_a_tokenizer_brought() -> None:
    form = output_style(tool_parser="null", reasoning_parser="auto", reasoning_tags=("<mull>", "</mull>"))
    assert run("<mull>\na\n</mull>\nb", 1, form=form)[1].reasoning == "a"
