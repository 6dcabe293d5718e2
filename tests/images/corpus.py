"""Bad and odd images, each with what must be found out about it. All are made here."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from PIL import Image

from tests.images.pictures import b64, encoded, noise, png

MOST_BYTES = 200_000
MOST_PIXELS = 1_000_000


@dataclass(frozen=True)
class Case:
    """`data`: the image's bytes, made when they are needed if that takes long; or its base64 text. `seen`: the
    description of a good image; else `problem` is in the words for a bad one.

    `status`: what a model that sees images answers.
    """

    name: str
    data: bytes | str | Callable[[], bytes]
    status: int
    seen: str = ""
    problem: str = ""

    @cached_property
    def source(self) -> str:
        """Base64 text."""
        data = self.data() if callable(self.data) else self.data
        return data if isinstance(data, str) else b64(data)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def raw_png(width: int, height: int, body: bytes, depth: int = 8, colour: int = 2, extra: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def _rotated(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(noise(40, 20), kind, exif=exif)


def _animated(kind: str) -> bytes:
    out = io.BytesIO()
    first, *rest = (noise(20, 10, seed).quantize(16) if kind == "GIF" else noise(20, 10, seed) for seed in range(4))
    first.save(out, kind, save_all=True, append_images=rest, duration=50)
    return out.getvalue()


def _scans(count: int) -> bytes:
    """A progressive JPEG with the same scan again and again."""
    data = encoded(noise(32, 32), "JPEG", progressive=True)
    start = data.index(b"\xff\xda")
    end = data.index(b"\xff", start + 14)
    while data[end + 1] == 0:
        end = data.index(b"\xff", end + 1)
    scan = data[start:end]
    return data[:start] + scan * count + data[start:]


def _good() -> Iterator[tuple[str, bytes, str]]:
    """Name, bytes, description."""
    picture = noise(30, 20)
    yield "plain PNG", encoded(picture), "30x20 PNG"
    yield "plain JPEG", encoded(picture, "JPEG"), "30x20 JPEG"
    yield "plain WebP", encoded(picture, "WEBP"), "30x20 WebP"
    yield "lossless WebP", encoded(picture, "WEBP", lossless=True), "30x20 WebP"
    yield "plain GIF", encoded(picture.quantize(32), "GIF"), "30x20 GIF"
    yield "1x1", png(1, 1), "1x1 PNG"
    yield "1x1 GIF", encoded(Image.new("1", (1, 1)), "GIF"), "1x1 GIF"
    yield "one row", png(5000, 1), "5000x1 PNG"
    yield "one column", png(1, 5000), "1x5000 PNG"
    yield "grey", encoded(picture.convert("L")), "30x20 PNG"
    yield "grey JPEG", encoded(picture.convert("L"), "JPEG"), "30x20 JPEG"
    yield "black and white", encoded(picture.convert("1")), "30x20 PNG"
    yield "palette", encoded(picture.quantize(8)), "30x20 PNG"
    yield "palette with transparency", encoded(picture.quantize(8), transparency=3), "30x20 PNG"
    yield "RGB with a transparent colour", encoded(picture, transparency=(1, 2, 3)), "30x20 PNG"
    yield "alpha", encoded(picture.convert("RGBA")), "30x20 PNG"
    yield "grey and alpha", encoded(picture.convert("LA")), "30x20 PNG"
    yield "CMYK JPEG", encoded(picture.convert("CMYK"), "JPEG"), "30x20 JPEG"
    yield "16 bits of grey", encoded(Image.fromarray(np.full((20, 30), 40000, np.uint16))), "30x20 PNG"
    yield "16 bits of RGB", raw_png(2, 1, b"\0" + bytes(12), depth=16), "2x1 PNG"
    yield "interlaced rows of nothing", raw_png(3, 2, bytes(20)), "3x2 PNG"
    yield "progressive JPEG", encoded(picture, "JPEG", progressive=True), "30x20 JPEG"
    yield "animated GIF", _animated("GIF"), "20x10 GIF"
    yield "animated WebP", _animated("WEBP"), "20x10 WebP"
    yield "animated PNG", _animated("PNG"), "20x10 PNG"
    yield "EXIF turned by 90 degrees", _rotated("JPEG", 6), "20x40 JPEG"
    yield "EXIF mirrored", _rotated("JPEG", 2), "40x20 JPEG"
    yield "EXIF in PNG", _rotated("PNG", 8), "20x40 PNG"
    yield "EXIF of no meaning", _rotated("JPEG", 99), "40x20 JPEG"
    yield "bytes behind the end", png(30, 20) + b"and more" * 10, "30x20 PNG"
    yield "JPEG said to be a PNG", encoded(picture, "JPEG"), "30x20 JPEG"


def _bad() -> Iterator[tuple[str, bytes | Callable[[], bytes], int, str]]:
    """Name, bytes, status, words."""
    picture = png(60, 60)
    yield "cut short", picture[: len(picture) // 2], 400, "cut short"
    yield "cut short JPEG", encoded(noise(60, 60), "JPEG")[:900], 400, "damaged"
    yield "cut short WebP", encoded(noise(60, 60), "WEBP")[:300], 400, "damaged"
    yield "cut short GIF", encoded(noise(60, 60).quantize(64), "GIF")[:900], 400, "damaged"
    yield "head only", picture[:33], 400, "not a JPEG"
    yield "signature only", picture[:8], 400, "not a JPEG"
    yield "a wrong checksum", picture[:200] + b"\0\0\0\0" + picture[204:], 400, "damaged"
    yield "zero wide", raw_png(0, 10, b""), 400, "not a JPEG"
    yield "text", b"this is no picture at all", 400, "not a JPEG, PNG, GIF or WebP file"
    yield "HTML", b"<!doctype html><img src=x>", 400, "not a JPEG"
    yield "SVG", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', 400, "not a JPEG"
    yield "PDF", b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n", 400, "not a JPEG"
    yield "BMP", encoded(noise(4, 4), "BMP"), 400, "not a JPEG"
    yield "TIFF", encoded(noise(4, 4), "TIFF"), 400, "not a JPEG"
    yield "PostScript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 400, "not a JPEG"
    yield "zeros", bytes(1000), 400, "not a JPEG"
    yield "bomb", lambda: encoded(Image.new("1", (6_000, 6_000))), 413, "more than 1,000,000 pixels"
    yield "a bomb that lies", raw_png(60_000, 60_000, bytes(100)), 413, "more than 1,000,000 pixels"
    yield "a bomb in GIF", lambda: encoded(Image.new("P", (3_000, 3_000)), "GIF"), 413, "more than 1,000,000 pixels"
    yield "one pixel row too many", encoded(Image.new("L", (1000, 1001))), 413, "1000x1001"
    yield (
        "a bomb of text",
        lambda: raw_png(1, 1, bytes(4), extra=chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(9 << 20)))),
        400,
        "a PNG whose texts are too long",
    )
    yield "a JPEG of 5,000 scans", _scans(5000), 400, "scans"
    yield "too many bytes", png(400, 400), 413, "more than 200,000"


_THIN = {"one row", "one column"}  # the processor of Qwen's models refuses such shapes
CASES = [
    *(
        Case(name, data, 400 if name in _THIN else 200, seen, "aspect ratio" if name in _THIN else "")
        for name, data, seen in _good()
    ),
    *(Case(name, data, status, problem=words) for name, data, status, words in _bad()),
    Case("not base64", "@@@@", 400, problem="not base64"),
    Case("empty", "", 400, problem="empty"),
    Case("white space", " \n ", 400, problem="empty"),
    Case("base64 in lines", "\n".join(b64(png(9, 9))[i : i + 20] for i in range(0, 600, 20)), 200, seen="9x9 PNG"),
    Case("base64 for URLs", b64(png(9, 9)).replace("+", "-").replace("/", "_").rstrip("="), 200, seen="9x9 PNG"),
]
