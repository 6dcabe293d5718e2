"""Every format: what a template writes is read while it comes, and as mlx-lm's own parser reads it (see test_nasty)."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

import pytest

from start_llm.core.events import ToolCallStarted
from start_llm.parsing.registry import TOOL_FORMATS, output_style
from start_llm.parsing.stream import OutputParser
from tests.parsing.corpus import CASES, Case
from tests.parsing.formats import RENDER, Calls, deepseek_fenced, mistral_list
from tests.parsing.helpers import NOW, TOOLS, calls, run, style_of

ROUND_TRIP = sorted(RENDER)


def test_every_format_is_tried() -> None:
    assert {*RENDER, "null"} == set(TOOL_FORMATS)


@pytest.mark.parametrize("ident", ROUND_TRIP)
def test_arguments_come_while_they_are_written(ident: str) -> None:
    text = RENDER[ident]([("bash", {"command": "echo one two three"})])
    parser = OutputParser(style_of(ident), tools=TOOLS)
    started, *deltas = (event for char in text[: text.index("three")] for event in parser.feed(char))
    assert isinstance(started, ToolCallStarted) and started.name == "bash"
    assert len(deltas) > len("echo one ") / 2
    written = "".join(delta.arguments for delta in deltas).replace('":"', '": "')
    assert written.startswith('{"command": "echo one t') and '{"command": "echo one two '.startswith(written)


def mlx_formats() -> list[str]:
    package = pytest.importorskip("mlx_lm.tool_parsers")
    return [module.name for module in pkgutil.iter_modules(package.__path__)]


def test_all_of_mlx_lms_formats_are_known() -> None:
    assert set(mlx_formats()) <= set(TOOL_FORMATS)


NOT_MLX_LMS = {"deepseek_v4", "hy_v4", "inkling", "k2_horizon", "minimax_m3", "harmony", "hermes_json", "glm4_native"}
NOT_MLX_LMS |= {"glm4_xml", "llama_xml", "llama", "deepseek"}
SIMPLE = [("read", {"path": "a b.py", "limit": 3, "follow": True, "tags": ["x", "y"]}), ("bash", {"command": "ls"})]


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


@pytest.mark.parametrize(("ident", "render"), [("mistral", mistral_list), ("deepseek", deepseek_fenced)])
def test_a_second_form_of_the_same_format(ident: str, render: Callable[[Calls], str]) -> None:
    assert calls(run(render(SIMPLE), 2, form=style_of(ident))[1]) == SIMPLE


def test_unknown_ids_are_named() -> None:
    with pytest.raises(ValueError, match="'nope'"):
        output_style(tool_parser="nope", reasoning_parser="null")
    with pytest.raises(ValueError, match="'nope'"):
        output_style(tool_parser="null", reasoning_parser="nope")


def test_tags_that_a_tokenizer_brought() -> None:
    form = output_style(tool_parser="null", reasoning_parser="auto", reasoning_tags=("<mull>", "</mull>"))
    assert run("<mull>\na\n</mull>\nb", 1, form=form)[1].reasoning == "a"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_malformed(case: Case) -> None:
    for size in (10**6, 1, 3, 7):
        tools = TOOLS if case.tools else ()
        parsed = run(case.text, size, form=style_of(case.form), tools=tools, in_reasoning=case.inside)[1]
        assert calls(parsed) == list(case.calls), size
        assert (parsed.content, parsed.reasoning) == (case.content, case.reasoning), size
