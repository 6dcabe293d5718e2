"""A conversation in the terminal: what is typed, the commands that begin with ``/``, and answers as Markdown."""

from __future__ import annotations

import base64
import json
import mimetypes
import re
import readline
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from start_llm.clients.agent import Endpoint
from start_llm.core.paths import expanded
from start_llm.dashboard.tables import words_only
from start_llm.files.atomic import write_atomic
from start_llm.host.ports import model_cards

MOST_TYPED = 1000
_ASK_SECONDS = 5.0
_FENCE = re.compile(r"^[ \t]*(`{3,}+(?![^\n]*`)|~{3,}+)", re.MULTILINE)
_CODE = re.compile(_FENCE.pattern + r".*?^[ \t]*\1[`~]*[ \t]*$", re.MULTILINE | re.DOTALL)

Message = dict[str, Any]


class CommandError(ValueError):
    """A command cannot be done. The message is a sentence."""


def image_part(file: str) -> dict[str, Any]:
    """A part of a message. Raises CommandError."""
    path = expanded(file)
    kind = mimetypes.guess_type(path.name)[0] or ""
    if not kind.startswith("image/"):
        raise CommandError(f"{file!r} is not named like an image; give a .png, .jpg, .webp or .gif.")
    try:
        data = base64.b64encode(path.read_bytes()).decode("ascii")
    except OSError as error:
        raise CommandError(f"{file!r} cannot be read: {error.strerror}.") from None
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def user_message(text: str, images: list[dict[str, Any]]) -> Message:
    return {"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}


@dataclass
class Conversation:
    """What was said so far, and what the next message brings along."""

    endpoint: Endpoint
    console: Console
    messages: list[Message] = field(default_factory=list)
    system: str = ""
    images: list[dict[str, Any]] = field(default_factory=list)

    @property
    def sent(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def add(self, text: str) -> None:
        self.messages.append(user_message(text, self.images))
        self.images = []

    def command(self, typed: str) -> bool:
        """Does what a line that begins with ``/`` says; False: that was the end. Raises CommandError."""
        word, _, rest = typed.partition(" ")
        if word in {"/exit", "/quit"}:
            return False
        done = COMMANDS.get(word)
        if done is None:
            raise CommandError(f"There is no command {word}; /help lists them.")
        self.say(done[1](self, rest.strip()))
        return True

    def say(self, text: str) -> None:
        self.console.print(words_only(text), style="dim", markup=False)

    def _help(self, rest: str) -> str:
        return "\n".join(f"{f'{name} {what[0]}'.strip():20}{what[2]}" for name, what in COMMANDS.items())

    def _clear(self, rest: str) -> str:
        self.messages, self.images = [], []
        return "Forgotten. The system text stays." if self.system else "Forgotten."

    def _model(self, rest: str) -> str:
        cards = model_cards(self.endpoint.url, self.endpoint.key, _ASK_SECONDS) or []
        names = [str(card.get("id")) for card in cards]
        if rest and rest not in names:
            raise CommandError(f"There is no model {rest!r}; there are {', '.join(names) or 'none'}.")
        self.endpoint = replace(self.endpoint, model=rest or self.endpoint.model)
        return f"{self.endpoint.model} answers." + ("" if rest else f" There are: {', '.join(names)}")

    def _system(self, rest: str) -> str:
        self.system = rest
        return "This is the system text from now on." if rest else "No system text."

    def _image(self, rest: str) -> str:
        try:
            files = shlex.split(rest)
        except ValueError as error:
            raise CommandError(f"{rest!r} cannot be read: {error}; put a backslash before a quote.") from None
        self.images += [image_part(file) for file in files or [""]]
        return f"The next message shows {len(self.images)} image{'s' if len(self.images) > 1 else ''}."

    def _save(self, rest: str) -> str:
        if not rest:
            raise CommandError("/save needs a file's name.")
        path = expanded(rest)
        try:
            text = json.dumps({"model": self.endpoint.model, "messages": self.sent}, ensure_ascii=False, indent=1)
            write_atomic(path, text)
        except OSError as error:
            raise CommandError(f"{rest!r} cannot be written: {error.strerror}.") from None
        return f"{path} has {len(self.sent)} messages."


COMMANDS: dict[str, tuple[str, Callable[[Conversation, str], str], str]] = {
    "/help": ("", Conversation._help, "this list"),
    "/clear": ("", Conversation._clear, "forgets what was said"),
    "/model": ("[NAME]", Conversation._model, "who answers, or another one"),
    "/system": ("[TEXT]", Conversation._system, "the system text; without a text: none"),
    "/image": ("FILE ...", Conversation._image, "images for the next message"),
    "/save": ("FILE", Conversation._save, "writes the conversation as JSON"),
    "/exit": ("", Conversation._help, "ends it, as Ctrl-D does"),
}
"""By name: what follows it, what does it, and what it is for."""


class MarkdownPrinter:
    """Prints an answer as it comes, a block at a time: paragraphs, lists and whole blocks of code."""

    def __init__(self, console: Console) -> None:
        self._console, self._text = console, ""
        self._thinks = self._began = False

    def think(self, text: str) -> None:
        """Prints reasoning, which is no Markdown."""
        if self._text:
            self.end()
        self._thinks = True
        self._console.print(text, style="dim", end="", markup=False, soft_wrap=True)

    def add(self, text: str) -> None:
        self._text += text
        end = self._text.rfind("\n\n") + 2
        goes_on = not self._text[end : end + 1].strip()  # what is indented may belong to a list's item
        if end > 1 and not goes_on and not _FENCE.search(_CODE.sub("", self._text[:end])):  # it is in no block of code
            self.end(end)

    def end(self, at: int | None = None) -> None:
        if self._thinks:
            self._console.print()
            self._thinks = False
        if self._text[:at].strip():
            shown = Markdown(self._text[:at])
            for part in (part for token in shown.parsed for part in token.children or ()):
                part.content = words_only(part.content)  # ``<http://x/%1b>`` is shown decoded
            if self._began:
                self._console.print()
            self._began = True
            self._console.print(shown)
        self._text = "" if at is None else self._text[at:]


@contextmanager
def typed_before(file: Path) -> Iterator[None]:
    """The lines that were typed in earlier conversations can be had by the arrow keys; those of this one are added."""
    with suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(MOST_TYPED)
    try:
        yield
    finally:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)
