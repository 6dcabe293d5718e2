"""What an assistant turn's own edits make of a file: SEARCH/REPLACE blocks, and whole files between fences.

The format is that of aider's edit formats ``diff``, ``diff-fenced`` and ``whole`` (aider/coders/editblock_coder.py and
wholefile_coder.py). It serves to know a change again that the model made itself; one that cannot be followed here is
told in full.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from start_llm.prompt.textdiff import split_files

_SEARCH = re.compile(r"<{5,9} SEARCH>?\s*")
_DIVIDER = re.compile(r"={5,9}\s*")
_REPLACE = re.compile(r">{5,9} REPLACE\s*")
_LINES_ABOVE = 3
_AROUND_NAME = "#*`: \t"


@dataclass(frozen=True, slots=True)
class Edit:
    """A SEARCH/REPLACE block. `above`: words of the lines before it; one of them is the file's name, or none."""

    above: tuple[str, ...]
    search: tuple[str, ...]
    replace: tuple[str, ...]


def edits_in(answer: str) -> Iterator[Edit]:
    """The complete blocks of an answer, in order."""
    above: list[str] = []
    search: list[str] | None = None
    replace: list[str] | None = None
    for line in answer.split("\n"):
        if _SEARCH.fullmatch(line):
            search, replace = [], None
        elif search is None:
            above = [*above, line.strip().strip(_AROUND_NAME)][-_LINES_ABOVE:]
        elif replace is None and _DIVIDER.fullmatch(line):
            replace = []
        elif replace is not None and _REPLACE.fullmatch(line):
            yield Edit(tuple(word for word in above if word), tuple(search), tuple(replace))
            above, search, replace = [], None, None
        else:
            (search if replace is None else replace).append(line)


def after_edits(name: str, text: str | None, answers: Iterable[str]) -> str | None:
    """The file `name` after the edits in `answers`, in order; None if there is none, before or after.

    An edit whose text is not there does nothing, as in the client.
    """
    for answer in answers:
        edits, files = _read(answer)
        text = files.get(name, text)
        ours = False
        for edit in edits:
            # A block right behind another one is for the same file.
            ours = name in edit.above if edit.above else ours
            if ours:
                text = _edited(text, edit)
    return text


@lru_cache(maxsize=2048)
def _read(answer: str) -> tuple[tuple[Edit, ...], dict[str, str]]:
    """The edits of an answer; if it has none, the files in it."""
    edits = tuple(edits_in(answer))
    files = {} if edits else split_files(answer)[1]
    return edits, {file.name.strip(_AROUND_NAME): file.text for file in files.values()}


def makes_edits(answer: str) -> bool:
    """An answer after which files may be others."""
    return any(_read(answer))


def _edited(text: str | None, edit: Edit) -> str | None:
    if not "".join(edit.search).strip():
        # A new file, or lines at the end of one.
        return "\n".join([*([text] if text else []), *edit.replace])
    whole = _lines(text.split("\n") if text else [])
    search = _lines(edit.search)
    return whole.replace(search, _lines(edit.replace), 1)[1:-1] if search in whole else text


def _lines(lines: Iterable[str]) -> str:
    """Every line with a line break on both sides."""
    return "\n" + "".join(f"{line}\n" for line in lines)
