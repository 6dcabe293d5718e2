"""Parts of contents: images of every dialect become attachments in their place, texts are joined as mlx-lm does it."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.server import process_message_content

from start_llm.api.common.parts import PartContent, content_of, join_content, only_text, part_content
from start_llm.api.openai.responses_items import conversation_of
from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.messages import Attachment, Message
from tests.api.fakes import read

DATA = "data:image/png;base64,iVBOR"
CHAT = {"type": "image_url", "image_url": {"url": DATA, "detail": "low"}}
CLAUDE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBOR"}}
SEEN = [(0, "data", "iVBOR")]


def chat(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return read("chat", messages=messages).messages


def claude(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return read("messages", messages=messages).messages


def seen(message: Message) -> list[tuple[int, str, str]]:
    return [(image.at, image.kind, image.source) for image in message.attachments]


def test_chat() -> None:
    parts = [{"type": "text", "text": "one"}, CHAT, {"type": "text", "text": "two"}, {"type": "text", "text": "three"}]
    (message,) = chat({"role": "user", "content": parts})
    assert (message.content, seen(message)) == ("onetwothree", [(3, "data", "iVBOR")])
    assert message.attachments[0].path == "messages[0].content[1].image_url.url"
    for role in ("system", "user", "assistant"):
        (message,) = chat({"role": role, "content": [{"type": "image_url", "image_url": DATA, "filename": "a.png"}]})
        assert seen(message) == SEEN and message.attachments[0].name == "a.png"


def test_tool_results_of_every_dialect() -> None:
    assert seen(chat({"role": "tool", "tool_call_id": "c", "content": [CHAT]})[0]) == SEEN
    block = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "ab"}, CLAUDE]}
    result, beside = claude({"role": "user", "content": [block, CLAUDE, {"type": "text", "text": "Why?"}]})
    assert (result.role, result.content, seen(result)) == ("tool", "ab", [(2, "data", "iVBOR")])
    assert (beside.role, beside.content, seen(beside)) == ("user", "Why?", SEEN)
    assert result.attachments[0].path == "messages[0].content[0].content[1].source.data"
    image = {"type": "input_image", "image_url": DATA}
    for kind in ("function_call_output", "custom_tool_call_output"):
        ((result,), _) = conversation_of([{"type": kind, "call_id": "c", "output": [image]}])
        assert (result.role, seen(result)) == ("tool", SEEN)


def test_responses() -> None:
    image = {"type": "input_image", "image_url": DATA}
    said = {"role": "user", "content": [{"type": "input_text", "text": "a"}, image]}
    ((message,), _) = conversation_of([said])
    assert (message.content, seen(message)) == ("a", [(1, "data", "iVBOR")])
    ((message,), _) = conversation_of([{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}])
    assert seen(message) == [(0, "other", "file-1")]


@pytest.mark.parametrize(
    ("part", "kind", "source"),
    [
        ({"type": "image", "data": "iVBOR", "mimeType": "image/png"}, "data", "iVBOR"),
        ({"type": "image", "source": {"type": "url", "url": "https://x.org/a.png"}}, "url", "https://x.org/a.png"),
        ({"type": "image", "source": {"type": "url", "url": DATA}}, "data", "iVBOR"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "other", "f"),
        ({"type": "image_url", "image_url": "HTTP://x.org/a.png"}, "url", "HTTP://x.org/a.png"),
        ({"type": "image_url", "image_url": "/etc/passwd"}, "other", "/etc/passwd"),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, "other", "file:///etc/passwd"),
        ({"type": "image_url", "image_url": "DATA:image/png;charset=x;BASE64,iVBOR"}, "data", "iVBOR"),
    ],
)
def test_shapes(part: dict[str, Any], kind: str, source: str) -> None:
    for message in (chat({"role": "user", "content": [part]})[0], claude({"role": "user", "content": [part]})[0]):
        assert seen(message) == [(0, kind, source)]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        ({"type": "image_url", "image_url": " "}, "image_url"),
        ({"type": "image_url", "image_url": "data:image/svg+xml,<svg/>"}, "image_url"),
        ({"type": "input_image"}, "image_url"),
        ({"type": "image"}, "source"),
        ({"type": "image", "source": {}}, "source.type"),
        ({"type": "image", "source": {"type": "base64", "data": 7}}, "source.data"),
        ({"type": "image", "source": {"type": "url"}}, "source.url"),
    ],
)
def test_what_is_no_image_is_refused_with_its_place(part: dict[str, Any], param: str) -> None:
    for sent in (chat, claude):
        with pytest.raises(BadRequest) as refused:
            sent({"role": "user", "content": [{"type": "text", "text": "x"}, part]})
        assert refused.value.param == f"messages[0].content[1].{param}"


def test_joined_offsets() -> None:
    image = PartContent(attachments=(Attachment(0, "data", ""),))
    inner = join_content([PartContent("ab"), image])
    whole = join_content([PartContent("x"), PartContent(""), inner, PartContent("c"), image, image, PartContent("d")])
    assert whole.text == "x\n\nab\ncd"
    assert [image.at for image in whole.attachments] == [5, 7, 7]


# --- texts ---


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
