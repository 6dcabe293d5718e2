"""The free text of a custom tool's call, out of the JSON object that the model writes around it."""

from __future__ import annotations

import json
import re
from typing import Any

from start_llm.core.jsontext import too_much_to_read

HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Whole characters: an escape, or half of a surrogate pair, waits for its rest.
WHOLE = re.compile(
    r'(?:[^"\\]++|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"
)


class InputText:
    """Reads ``{"input": "..."}`` piece by piece; the pieces of text that come out make up what `finish` completes."""

    def __init__(self) -> None:
        self._pending = ""
        self._inside = False
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def feed(self, piece: str) -> str:
        """The next text, as far as it is certain."""
        self._pending += piece
        if not self._inside:
            head = HEAD.match(self._pending)
            if head is None:
                return ""
            self._inside = True
            self._pending = self._pending[head.end() :]
        whole = WHOLE.match(self._pending)
        if whole is None:
            return ""
        self._pending = self._pending[whole.end() :]
        text: str = json.loads(f'"{whole[0]}"', strict=False)
        self._parts.append(text)
        return text

    def finish(self, arguments: str) -> str:
        """What `feed` still owed, given all of the arguments."""
        known, whole = self.text, _whole(arguments)
        missing = whole[len(known) :] if whole.startswith(known) else ""
        self._parts.append(missing)
        return missing


def input_of(arguments: str) -> str:
    """The free text of a call; arguments of another shape are passed on as they are."""
    reader = InputText()
    reader.feed(arguments)
    reader.finish(arguments)
    return reader.text


def _whole(arguments: str) -> str:
    try:
        if too_much_to_read(arguments):
            return arguments
        value: Any = json.loads(arguments, strict=False, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else value
    return text if isinstance(text, str) else arguments
