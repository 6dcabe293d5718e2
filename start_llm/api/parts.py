"""Content of messages in OpenAI's shapes: strings and lists of typed parts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from start_llm.api.fields import bad, short
from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.jsontext import is_deep

TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
IMAGE_TYPES = frozenset({"image_url", "input_image", "image"})
OTHER_MEDIA = frozenset({"input_audio", "audio", "file", "input_file", "video_url", "video", "document"})


def join_text(texts: Iterable[str]) -> str:
    """Text parts of one message as one text."""
    return "\n".join(texts)


def text_of(content: Any, path: str) -> str:
    """The text of a content field: a string, a list of parts, or ``None``. Raises BadRequest, NotSupported."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(path, "a string or a list of parts", content)
    return join_text(part_text(part, f"{path}[{index}]") for index, part in enumerate(content))


def part_text(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise bad(path, "an object with a type", part)
    kind = part["type"]
    if kind in TEXT_TYPES:
        return string_in(part, "text", path)
    if kind == "refusal":
        return string_in(part, "refusal", path)
    raise unusable(kind, path)


def string_in(part: dict[str, Any], name: str, path: str) -> str:
    value = part.get(name)
    if not isinstance(value, str):
        raise bad(f"{path}.{name}", "a string", value)
    return value


def arguments_in(part: dict[str, Any], name: str, path: str) -> str:
    """A call's arguments, as JSON text: as they came, unless they are nested too deeply.

    Then they are that text as one string. It still says the same, and no reader on the way to the model meets its
    limits: a conversation that has such a call goes on.
    """
    text = string_in(part, name, path)
    return json.dumps(text, ensure_ascii=False) if is_deep(text) else text


def unusable(kind: str, path: str) -> BadRequest | NotSupported:
    """The error for a part that cannot be shown to the model: never dropped silently."""
    if kind in IMAGE_TYPES:
        return NotSupported(f"{path}: images are not supported; send text only.", param=path)
    if kind in OTHER_MEDIA:
        return NotSupported(f"{path}: parts of type {short(kind)} are not supported; send text only.", param=path)
    message = f"{path}.type: unknown part type {short(kind)}; allowed: {', '.join(sorted(TEXT_TYPES))}."
    return BadRequest(message, param=f"{path}.type", code="invalid_value")
