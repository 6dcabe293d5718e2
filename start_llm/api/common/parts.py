"""Content of messages: strings, and lists of typed parts, in OpenAI's shapes and in Anthropic's.

Images become `Attachment`s; nothing is decoded or fetched here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from start_llm.api.common.documents import INSTEAD, pdf_data, pdf_text
from start_llm.api.common.fields import bad, items_of, short, string_in, within, wrong
from start_llm.core.errors import BadRequest, NotSupported
from start_llm.core.jsontext import too_much_to_read
from start_llm.core.limits import Limit
from start_llm.core.messages import Attachment, Message, Role, ToolCall

TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
FILE_TYPES = ("file", "input_file")
IMAGE_TYPES = frozenset({"image_url", "input_image", "image"})
# What no model here reads, and what can be sent in its place.
OTHER_MEDIA = {
    "input_audio": "send the words: POST /v1/audio/transcriptions makes them from a recording",
    "audio": "send the words: POST /v1/audio/transcriptions makes them from a recording",
    "video_url": "send some of its frames as images",
    "video": "send some of its frames as images",
    **dict.fromkeys(("file", "input_file", "document"), f"send a PDF as a data URL in base64, or {INSTEAD}"),
    "container_upload": "send the file's text; this server runs no containers",
}

_DATA_HEAD = re.compile(r"data:([^,]{0,256}),", re.IGNORECASE)
NO_RESULT = "(The result was not kept in this conversation.)"  # of a tool that ran at another server
_NAMES = ("filename", "file_name", "name", "title")


@dataclass(frozen=True, slots=True)
class PartContent:
    """What one part, or one message, says: its text, and the images in it."""

    text: str = ""
    attachments: tuple[Attachment, ...] = ()

    @property
    def image_only(self) -> bool:
        return bool(self.attachments) and not self.text

    def message(self, role: Role, **more: Any) -> Message:
        """A message that says this. `more`: its other fields."""
        return Message(role, self.text, attachments=self.attachments, **more)


@dataclass(slots=True)
class Turn:
    """What an assistant said and did, up to the next result of a tool, while its parts are read."""

    contents: list[PartContent] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        reasoning = "\n".join(filter(None, self.thoughts)) or None
        return join_content(self.contents).message("assistant", reasoning=reasoning, tool_calls=tuple(self.calls))

    def messages(self) -> list[Message]:
        """None, if there was nothing."""
        return [self.message()] if self.contents or self.thoughts or self.calls else []


def join_content(parts: Sequence[PartContent], between: str = "\n") -> PartContent:
    """The parts of one message as one content: `between` stands between two texts, images where they were sent."""
    attachments: list[Attachment] = []
    texts: list[str] = []
    length = 0
    for index, part in enumerate(parts):
        if index and not part.image_only and not parts[index - 1].image_only:
            texts.append(between)
            length += len(between)
        attachments += [replace(image, at=image.at + length) for image in part.attachments]
        texts.append(part.text)
        length += len(part.text)
    return PartContent("".join(texts), tuple(attachments))


def content_of(content: Any, path: str, between: str = "") -> PartContent:
    """A content field in OpenAI's shape: a string, a list of parts, or ``None``. Raises BadRequest, NotSupported.

    Templates that take parts print them without anything between them, and mlx-lm joins them so for all others. A line
    break belongs `between` those of a tool's result: they are outputs, and run together they would mislead.
    """
    if content is None:
        return PartContent()
    if isinstance(content, str):
        return PartContent(content)
    parts = items_of(content, path, "a string or a list of parts")
    return join_content([part_content(part, where) for where, part in parts], between)


def only_text(content: PartContent) -> str:
    """Raises NotSupported if there is an image in it."""
    if content.attachments:
        path = content.attachments[0].path
        raise NotSupported(f"{path}: an image cannot stand here; send text.", param=path)
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
    if kind in FILE_TYPES:
        file, where = (part.get("file"), f"{path}.file") if kind == "file" else (part, path)
        if isinstance(file, dict) and (data := pdf_data(file.get("file_data"))) is not None:
            return PartContent(pdf_text(data, file.get("filename"), f"{where}.file_data"))
    raise unusable(kind, path)


def arguments_in(part: dict[str, Any], name: str, path: str) -> str:
    """A call's arguments, as JSON text: as they came, unless they are nested too deeply or hold too many values.

    Then they are that text as one string. It still says the same, and no reader on the way to the model meets its
    limits: a conversation that has such a call goes on.
    """
    text = string_in(part, name, path)
    return json.dumps(text, ensure_ascii=False) if too_much_to_read(text) else text


def as_text(value: Any) -> str:
    """Text as it is, anything else as JSON, without what only another server can read."""
    return value if isinstance(value, str) else json.dumps(_readable(value), ensure_ascii=False)


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _readable(item) for key, item in value.items() if not key.startswith("encrypted_")}


def texts_of(value: Any, path: str, limit: Limit) -> Iterator[tuple[str, str | tuple[int, ...]]]:
    """Path and value of each: a string, a list of token ids, or a list of either. Raises BadRequest."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        within(limit, len(value), path)
        items = items_of(value, path)
    else:
        items = iter([(path, value)])
    for where, item in items:
        if isinstance(item, list) and item and all(type(token) is int and 0 <= token < 2**31 for token in item):
            yield where, tuple(item)
        elif isinstance(item, str):
            yield where, item
        else:
            raise bad(where, "a string or a list of token ids that is not empty", item)


def unusable(kind: str, path: str) -> BadRequest | NotSupported:
    """The error for a part that cannot be shown to the model: never dropped silently."""
    if kind in OTHER_MEDIA:
        return NotSupported(f"{path}: parts of type {short(kind)} are not supported; {OTHER_MEDIA[kind]}.", param=path)
    allowed = ", ".join(sorted(TEXT_TYPES | IMAGE_TYPES))
    return wrong(f"{path}.type", f"unknown part type {short(kind)}; allowed: {allowed}.")


# --- images ---


def attachment_of(part: dict[str, Any], path: str) -> Attachment:
    """An image part: OpenAI's ``image_url`` and ``input_image``, Anthropic's and MCP's ``image``. Raises BadRequest."""
    name = next((part[key] for key in _NAMES if isinstance(part.get(key), str)), "")
    kind = part["type"]
    if kind in ("image_url", "input_image") and part.get("image_url") is not None:
        return _of_url(part["image_url"], name, f"{path}.image_url")
    if kind == "input_image" and isinstance(part.get("file_id"), str):
        return Attachment(0, "other", part["file_id"], name, f"{path}.file_id")
    if kind == "image" and isinstance(part.get("source"), dict):
        return _of_source(part["source"], name, f"{path}.source")
    if kind == "image" and isinstance(part.get("data"), str):
        return Attachment(0, "data", part["data"], name, f"{path}.data")
    if kind == "image" and part.get("image") is not None:
        return _of_url(part["image"], name, f"{path}.image")
    field = "source" if kind == "image" else "image_url"
    raise bad(f"{path}.{field}", "an image: a data URL, or an object that holds one", part.get(field))


def _of_url(value: Any, name: str, path: str) -> Attachment:
    if isinstance(value, dict):
        value, path = value.get("url"), f"{path}.url"
    if not isinstance(value, str) or not value.strip():
        raise bad(path, "a data URL (data:image/png;base64,...)", value)
    url = value.strip()
    head = _DATA_HEAD.match(url)
    if head is not None:
        if not head[1].lower().rstrip().endswith(";base64"):
            raise wrong(path, "a data URL must be in base64 (data:image/png;base64,...).", "invalid_image")
        return Attachment(0, "data", url[head.end() :], name, path)
    is_web = url[:8].lower().startswith(("http://", "https://"))
    return Attachment(0, "url" if is_web else "other", url, name, path)


def _of_source(source: dict[str, Any], name: str, path: str) -> Attachment:
    kind = source.get("type")
    if kind == "base64":
        if not isinstance(source.get("data"), str):
            raise bad(f"{path}.data", "the image in base64", source.get("data"))
        return Attachment(0, "data", source["data"], name, f"{path}.data")
    if kind == "url":
        return _of_url(source.get("url"), name, f"{path}.url")
    if kind == "file" and isinstance(source.get("file_id"), str):
        return Attachment(0, "other", source["file_id"], name, f"{path}.file_id")
    raise bad(f"{path}.type", "base64 or url", kind)
