"""What a template may open, the parser of answers can close: both read one table."""

from __future__ import annotations

import pytest

from start_llm.core.reasoning_tags import REASONING_STYLES, REASONING_TAGS, reasoning_style
from start_llm.prompt.tree import Rendering


@pytest.mark.parametrize(("start", "end"), REASONING_TAGS)
def test_a_prompt_that_ends_in_an_open_block_is_seen(start: str, end: str) -> None:
    user = f"user: what does {start} mean?\n"
    for tail, inside in ((f"model: {start}\n", True), (f"model: {start}\n\n{end}\n\n", False), ("model: ", False)):
        assert Rendering(user + tail, len(user), 0).in_reasoning == inside
    assert REASONING_STYLES[reasoning_style(start, end).id].end == end


def test_the_table_holds_every_pair_once() -> None:
    assert len({start for start, _ in REASONING_TAGS}) == len(REASONING_TAGS)
    assert {"<think>", "<thinking>", "<reasoning>", "<|channel>thought", "<|open|>think<|sep|>"} <= {
        start for start, _ in REASONING_TAGS
    }
