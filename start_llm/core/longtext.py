"""JSON text that holds strings of many megabytes, decoded a piece at a time.

`json` decodes a string in one go and holds the interpreter's lock: 40 MB stop every other thread for 0.2 s. So the
inner parts of such strings are taken out, decoded one by one, and put back where a mark stands for them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

_ESCAPE = 6  # bytes: \u00e9
_U = ord("u")
_NEARBY = 1 << 12  # bytes: where escapes stand so close, the text is left where it is
_BLOCK = 1 << 16  # bytes that are copied at a time


def decode(raw: bytes, inner: Sequence[tuple[int, int]], decoder: json.JSONDecoder) -> Any:
    """The value of JSON text.

    Args:
        inner: (start, end) of bytes that lie within one string each, in order; a backslash is never the last of them
            without what it escapes.

    Raises:
        UnicodeDecodeError, json.JSONDecodeError: positions are those in a piece, where something was taken out.
        ValueError, RecursionError: as the decoder does.
    """
    mark = secrets.token_hex(16)  # nobody can have written it
    rest, done, whole = bytearray(), 0, 0
    pieces: list[str] = []
    for start, end in inner:
        start = _whole_from(raw, start, end, whole)
        end = _whole_until(raw, start, end)
        if start == end:
            continue
        whole = end
        rest += raw[done:start]
        rest += f"{mark}{len(pieces)}.".encode()
        pieces.append(decoder.decode(f'"{raw[start:end].decode()}"'))
        done = end
    rest += raw[done:]
    value = decoder.decode(rest.decode().removeprefix("\ufeff"))
    return _filled(value, mark, re.compile(mark + r"(\d+)\."), pieces) if pieces else value


def _whole_from(raw: bytes, start: int, end: int, whole: int) -> int:
    """The first place from `start` on that cuts no character and no escape; `end` if there is none nearby.

    `whole`: a place before it of which that is known.
    """
    for place in range(start, min(start + _NEARBY, end)):
        if _is_whole(raw, place, whole):
            return place
    return end


def _whole_until(raw: bytes, start: int, end: int) -> int:
    """The last place up to `end` that does; `start` if there is none nearby."""
    for place in range(end, max(end - _NEARBY, start), -1):
        if _is_whole(raw, place, start):
            return place
    return start


def _is_whole(raw: bytes, place: int, whole: int) -> bool:
    """Whether a cut before `place` leaves characters and escapes as they are. Two escapes that are one character may be
    parted: their halves are joined with all others that clients part."""
    if raw[place] & 0xC0 == 0x80:
        return False
    last = raw.rfind(b"\\", max(whole, place - _ESCAPE), place)
    if last < 0:
        return True
    is_escaped = _run(raw, whole, last + 1) % 2 == 0
    return is_escaped or last + (_ESCAPE if raw[last + 1] == _U else 2) <= place


def _run(raw: bytes, start: int, end: int) -> int:
    """How many backslashes end before `end`, one behind the other, none of them before `start`."""
    place = end
    while place > start:
        block = raw[max(start, place - _BLOCK) : place]
        rest = block.rstrip(b"\\")
        place -= len(block) - len(rest)
        if rest:
            break
    return end - place


def _filled(value: Any, mark: str, marked: re.Pattern[str], pieces: Sequence[str]) -> Any:
    """`value` with pieces in place of their marks."""
    if isinstance(value, str):
        if mark not in value:
            return value
        parts = marked.split(value)  # text, number, text, number, ...
        parts[1::2] = [pieces[int(number)] for number in parts[1::2]]
        return "".join(parts)
    if isinstance(value, list):
        return [_filled(item, mark, marked, pieces) for item in value]
    if isinstance(value, dict):
        return {_filled(key, mark, marked, pieces): _filled(item, mark, marked, pieces) for key, item in value.items()}
    return value
