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

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = {"JPEG": "JPEG", "MPO": "JPEG", "PNG": "PNG", "GIF": "GIF", "WEBP": "WebP"}
"""Pillow's names, and the names that people know."""

_READERS = ("JPEG", "PNG", "GIF", "WEBP")
_BAND_PIXELS = 1 << 20
_SCAN = b"\xff\xda"
_MOST_SCANS = 200  # a progressive JPEG is decoded once per scan; cameras and browsers write up to 10

# What Pillow raises on damaged files, beside OSError.
_DAMAGE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    TypeError,
    ZeroDivisionError,
)
_ERRORS = (*_DAMAGE, struct.error, zlib.error, AttributeError, MemoryError)

# `Image.open` warns of sizes that the limit here has refused or allowed already.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class Unreadable(Exception):
    """These bytes give no picture. The message says why, in a few words that fit behind a file's name."""


class TooManyPixels(Unreadable):
    """A picture is larger than the limit, as far as its head tells."""


class ImageFile:
    """An image file whose head was read. Not thread-safe.

    Attributes:
        format: ``PNG``, ``JPEG``, ``GIF`` or ``WebP``.
        width, height: upright, in pixels.
    """

    def __init__(self, data: bytes, most_pixels: int) -> None:
        """Raises Unreadable, TooManyPixels."""
        try:
            self._image: Image.Image = Image.open(io.BytesIO(data), formats=_READERS)
            width, height = self._image.size
            if width * height > most_pixels:
                raise TooManyPixels(f"{width}x{height} are more than {most_pixels:,} pixels")
            turned = self._image.getexif().get(0x0112) in (5, 6, 7, 8)  # decodes a PNG
        except Image.DecompressionBombError:
            raise TooManyPixels(f"more than {most_pixels:,} pixels") from None
        except UnidentifiedImageError:
            raise Unreadable("not a JPEG, PNG, GIF or WebP file") from None
        except _ERRORS as error:
            raise Unreadable(_words(error)) from None
        self.format = FORMATS.get(self._image.format or "", "image")
        if self.format == "JPEG" and data.count(_SCAN) > _MOST_SCANS:
            raise Unreadable("a JPEG of too many scans")
        self.width, self.height = (height, width) if turned else (width, height)

    def upright(self) -> Image.Image:
        """The picture, in RGB. Takes about 8 bytes a pixel while it works. Raises Unreadable."""
        try:
            self._image.load()
            picture = ImageOps.exif_transpose(self._image)
            return _rgb(picture)
        except _ERRORS as error:
            raise Unreadable(_words(error)) from None

    def identity(self) -> str:
        """SHA-256 of the upright RGB pixels and their size, in hex. Raises Unreadable."""
        try:
            self._image.load()
            picture = ImageOps.exif_transpose(self._image)
            digest = hashlib.sha256(f"{picture.width}x{picture.height} RGB".encode())
            for band in _bands(picture):
                digest.update(_rgb(band).tobytes())
            return digest.hexdigest()
        except _ERRORS as error:
            raise Unreadable(_words(error)) from None


def decoding() -> threading.Semaphore:
    """To be held while pixels are in memory: they take hundreds of megabytes at the limit."""
    return _DECODING


_DECODING = threading.Semaphore(1)


def _words(error: BaseException) -> str:
    text = str(error).lower()
    if "truncated" in text or "end of" in text or isinstance(error, EOFError):
        return "a damaged file (it is cut short)"
    return "a damaged file"


def _bands(picture: Image.Image) -> Iterator[Image.Image]:
    rows = max(1, _BAND_PIXELS // max(1, picture.width))
    for top in range(0, picture.height, rows):
        yield picture.crop((0, top, picture.width, min(top + rows, picture.height)))


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
