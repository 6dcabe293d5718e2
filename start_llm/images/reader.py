"""Reads a request's images: each one's identity and number, and what stands in its place in the conversation.

An image that was read once is known by the digest of its bytes, so a history costs a hash per image and turn. Runs on
HTTP threads.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

from start_llm.core.errors import BadRequest, NotSupported, StartLLMError, TooLarge
from start_llm.core.messages import MARK, Attachment, Message, Picture
from start_llm.core.settings import Settings
from start_llm.files.lru import Lru
from start_llm.images.pixels import DECODING, ImageFile, ImageTooLarge, Unreadable

MOST_IMAGES = 1000  # in one request, its history included
MOST_NEW = 5
"""New images of a request (behind the last answer; the history is not counted)."""
MOST_NEW_BYTES = 50_000_000  # of these together
MOST_PIXELS = 50_000_000  # of one image
MOST_NEW_PIXELS = 1_000_000_000
"""That one request may make this server decode; what was decoded by then is known to the next one."""
_KEPT = 8192
_EXTENSIONS = {"PNG": ".png", "JPEG": ".jpeg", "GIF": ".gif", "WebP": ".webp"}
_NOT_IN_NAMES = re.compile(r"[^\w .()+@,#&~'-]")
_NAME_CHARS = 80
_URL_CHARS = 200
_SHORT = 8
"""Hexadecimal digits of an identity that a made-up file name carries."""


@dataclass(frozen=True, slots=True)
class KnownImage:
    """What is known of an image."""

    identity: str  # SHA-256 of its pixels; of its bytes (or its address) where it has none
    format: str = ""  # ``PNG`` and so on, ``""`` where it is no image
    width: int = 0
    height: int = 0
    problem: str = ""  # why it cannot be shown, ``""`` if it can
    too_large: bool = False  # that is a matter of size
    cost: int = 0  # of reading it, in pixels

    @property
    def description(self) -> str:
        return self.problem or f"{self.width}x{self.height} {self.format}"


class ImageReader:
    """Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._known: Lru[bytes, KnownImage] = Lru(_KEPT)

    def as_text(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The conversation for a model that reads text only: a line in the place of every image, readable or not.

        Raises NotSupported (IMAGES_ON_TEXT_MODEL=reject), TooLarge (far too many images at once).
        """
        first = next((image for message in messages for image in message.attachments), None)
        if first is not None and self._settings.images_on_text_model == "reject":
            raise NotSupported(f"{first.path}: this model reads text only; send no images.", param=first.path)
        return tuple(_placed(messages, self._read(messages), {}, "not shown: this model reads text only"))

    def shown(
        self, messages: Sequence[Message], problem: Callable[[int, int], str] = lambda width, height: ""
    ) -> tuple[tuple[Message, ...], dict[str, Picture]]:
        """The conversation for a model with eyes: marks in the places of images, and the images by identity.

        `problem`: why the model cannot be shown an image of this width and height, ``""`` if it can. An image behind
        the last answer has to be good: else BadRequest, TooLarge. In the history it is told as a line of text.
        """
        fresh = _behind_last_answer(messages)
        self._check_sizes(fresh)
        known = {
            at: replace(seen, problem=seen.problem or problem(seen.width, seen.height))
            for at, seen in self._read(messages).items()
        }
        for index, image in enumerate(fresh):
            if known[id(image)].problem:
                raise _refusal(image, index, known[id(image)])
        pictures: dict[str, Picture] = {}
        for image in (image for message in messages for image in message.attachments):
            seen = known[id(image)]
            if not seen.problem and seen.identity not in pictures:
                load = partial(self._load, image)
                pictures[seen.identity] = Picture(seen.identity, seen.width, seen.height, load)
        return tuple(_placed(messages, known, pictures, "not shown")), pictures

    def _check_sizes(self, fresh: Sequence[Attachment]) -> None:
        """Before anything is decoded: how many new images there are, and how long they are together."""
        if len(fresh) > MOST_NEW:
            path = fresh[MOST_NEW].path
            message = f"{path}: a request may bring {MOST_NEW} new images, but this is number {MOST_NEW + 1}."
            raise TooLarge(message, param=path, code="too_many_images")
        sizes = accumulate(len(image.source) // 4 * 3 if image.kind == "data" else 0 for image in fresh)
        for index, (image, together) in enumerate(zip(fresh, sizes, strict=True), start=1):
            if together > MOST_NEW_BYTES:
                raise TooLarge(
                    f"{image.path}: with image {index}, the request's new images have {together:,} bytes; "
                    f"{MOST_NEW_BYTES:,} are allowed.",
                    param=image.path,
                    code="image_too_large",
                )

    def _load(self, image: Attachment) -> object:
        """The pixels of an image that was read before."""
        try:
            data = decoded(image.source, self._settings.image_max_bytes)
            with DECODING:
                return ImageFile(data, MOST_PIXELS).upright()
        except Unreadable as problem:
            raise BadRequest(f"{image.path}: {problem}.", param=image.path, code="invalid_image") from None

    def _read(self, messages: Sequence[Message]) -> dict[int, KnownImage]:
        """What is known of every attachment, by the `id` of the object."""
        images = [image for message in messages for image in message.attachments]
        if len(images) > MOST_IMAGES:
            path = images[MOST_IMAGES].path
            raise TooLarge(f"{path}: a request may have {MOST_IMAGES} images, its history included.", param=path)
        found: dict[int, KnownImage] = {}
        pixels = 0
        for image in images:
            known = self._known.get(_key(image)) if image.kind == "data" else _unread(image)
            if known is None:
                known = self._look(image)
                self._known.put(_key(image), known)
                pixels += known.cost
                if pixels > MOST_NEW_PIXELS:
                    message = f"{image.path}: the request's new images have more than {MOST_NEW_PIXELS:,} pixels."
                    raise TooLarge(message, param=image.path)
            found[id(image)] = known
        return found

    def _look(self, image: Attachment) -> KnownImage:
        """Decodes an image once, for its identity."""
        data = image.source.encode("utf-8", "replace")
        try:
            data = decoded(image.source, self._settings.image_max_bytes)
            with DECODING:
                opened = ImageFile(data, MOST_PIXELS)
                return KnownImage(opened.identity(), opened.format, opened.width, opened.height, cost=opened.cost)
        except Unreadable as problem:
            too_large = isinstance(problem, ImageTooLarge)
            return KnownImage(_digest(data), problem=str(problem), too_large=too_large, cost=problem.cost)


def decoded(source: str, most: int) -> bytes:
    """Base64 text to at most `most` bytes. Raises Unreadable, ImageTooLarge."""
    if len(source) // 4 * 3 > most + 3 and len(text := "".join(source.split())) // 4 * 3 > most + 3:
        raise ImageTooLarge(f"{len(text) // 4 * 3:,} bytes, more than {most:,}")
    text = "".join(source.split()).replace("-", "+").replace("_", "/")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise Unreadable("not base64") from None
    if not data:
        raise Unreadable("empty")
    if len(data) > most:
        raise ImageTooLarge(f"{len(data):,} bytes, more than {most:,}")
    return data


def _behind_last_answer(messages: Sequence[Message]) -> list[Attachment]:
    """Images that are new in a request."""
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    new = messages[answers[-1] + 1 :] if answers else messages
    return [image for message in new for image in message.attachments]


def _refusal(image: Attachment, index: int, known: KnownImage) -> StartLLMError:
    kind, code = (TooLarge, "image_too_large") if known.too_large else (BadRequest, "invalid_image")
    return kind(f"{image.path}: image {index + 1} of the request: {known.problem}.", param=image.path, code=code)


def _placed(
    messages: Sequence[Message], known: dict[int, KnownImage], pictures: Mapping[str, Picture], why: str
) -> list[Message]:
    """The messages with marks in the places of `pictures`; a line stands for another image, and tells `why`."""
    numbers: dict[str, int] = {}  # in the conversation's order: an image has the same number in every request
    placed: list[Message] = []
    for message in messages:
        content = message.content
        if not message.attachments:
            placed.append(message)
            continue
        pieces: list[str] = []
        at = 0
        for image in message.attachments:
            seen = known[id(image)]
            number = numbers.setdefault(seen.identity, len(numbers) + 1)
            line = f"[Image {number}: {_name(image, seen)}, {seen.description}, {why}]"
            pieces += [content[at : image.at], pictures[seen.identity].mark if seen.identity in pictures else line]
            at = image.at
        pieces.append(content[at:])
        identities = tuple(known[id(image)].identity for image in message.attachments)
        placed.append(replace(message, content=_joined(pieces), images=identities, attachments=()))
    return placed


def _name(image: Attachment, known: KnownImage) -> str:
    """Its file name, or one that is made up, or where it is in one line; what follows ``?`` may be a secret."""
    made_up = f"image_{known.identity[:_SHORT]}{_EXTENSIONS.get(known.format, '')}"
    address = re.sub(r"[^!-~]|[\[\]]", "_", image.source.partition("?")[0])[:_URL_CHARS]
    sent = re.split(r"[/\\]", image.name)[-1]  # of a path the last part, without anything that ends the line
    return _NOT_IN_NAMES.sub("_", sent).strip()[:_NAME_CHARS] or (made_up if image.kind == "data" else address)


def _joined(pieces: Sequence[str]) -> str:
    """Text and what stands for images, in turn: a mark as the client put it, a line of text as a line of its own."""
    text, own_line = "", False
    for number, piece in enumerate(pieces):
        own_line = own_line or (number % 2 == 1 and MARK.fullmatch(piece) is None)
        if own_line and text and piece and not text.endswith("\n") and not piece.startswith("\n"):
            text += "\n"
        text += piece
        own_line = own_line and (number % 2 == 1 or not piece)
    return text


def _unread(image: Attachment) -> KnownImage:
    why = "not fetched" if image.kind == "url" else "not an address that is read"
    return KnownImage(_digest(image.source.encode("utf-8", "replace")), problem=f"{why}; send it as a data URL")


def _key(image: Attachment) -> bytes:
    return hashlib.sha256(image.source.encode("utf-8", "replace")).digest()


def _digest(data: bytes) -> str:
    return hashlib.sha256(b"bytes" + data).hexdigest()
