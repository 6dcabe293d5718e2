"""Images as clients send them, before anybody has read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
