"""Parts that are images, in every dialect's shape, to `Attachment`s. Nothing is decoded or fetched here."""

from __future__ import annotations

import re
from typing import Any

from start_llm.api.common.fields import bad
from start_llm.core.errors import BadRequest
from start_llm.core.images import Attachment

IMAGE_TYPES = frozenset({"image_url", "input_image", "image"})

_DATA_HEAD = re.compile(r"data:([^,]{0,256}),", re.IGNORECASE)
_NAMES = ("filename", "file_name", "name", "title")


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
            raise BadRequest(
                f"{path}: a data URL must be in base64 (data:image/png;base64,...).", param=path, code="invalid_image"
            )
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
