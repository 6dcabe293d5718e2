"""Bytes of an image file to pixels, in bounded time and memory. The only file that uses Pillow.

JPEG, PNG, GIF and WebP; of an animation the first frame. Pixels are upright (EXIF), 8-bit RGB; what is transparent is
white, since screenshots have dark text.
"""

from __future__ import annotations

import hashlib
import io
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin, UnidentifiedImageError

FORMATS = {"JPEG": "JPEG", "MPO": "JPEG", "PNG": "PNG", "GIF": "GIF", "WEBP": "WebP"}
"""Pillow's names, and the names that people know."""

_READERS = ("JPEG", "PNG", "GIF", "WEBP")
_BAND_PIXELS = 1 << 20
_SCAN = b"\xff\xda"
_MOST_SCANS = 200  # a progressive JPEG is decoded once per scan
_USUAL_SCANS = 10  # cameras and browsers write no more
_MOST_SCANNED = 1 << 30  # pixels of all its scans: about a second of computing

# What Pillow raises on damaged files.
_DAMAGE = (OSError, ValueError, SyntaxError, EOFError, LookupError, ArithmeticError, TypeError, AttributeError)
_ERRORS = (*_DAMAGE, struct.error, zlib.error, MemoryError)

# `Image.open` warns of sizes that the limit here has refused or allowed already.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Of the texts in a PNG, unpacked: Pillow's own 64 MB come out of 60 kB, for each of a thousand images.
PngImagePlugin.MAX_TEXT_MEMORY = 2 << 20


class Unreadable(Exception):
    """These bytes give no picture. The message says why, in a few words that fit behind a file's name.

    `cost`: what it took to find out, see `ImageFile`.
    """

    def __init__(self, why: str, cost: int = 0) -> None:
        super().__init__(why)
        self.cost = cost


class ImageTooLarge(Unreadable):
    """The file has more bytes, or the picture more pixels, than is allowed."""


@contextmanager
def _reading(cost: int = 0) -> Iterator[None]:
    """What Pillow says of a file that it cannot read becomes Unreadable."""
    try:
        yield
    except UnidentifiedImageError:
        raise Unreadable("not a JPEG, PNG, GIF or WebP file") from None
    except _ERRORS as error:
        text = str(error).lower()
        if "text chunk" in text or "max_text" in text:
            raise Unreadable("a PNG whose texts are too long", cost) from None
        cut = "truncated" in text or "end of" in text or isinstance(error, EOFError)
        raise Unreadable("a damaged file (it is cut short)" if cut else "a damaged file", cost) from None


class ImageFile:
    """An image file whose head was read. Not thread-safe.

    Attributes:
        format: ``PNG``, ``JPEG``, ``GIF`` or ``WebP``.
        width, height: upright, in pixels.
        cost: how many pixels of an ordinary file take as long to decode.
    """

    def __init__(self, data: bytes, most_pixels: int) -> None:
        """Raises Unreadable, ImageTooLarge."""
        with _reading():
            try:
                self._image: Image.Image = Image.open(io.BytesIO(data), formats=_READERS)
            except Image.DecompressionBombError:
                raise ImageTooLarge(f"more than {most_pixels:,} pixels") from None
            width, height = self._image.size
            if width * height > most_pixels:
                raise ImageTooLarge(f"{width}x{height} are more than {most_pixels:,} pixels")
        self.format = FORMATS.get(self._image.format or "", "image")
        scans = data.count(_SCAN) if self.format == "JPEG" else 0
        if scans > _MOST_SCANS or scans * width * height > _MOST_SCANNED:
            raise Unreadable("a JPEG of too many scans")
        self.cost = width * height * max(1, scans // _USUAL_SCANS)
        with _reading(self.cost):
            turned = self._image.getexif().get(0x0112) in (5, 6, 7, 8)  # decodes a PNG
        self.width, self.height = (height, width) if turned else (width, height)

    def upright(self) -> Image.Image:
        """The picture, in RGB. Takes about 8 bytes a pixel while it works. Raises Unreadable."""
        with _reading(self.cost):
            return _rgb(self._turned())

    def identity(self) -> str:
        """SHA-256 of the upright RGB pixels and their size, in hex. Raises Unreadable."""
        with _reading(self.cost):
            picture = self._turned()
            digest = hashlib.sha256(f"{picture.width}x{picture.height} RGB".encode())
            rows = max(1, _BAND_PIXELS // max(1, picture.width))
            for top in range(0, picture.height, rows):
                band = picture.crop((0, top, picture.width, min(top + rows, picture.height)))
                digest.update(_rgb(band).tobytes())
            return digest.hexdigest()

    def _turned(self) -> Image.Image:
        self._image.load()
        return ImageOps.exif_transpose(self._image)


DECODING = threading.Semaphore(1)
"""To be held while pixels are in memory: they take hundreds of megabytes at the limit."""


def _rgb(picture: Image.Image) -> Image.Image:
    """8-bit RGB, on white where it is transparent."""
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode.startswith("I"):  # 16 bits of grey
        grey = np.asarray(picture).astype(np.uint32)
        return Image.fromarray((grey >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return picture.convert("RGB")
