from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.server import process_message_content

from start_llm.api.common.parts import content_of, only_text, part_content
from start_llm.api.openai.responses_items import conversation_of
from start_llm.core.errors import BadRequest, NotSupported
from tests.api.fakes import read


def test_texts_of_every_dialect_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}]
    assert content_of(parts, "content").text == "abc"
    assert content_of("a", "content").text == "a" and content_of(None, "content").text == ""


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("texts", [["one"], ["Read", " this: ", "x\n", "\ny"], ["", "a", ""]])
def test_parts_are_joined_as_mlx_lm_joins_them(role: str, texts: list[str]) -> None:
    """A message that is sent as a string once and as one part another time stays the same one, too."""
    content = [{"type": "text", "text": text} for text in texts]
    theirs: list[dict[str, Any]] = [{"role": role, "content": [dict(part) for part in content]}]
    process_message_content(theirs)
    sent = [{"role": role, "content": content}, {"role": "user", "content": theirs[0]["content"]}]
    ours, as_string = read("chat", messages=sent).messages
    items = [{"type": "message", "role": role, "content": content}]
    assert ours.content == as_string.content == conversation_of(items)[0][0].content == theirs[0]["content"]


def test_the_outputs_of_a_tool_stand_on_lines_of_their_own() -> None:
    content = [{"type": "text", "text": "a.py"}, {"type": "text", "text": "b.py"}]
    (chat,) = read("chat", messages=[{"role": "tool", "tool_call_id": "c", "content": content}]).messages
    (item,) = conversation_of([{"type": "function_call_output", "call_id": "c", "output": content}])[0]
    assert chat.content == item.content == "a.py\nb.py"


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("input_audio", NotSupported, "'input_audio'"),
        ("smell", BadRequest, "allowed: image, image_url, input_image, input_text, output_text, text."),
    ],
)
def test_a_part_that_cannot_be_shown_is_named_never_dropped(kind: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as refused:
        part_content({"type": kind}, "messages[2].content[0]")
    assert str(refused.value).startswith("messages[2].content[0]") and said.replace("'", '"') in str(refused.value)


def test_where_only_text_can_stand_an_image_is_refused() -> None:
    with pytest.raises(NotSupported, match=r"^content\[0\].image_url: an image cannot stand here"):
        only_text(content_of([{"type": "image_url", "image_url": "data:;base64,AA"}], "content"))
