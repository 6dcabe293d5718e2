from __future__ import annotations

import pytest

from start_llm.api.common.parts import part_text, text_of
from start_llm.core.errors import BadRequest, NotSupported


def test_texts_of_every_dialect_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}]
    assert text_of(parts, "content") == "a\nb\nc"
    assert text_of("a", "content") == "a" and text_of(None, "content") == ""


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("input_audio", NotSupported, "'input_audio'"),
        ("smell", BadRequest, "allowed: image, image_url, input_image, input_text, output_text, text."),
    ],
)
def test_a_part_that_cannot_be_shown_is_named_never_dropped(kind: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as refused:
        part_text({"type": kind}, "messages[2].content[0]")
    assert str(refused.value).startswith("messages[2].content[0]") and said.replace("'", '"') in str(refused.value)


def test_where_only_text_can_stand_an_image_is_refused() -> None:
    with pytest.raises(NotSupported, match=r"^content\[0\].image_url: an image cannot stand here"):
        text_of([{"type": "image_url", "image_url": "data:;base64,AA"}], "content")
