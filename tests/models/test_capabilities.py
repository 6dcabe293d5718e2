"""What a model's vocabulary and template say about how it writes."""

from __future__ import annotations

import pytest

from start_llm.core.reasoning_tags import REASONING_STYLES
from start_llm.models.capabilities import reasoning_parser
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
