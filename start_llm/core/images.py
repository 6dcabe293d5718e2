"""Images: as clients send them, and as they stand in a conversation that is shown to a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

_EDGE = "\udfff"
MARK = re.compile(_EDGE + r"([0-9a-f]{64}):(\d+)x(\d+)" + _EDGE)
"""An image in the text of a message that is shown to a model with eyes: identity, width, height.

Its edges are half of a surrogate pair: text that comes by JSON never holds one, so nobody can write a mark.
"""


@dataclass(frozen=True, slots=True)
class Attachment:
    """An image in a message.

    Attributes:
        at: where it stands, as an offset in the message's content.
        kind: ``data``: `source` is base64 text; ``url``: an HTTP or HTTPS address; ``other``: something that this
            server does not read (a path, another scheme, an uploaded file's id).
        name: the file's name as the client tells it, ``""`` if it tells none.
        path: of the field in the request's body, for errors.
    """

    at: int
    kind: Literal["data", "url", "other"]
    source: str = field(repr=False)
    name: str = ""
    path: str = field(default="messages", compare=False)


@dataclass(frozen=True, slots=True)
class Picture:
    """An image that was read.

    Attributes:
        identity: SHA-256 of its pixels, in hex.
        width, height: upright, in pixels.
        load: decodes it: an RGB picture of Pillow. Any thread. Raises StartLLMError.
    """

    identity: str
    width: int
    height: int
    load: Callable[[], Any] = field(compare=False, repr=False)

    @property
    def mark(self) -> str:
        return f"{_EDGE}{self.identity}:{self.width}x{self.height}{_EDGE}"
