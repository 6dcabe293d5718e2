"""A file of stored KV. It describes itself: nothing else has to be read to know which tokens its arrays belong to.

    header   what `_HEADER` lists: where the piece stands in the tree, sizes, and the checksum of layout and arrays
    checksum SHA-256 of header and tokens
    tokens   of a run, int32 little endian; none in a checkpoint
    layout   JSON, see `LayerKit.pack`
    arrays   safetensors

Header and tokens have a checksum of their own, so a start reads them alone (about 9 kB a file) and can trust them.
The metadata of safetensors would be no place for them: it is JSON text without a checksum, behind the library's mmap.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
from dataclasses import dataclass
from typing import BinaryIO

SUFFIX = ".kv"

_MAGIC = b"sllmKV\x00\x03"  # the last byte is the version: other versions are not read
# magic, model, digest, name of the file above, start, tokens, seconds a token, bytes of layout, of arrays, SHA-256
_HEADER = struct.Struct("<8s32s32s96sQQdQQ32s")
_CHECKSUM = 32
_TOKEN = 4  # bytes
FILE_NAME = re.compile(r"[rc][0-9]{1,12}-[0-9a-f]{64}\.kv")
"""Names that this program could have given a file of stored KV."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """What a file holds: the rows of a run of tokens, or (without tokens) a checkpoint."""

    digest: bytes  # `PathHash` of all tokens up to its end
    above: str  # name of the file with the token before `start`, which may go on behind it; ``""`` for none
    start: int  # offset of the first token; of a checkpoint: tokens before it
    tokens: bytes = b""  # int32, little endian
    seconds: float = 0.0  # measured cost of computing one token

    @property
    def name(self) -> str:
        return f"{'r' if self.tokens else 'c'}{self.start}-{self.digest.hex()}{SUFFIX}"

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // _TOKEN


def encode(piece: StoredPiece, model: bytes, layout: str, arrays: bytes) -> list[bytes]:
    """The parts of the file. `model`: 32 bytes that name what the KV depends on."""
    text = layout.encode()
    body = hashlib.sha256(text)
    body.update(arrays)
    header = _HEADER.pack(
        *(_MAGIC, model, piece.digest, piece.above.encode(), piece.start, len(piece.tokens) // _TOKEN),
        *(piece.seconds, len(text), len(arrays), body.digest()),
    )
    return [header, hashlib.sha256(header + piece.tokens).digest(), piece.tokens, text, arrays]


def read_head(stream: BinaryIO, name: str, model: bytes) -> tuple[StoredPiece, int, bytes]:
    """What the file holds, the bytes of its layout, and the checksum of its layout and arrays. `model`: see `encode`.
    Raises ValueError: this is not what was written under this name for this model."""
    about = os.fstat(stream.fileno())
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("not a file")
    header, checksum = stream.read(_HEADER.size), stream.read(_CHECKSUM)
    if len(checksum) != _CHECKSUM or not header.startswith(_MAGIC):
        raise ValueError("no file of stored KV, or of another version")
    _, of_model, digest, above, start, count, seconds, layout_bytes, array_bytes, sha256 = _HEADER.unpack(header)
    size = _HEADER.size + _CHECKSUM + count * _TOKEN + layout_bytes + array_bytes
    if size != about.st_size:
        raise ValueError(f"{about.st_size} bytes, not {size}")
    tokens = stream.read(count * _TOKEN)
    if hashlib.sha256(header + tokens).digest() != checksum:
        raise ValueError("wrong checksum of its header")
    piece = StoredPiece(digest, above.rstrip(b"\0").decode(), start, tokens, seconds)
    if piece.name != name or of_model != model:
        raise ValueError("another file's content")
    return piece, layout_bytes, sha256


def read_body(stream: BinaryIO, layout_bytes: int, sha256: bytes) -> tuple[str, bytes]:
    """(layout, arrays), from where `read_head` has left the stream. Raises ValueError: not what was written."""
    layout, arrays = stream.read(layout_bytes), stream.read()
    body = hashlib.sha256(layout)
    body.update(arrays)
    if body.digest() != sha256:
        raise ValueError("wrong checksum")
    return layout.decode(), arrays
