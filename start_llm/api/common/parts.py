"""Content of messages: strings, and lists of typed parts, in OpenAI's shapes and in Anthropic's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from start_llm.api.common.fields import bad, short
from start_llm.api.common.images import IMAGE_TYPES, attachment_of
from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.images import Attachment
from start_llm.core.jsontext import too_much_to_read

TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
OTHER_MEDIA = frozenset({"input_audio", "audio", "file", "input_file", "video_url", "video", "document"})


@dataclass(frozen=True, slots=True)
class PartContent:
    """What one part, or one message, says: its text, and the images in it."""

    text: str = ""
    attachments: tuple[Attachment, ...] = ()

    @property
    def image_only(self) -> bool:
        return bool(self.attachments) and not self.text


def join_text(texts: Iterable[str]) -> str:
    """Text parts of one message as one text."""
    return "\n".join(texts)


def join_content(parts: Sequence[PartContent]) -> PartContent:
    """The parts of one message as one content. Texts stand on lines of their own, images where they were sent."""
    attachments: list[Attachment] = []
    texts: list[str] = []
    length = 0
    for index, part in enumerate(parts):
        if index and not part.image_only and not parts[index - 1].image_only:
            texts.append("\n")
            length += 1
        attachments += [replace(image, at=image.at + length) for image in part.attachments]
        texts.append(part.text)
        length += len(part.text)
    return PartContent("".join(texts), tuple(attachments))


def content_of(content: Any, path: str) -> PartContent:
    """A content field: a string, a list of parts, or ``None``. Raises BadRequest, NotSupported."""
    if content is None:
        return PartContent()
    if isinstance(content, str):
        return PartContent(content)
    if not isinstance(content, list):
        raise bad(path, "a string or a list of parts", content)
    return join_content([part_content(part, f"{path}[{index}]") for index, part in enumerate(content)])


def text_of(content: Any, path: str) -> str:
    """The text of a content field that has no images. Raises BadRequest, NotSupported."""
    return only_text(content_of(content, path))


def only_text(content: PartContent) -> str:
    """Raises NotSupported if there is an image in it."""
    if content.attachments:
        path = content.attachments[0].path
        raise NotSupported(f"{path}: an image cannot stand here; send text only.", param=path)
    return content.text


def part_content(part: Any, path: str) -> PartContent:
    if isinstance(part, str):
        return PartContent(part)
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad(path, "an object with a type", part)
    kind = part["type"]
    if kind in TEXT_TYPES:
        return PartContent(string_in(part, "text", path))
    if kind == "refusal":
        return PartContent(string_in(part, "refusal", path))
    if kind in IMAGE_TYPES:
        return PartContent(attachments=(attachment_of(part, path),))
    raise unusable(kind, path)


def part_text(part: Any, path: str) -> str:
    """The text of a part that is no image."""
    return only_text(part_content(part, path))


def string_in(part: dict[str, Any], name: str, path: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise bad(f"{path}.{name}", "a string", value)
    return value


def arguments_in(part: dict[str, Any], name: str, path: str) -> str:
    """A call's arguments, as JSON text: as they came, unless they are nested too deeply or hold too many values.

    Then they are that text as one string. It still says the same, and no reader on the way to the model meets its
    limits: a conversation that has such a call goes on.
    """
    text = string_in(part, name, path)
    return json.dumps(text, ensure_ascii=False) if too_much_to_read(text) else text


def unusable(kind: str, path: str) -> BadRequest | NotSupported:
    """The error for a part that cannot be shown to the model: never dropped silently."""
    if kind in OTHER_MEDIA:
        return NotSupported(f"{path}: parts of type {short(kind)} are not supported; send text only.", param=path)
    allowed = ", ".join(sorted(TEXT_TYPES | IMAGE_TYPES))
    message = f"{path}.type: unknown part type {short(kind)}; allowed: {allowed}."
    return BadRequest(message, param=f"{path}.type", code="invalid_value")
