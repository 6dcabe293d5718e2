"""What a model's vocabulary and template say about how it writes."""

from __future__ import annotations

import pytest

from start_llm.core.reasoning_tags import REASONING_STYLES
from start_llm.models.capabilities import reasoning_parser, tool_parser
from start_llm.parsing.registry import output_style


@pytest.mark.parametrize("style", [style for style in REASONING_STYLES.values() if style.start])
def test_tags_are_found_wherever_they_are_known(style) -> None:
    vocab, tags = ["a", style.start, style.end], (style.start, style.end)
    template = f"{{{{ '{style.start}\\n\\n{style.end}' }}}}"
    assert reasoning_parser(vocab, None) == style.id
    assert reasoning_parser(["a"], tags) == style.id
    assert reasoning_parser(["a"], None, template) == style.id
    assert output_style(reasoning_parser=style.id).reasoning.end == style.end


def test_what_the_tokenizer_says_comes_before_the_vocabulary_and_that_before_the_template() -> None:
    assert reasoning_parser(["<think>", "</think>"], ("<mull>", "</mull>"), "[THINK][/THINK]") == "tags"
    assert reasoning_parser(["<think>", "</think>"], None, "[THINK][/THINK]") == "think_tag"
    assert reasoning_parser(["<|channel|>", "<|message|>"], ("<think>", "</think>")) == "harmony"
    assert reasoning_parser(["a"], None, "no tags") == "think_tag"
    form = output_style(reasoning_parser="tags", reasoning_tags=("<mull>", "</mull>"))
    assert (form.reasoning.start, form.reasoning.end) == ("<mull>", "</mull>")


def test_the_tool_format_is_that_of_the_template_or_of_the_vocabulary() -> None:
    llama = ["a", "<|python_tag|>"]
    assert tool_parser(None, llama, "think_tag", "generic") == "llama"
    assert tool_parser(None, ["<|python_start|>", "<|python_end|>"], "think_tag", "generic") == "llama"
    assert tool_parser("json_tools", llama, "think_tag", "generic") == "json_tools", "a Hermes model on Llama's tokens"
    assert tool_parser(None, ["<|channel|>"], "harmony", "generic") == "harmony"
    assert tool_parser(None, ["a"], "think_tag", "glm4") == "glm47"
    assert tool_parser(None, ["a"], "think_tag", "generic") == "hermes_json"
    for ident in ("llama", "harmony"):
        assert output_style(tool_parser=ident).tools.id == ident
