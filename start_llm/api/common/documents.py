"""The text of PDF files that stand in messages. A child process with limits reads them (`audio.decoder`)."""

from __future__ import annotations

import base64
import binascii
import hashlib
from contextvars import ContextVar
from functools import cache
from typing import Any

from start_llm.audio.decoder import Decoder, NotDecoded
from start_llm.core.errors import BadRequest
from start_llm.files.lru import Lru

INSTEAD = "send its text, or its pages as images"
MOST_BYTES = 32 << 20
SECONDS = 60.0
"""What the files of one request may take together, so that others wait no longer for theirs."""
KEPT_CHARS = 8_000_000  # of texts that are kept: a client sends a file again in each turn
_HEAD = "data:application/pdf;base64,"


_left: ContextVar[float] = ContextVar("seconds left for the files of this request", default=SECONDS)


def begin_request() -> None:
    """What this thread reads from here on belongs to another request."""
    _left.set(SECONDS)


@cache
def _reader() -> tuple[Decoder, Lru[bytes, str]]:
    """One child for all files, started by the first; it ends with this process."""
    return Decoder(), Lru(KEPT_CHARS, lambda _, text: len(text))


def pdf_data(value: Any) -> str | None:
    """The base64 of a PDF's data URL; ``None``: it is something else."""
    return value[len(_HEAD) :] if isinstance(value, str) and value[: len(_HEAD)].lower() == _HEAD else None


def pdf_text(data: str, name: Any, path: str) -> str:
    """What the model is shown of a file: its name, and the text of each page. The same for the same file.

    `data`: in base64. Raises BadRequest: it holds no text that can be read, and what can be sent in its place.
    """
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise _refused(path, "it is no base64") from None
    if b"%PDF-" not in raw[:1024]:
        raise _refused(path, "it does not begin as one")
    if len(raw) > MOST_BYTES:
        raise _refused(path, f"it has {len(raw):,} bytes, and {MOST_BYTES:,} are read at most")
    decoder, kept = _reader()
    digest = hashlib.sha256(raw).digest()
    text = kept.get(digest)
    if text is None:
        if _left.get() <= 0:
            raise _refused(path, f"the files before it took over {SECONDS:.0f} seconds")
        try:
            text, taken = decoder.text(raw, _left.get())
        except NotDecoded as error:
            raise _refused(path, str(error)) from None
        _left.set(_left.get() - taken)
        kept.put(digest, text)
    shown = " ".join(name.split())[:200] if isinstance(name, str) and name.strip() else "document.pdf"
    return f"[File {shown}]\n{text}\n[End of {shown}]"


def _refused(path: str, why: str) -> BadRequest:
    return BadRequest(
        f"{path}: this PDF cannot be shown: {why}. In its place {INSTEAD}.", param=path, code="invalid_file"
    )
