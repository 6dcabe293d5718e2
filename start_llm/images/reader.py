"""Reads a request's images: each one's identity and number, and what stands in its place for a model without eyes.

An image that was read once is known by the digest of its bytes, so a history costs a hash per image and turn. Runs on
HTTP threads.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from start_llm.core.errors import NotSupported, TooLarge
from start_llm.core.images import Attachment
from start_llm.core.messages import Message
from start_llm.core.settings import Settings
from start_llm.images.numbers import SHORT, numbered, short_name, without_table
from start_llm.images.pixels import Opened, TooManyPixels, Unreadable, decoding

MOST_IMAGES = 1000
"""In one request, its history included."""
MOST_NEW_PIXELS = 1_000_000_000
"""That one request may make this server decode; what was decoded by then is known to the next one."""
_KEPT = 8192
_EXTENSIONS = {"PNG": ".png", "JPEG": ".jpeg", "GIF": ".gif", "WebP": ".webp"}
_NOT_IN_NAMES = re.compile(r"[^\w .()+@,#&~'-]")
_NAME_CHARS = 80
_URL_CHARS = 200


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of an image.

    Attributes:
        identity: SHA-256 of its pixels; of its bytes (or its address) where it has none.
        format: ``PNG`` and so on, ``""`` where it is no image.
        problem: why it cannot be shown, ``""`` if it can.
        too_large: that is a matter of size.
    """

    identity: str
    format: str = ""
    width: int = 0
    height: int = 0
    problem: str = ""
    too_large: bool = False

    @property
    def description(self) -> str:
        return self.problem or f"{self.width}x{self.height} {self.format}"


class Reader:
    """Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: OrderedDict[bytes, Known] = OrderedDict()
        self._lock = threading.Lock()

    def told(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The conversation for a model that reads text only: a line in the place of every image.

        An image that nobody can read is told as that, since it must not end the conversation that it stands in.

        Raises:
            NotSupported: IMAGES_ON_TEXT_MODEL=reject.
            TooLarge: far too many images at once.
        """
        first = next((image for message in messages for image in message.attachments), None)
        if first is not None and self._settings.images_on_text_model == "reject":
            raise NotSupported(f"{first.path}: this model reads text only; send no images.", param=first.path)
        known = self._read(messages)
        identities = [known[id(image)].identity for message in messages for image in message.attachments]
        answers = [message.content for message in messages if message.role == "assistant"]
        numbers = numbered(identities, answers) if identities or any(map(_may_tell, answers)) else {}
        shorts = {identity[:SHORT] for identity in identities}
        return tuple(_told(message, known, numbers, shorts) for message in messages)

    def _read(self, messages: Sequence[Message]) -> dict[int, Known]:
        """What is known of every attachment, by the `id` of the object."""
        images = [image for message in messages for image in message.attachments]
        if len(images) > MOST_IMAGES:
            path = images[MOST_IMAGES].path
            raise TooLarge(f"{path}: a request may have {MOST_IMAGES} images, its history included.", param=path)
        found: dict[int, Known] = {}
        pixels = 0
        for image in images:
            if image.kind == "data":
                key = _key(image)
                known = self._find(key)
                if known is None:
                    known = self._look(image.source)
                    self._keep(key, known)
                    pixels += known.width * known.height
                    if pixels > MOST_NEW_PIXELS:
                        raise TooLarge(
                            f"{image.path}: the request's new images have more than {MOST_NEW_PIXELS:,} pixels.",
                            param=image.path,
                        )
            else:
                known = _unread(image)
            found[id(image)] = known
        return found

    def _find(self, key: bytes) -> Known | None:
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
            return known

    def _keep(self, key: bytes, known: Known) -> None:
        with self._lock:
            self._known[key] = known
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)

    def _look(self, source: str) -> Known:
        """Decodes an image once, for its identity."""
        most = self._settings.image_max_bytes
        try:
            data = decoded(source, most)
        except Unreadable as problem:
            return Known(_digest(source.encode()), problem=str(problem), too_large=isinstance(problem, TooManyBytes))
        try:
            with decoding():
                opened = Opened(data, self._settings.image_max_pixels)
                return Known(opened.identity(), opened.format, opened.width, opened.height)
        except Unreadable as problem:
            return Known(_digest(data), problem=str(problem), too_large=isinstance(problem, TooManyPixels))


class TooManyBytes(Unreadable):
    """An image is larger than the limit."""


def decoded(source: str, most: int) -> bytes:
    """Base64 text to at most `most` bytes. Raises Unreadable, TooManyBytes."""
    if len(source) // 4 * 3 > most + 3 and len(text := "".join(source.split())) // 4 * 3 > most + 3:
        raise TooManyBytes(f"{len(text) // 4 * 3:,} bytes, more than {most:,}")
    text = "".join(source.split()).replace("-", "+").replace("_", "/")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise Unreadable("not base64") from None
    if not data:
        raise Unreadable("empty")
    if len(data) > most:
        raise TooManyBytes(f"{len(data):,} bytes, more than {most:,}")
    return data


def _told(message: Message, known: dict[int, Known], numbers: dict[str, int], shorts: set[str]) -> Message:
    content = message.content
    if message.role == "assistant" and _may_tell(content):
        content = without_table(content, shorts)
    if not message.attachments:
        return message if content is message.content else replace(message, content=content)
    pieces: list[str] = []
    at = 0
    identities = []
    for image in message.attachments:
        seen = known[id(image)]
        identities.append(seen.identity)
        pieces += [content[at : image.at], _line(image, seen, numbers[seen.identity])]
        at = image.at
    pieces.append(content[at:])
    return replace(message, content=_joined(pieces), images=tuple(identities), attachments=())


def _line(image: Attachment, known: Known, number: int) -> str:
    name = clean_name(image.name) or (
        short_name(known.identity, _EXTENSIONS.get(known.format, "")) if image.kind == "data" else _address(image)
    )
    return f"[Image {number}: {name}, {known.description}, not shown: this model reads text only]"


def _joined(pieces: Sequence[str]) -> str:
    """With a line break between neighbours that have none."""
    text = ""
    for piece in filter(None, pieces):
        text += ("\n" if text and not text.endswith("\n") and not piece.startswith("\n") else "") + piece
    return text


def clean_name(name: str) -> str:
    """A client's file name, fit for a line of text: the last part of a path, without anything that ends the line."""
    last = re.split(r"[/\\]", name)[-1]
    return _NOT_IN_NAMES.sub("_", last).strip()[:_NAME_CHARS]


def _address(image: Attachment) -> str:
    """Where an image is that was not fetched, in one line; what follows ``?`` may be a secret."""
    return re.sub(r"[^!-~]|[\[\]]", "_", image.source.partition("?")[0])[:_URL_CHARS]


def _unread(image: Attachment) -> Known:
    problem = "not fetched" if image.kind == "url" else "not read"
    return Known(_digest(image.source.encode("utf-8", "replace")), problem=problem)


def _may_tell(text: str) -> bool:
    return "<!-- start_llm:images -->" in text


def _key(image: Attachment) -> bytes:
    return hashlib.sha256(image.source.encode("utf-8", "replace")).digest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(b"bytes" + data).hexdigest()
