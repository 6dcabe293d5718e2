"""JSON text to Python values, with bounds that are checked before anything is built.

`json.loads` holds the interpreter's lock from its first to its last byte: no other thread answers meanwhile. How long
that is depends on what the body holds. 64 MB of text take 0.2 s, 64 MB of ``{},`` four seconds. So the structure is
counted first, in pieces between which others run.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from start_llm.core.errors import BadRequest, TooLarge
from start_llm.core.limits import DEPTH, ESCAPES, KEYS, VALUES

CHUNK = 1 << 20
LARGE = 1 << 18
INNER_VALUES = 100_000
"""Of JSON text in a string. The body's limits do not see it, and it is read several times on its way to the model."""
_IN_TURN = threading.RLock()
_OPEN, _CLOSE, _QUOTE = 1, 2, 3
_COMMA, _COLON = 4, 5
_KINDS = bytes.maketrans(b'[{]}",:', bytes([_OPEN, _OPEN, _CLOSE, _CLOSE, _QUOTE, _COMMA, _COLON]))
_OTHERS = bytes(byte for byte in range(256) if byte not in b'[{]}",:')
_HALF = re.compile("[\ud800-\udfff]")
_STEPS = np.array([0, 1, -1, 0, 0, 0], dtype=np.int32)


def in_turn(raw: bytes) -> AbstractContextManager[Any]:
    """Large bodies are read and checked one after the other. Threads that each want the interpreter's lock for so long
    take turns among themselves, and nobody else has one; and a body makes many times its bytes of objects."""
    return _IN_TURN if len(raw) > LARGE else nullcontext()


def parse_json(raw: bytes) -> Any:
    """The value of a body. Raises BadRequest, TooLarge."""
    if not raw.strip():
        raise BadRequest("The request has no body; a JSON object is needed.")
    try:
        with in_turn(raw):
            check_structure(raw)
            value = _DECODER.decode(raw.decode().removeprefix("\ufeff"))
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise _invalid(f"it is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _invalid(str(error)) from None
    except ValueError as error:
        problem = "a number has too many digits" if "digits" in str(error) else str(error)
        raise _invalid(problem) from None
    # Clients that cut strings by UTF-16 units send half an emoji; no tokenizer takes that.
    return whole_characters(value) if b"\\ud" in raw or b"\\uD" in raw else value


def parse_object(raw: bytes) -> dict[str, Any]:
    """The object that a body must be. Raises BadRequest, TooLarge."""
    value = parse_json(raw)
    if isinstance(value, dict):
        return value
    kind = {list: "a list", str: "a string", type(None): "null"}.get(type(value), type(value).__name__)
    raise BadRequest(f"The body must be a JSON object, not {kind}.")


def parse_inner(text: str) -> Any:
    """The value of JSON text that stands in a string. Raises ValueError, also where it is too much to read."""
    if too_much_to_read(text):
        raise ValueError("it is nested too deeply, or holds too many values")
    try:
        return whole_characters(_DECODER.decode(text))
    except RecursionError as error:
        raise ValueError(str(error)) from None


def inner_object(text: str) -> dict[str, Any] | None:
    """As `parse_inner`; ``None`` where it is no object."""
    try:
        value = parse_inner(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def object_in(arguments: str) -> dict[str, Any]:
    """A call's arguments; what is no object stands in one, as it is."""
    found = inner_object(arguments or "{}")
    return {"arguments": arguments} if found is None else found


def too_much_to_read(text: str) -> bool:
    """Whether JSON text inside of a string is nested so deeply, or holds so many values, that it is not to be read.

    Quick for text that has few commas and brackets.
    """
    opened = text.count("[") + text.count("{")
    if opened <= DEPTH.most and opened + text.count(",") < INNER_VALUES:
        return False
    try:
        check_structure(text.encode("utf-8", "surrogatepass"), most_values=INNER_VALUES)
    except (BadRequest, TooLarge):
        return True
    return False


def check_structure(raw: bytes, most_values: int | None = None) -> None:
    """Counts what stands outside of strings.

    Broken JSON may pass: the parser says what is wrong with it. Raises BadRequest: it is nested too deeply; TooLarge:
    it holds too many values, names or escapes.
    """
    values, keys, escapes, depth, inside, start = 1, 0, 0, 0, False, 0
    while start < len(raw):
        end = _chunk_end(raw, start)
        kinds, inside, slashes = _outside(raw[start:end], inside)
        start = end
        escapes += slashes
        keys += int(np.count_nonzero(kinds == _COLON))
        values += int(np.count_nonzero((kinds == _COMMA) | (kinds == _OPEN)))
        depths = np.cumsum(_STEPS[kinds])
        if len(depths):
            if depth + int(depths.max()) > DEPTH.most:
                raise _too_deep()
            depth += int(depths[-1])
        for limit, most, found in (
            (VALUES, most_values or VALUES.most, values),
            (KEYS, KEYS.most, keys),
            (ESCAPES, ESCAPES.most, escapes),
        ):
            if found > most:
                raise TooLarge(f"The body is too large: at most {limit.most:,} {limit.what}.", code="body_too_large")


def _chunk_end(raw: bytes, start: int) -> int:
    """Where a chunk ends: never between a backslash and what it escapes."""
    end = min(start + CHUNK, len(raw))
    run = end
    while run > start and raw[run - 1] == 0x5C:
        run -= 1
    return min(end + (end - run) % 2, len(raw))


def _outside(chunk: bytes, inside: bool) -> tuple[np.ndarray[Any, Any], bool, int]:
    """(the kinds of the structural characters outside of strings, whether a string is open at the end, backslashes)."""
    slashes = chunk.count(b"\\")
    if slashes:
        chunk = chunk.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    kinds = np.frombuffer(chunk.translate(_KINDS, _OTHERS), dtype=np.uint8)
    quotes = kinds == _QUOTE
    quoted = np.logical_xor.accumulate(quotes) ^ inside
    ends_inside = bool(quoted[-1]) if len(quoted) else inside
    return kinds[~quoted & ~quotes], ends_inside, slashes


def whole_characters(value: Any) -> Any:
    """A JSON value without halves of surrogate pairs, which become U+FFFD. (Reading JSON has joined whole pairs.)"""
    if isinstance(value, str):
        return "".join(_HALF.sub("\ufffd", value[at : at + CHUNK]) for at in range(0, len(value), CHUNK))
    if isinstance(value, list):
        return [whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {whole_characters(key): whole_characters(item) for key, item in value.items()}
    return value


def finite(text: str) -> float:
    """A number of JSON text. Raises ValueError: it is too large, and would be written as Infinity."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def nearest(text: str) -> float:
    """A number of JSON text; the nearest one that a float holds if it is too large."""
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _invalid(problem: str) -> BadRequest:
    return BadRequest(f"The body is not valid JSON: {problem}.", code="invalid_json")


def _too_deep() -> BadRequest:
    return BadRequest(f"The body is nested too deeply: at most {DEPTH.most} lists and objects inside each other.")


sys.set_int_max_str_digits(sys.int_info.str_digits_check_threshold)  # a number's time grows with their square
_DECODER = json.JSONDecoder(parse_constant=no_constant, parse_float=finite)
