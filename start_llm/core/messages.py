"""What a conversation is made of, whatever dialect it came in: messages, tools, images."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an assistant turn; `id` is the call's as the client knows it.

    `arguments` is JSON *text*, exactly as it came; it may be malformed, since models and clients produce such text.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Text parts are joined by the dialect; `None` content is ``""``."""

    role: Role  # OpenAI's ``developer`` is ``system`` here; the position in the list is kept
    content: str = ""
    reasoning: str | None = None  # the assistant's thinking, without its tags; ``None`` where there is none
    tool_calls: tuple[ToolCall, ...] = ()  # calls of an assistant turn, in order
    tool_call_id: str | None = None  # for ``tool`` messages, the call that this answers
    name: str | None = None  # for ``tool`` messages the tool's name, where the client said it
    is_error: bool = False  # a ``tool`` message that reports a failure (Anthropic's ``is_error``)
    images: tuple[str, ...] = ()  # identities of the images that `content` tells of, in order
    # images that were not read yet; `images.ImageReader` puts them into `content` and `images`
    attachments: tuple[Attachment, ...] = ()

    @property
    def chars(self) -> int:
        """Of its text, its reasoning and its calls."""
        calls = sum(len(call.name) + len(call.arguments) for call in self.tool_calls)
        return len(self.content) + len(self.reasoning or "") + calls


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; its name is unique within a request."""

    name: str
    description: str = ""
    # JSON schema of the arguments (an object schema); treat as read-only
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False  # the arguments must validate against `parameters` by construction

    def as_function(self) -> dict[str, Any]:
        """The shape that chat templates and mlx-lm's tool parsers take (OpenAI's)."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


# --- calls of one answer ---

_OF_ANSWER = re.compile(r"call_([0-9a-f]{20})[0-9a-f]{4}")


def call_ids() -> Callable[[], str]:
    """Makes the ids of one answer's calls: the first 20 digits are random and the answer's, the last four count."""
    answer, numbers = uuid.uuid4().hex[:20], count()
    return lambda: f"call_{answer}{next(numbers) % 0x10000:04x}"


def with_calls_together(messages: Sequence[Message]) -> list[tuple[int, Message]]:
    """The messages with all calls of one answer in one message, and their results behind it; each with its old index.

    Some clients send every call in an assistant message of its own, each with its result behind it (Goose, November
    2026). The ids of `call_ids` show that one answer made them: then the model is shown the answer that it gave.
    """
    shown: list[tuple[int, Message]] = []
    calling = 0  # where the last assistant message stands, while only results follow it
    for index, message in enumerate(messages):
        if message.role == "assistant" and shown and (answer := _answer_of(message)):
            first, said = shown[calling]
            bare = not (message.content or message.reasoning or message.images or message.attachments)
            if bare and answer == _answer_of(said):
                shown[calling] = first, replace(said, tool_calls=said.tool_calls + message.tool_calls)
                continue
        if message.role != "tool":
            calling = len(shown)
        shown.append((index, message))
    return shown


def _answer_of(message: Message) -> str:
    """The digits that the ids of all its calls share; empty if they do not, or are not this server's."""
    found = {match[1] if (match := _OF_ANSWER.fullmatch(call.id)) else "" for call in message.tool_calls}
    return found.pop() if len(found) == 1 else ""


# --- images: as clients send them, and as they stand in a conversation that is shown to a model ---

_EDGE = "\udfff"
MARK = re.compile(_EDGE + r"([0-9a-f]{64}):(\d+)x(\d+)" + _EDGE)
"""An image in the text of a message that is shown to a model with eyes: identity, width, height.

Its edges are half of a surrogate pair: text that comes by JSON never holds one, so nobody can write a mark.
"""


@dataclass(frozen=True, slots=True)
class Attachment:
    """An image in a message."""

    at: int  # where it stands, as an offset in the message's content
    # ``data``: `source` is base64 text; ``url``: an HTTP or HTTPS address; ``other``: something that this server
    # does not read (a path, another scheme, an uploaded file's id)
    kind: Literal["data", "url", "other"]
    source: str = field(repr=False)
    name: str = ""  # the file's name as the client tells it, ``""`` if it tells none
    path: str = field(default="messages", compare=False)  # of the field in the request's body, for errors


@dataclass(frozen=True, slots=True)
class Picture:
    """An image that was read."""

    identity: str  # SHA-256 of its pixels, in hex
    # `width`, `height`: upright, in pixels
    width: int
    height: int
    # decodes it: an RGB picture of Pillow. Any thread. Raises StartLLMError.
    load: Callable[[], Any] = field(compare=False, repr=False)

    @property
    def mark(self) -> str:
        return f"{_EDGE}{self.identity}:{self.width}x{self.height}{_EDGE}"
