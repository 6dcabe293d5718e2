"""Words of the command line to a command and its options; help, and refusals in one sentence. Standard library only."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import start_llm
from start_llm.cli.commands import COMMANDS, SETTING_FLAGS, SHOWN, Command
from start_llm.clients import CLIENTS
from start_llm.host.home import BEGIN
from start_llm.host.home import command as program

HELP = {"-h", "--help"}
_ELSEWHERE = {"get": "pull", "setup": "recommend", "create": "models", "up": "start", "down": "stop"}
_OLLAMA = {"list": ("models",), "ls": ("models",), "show": ("models", "show"), "run": ("chat",)}
"""Words of Ollama's users, and what they mean here."""


class UsageError(Exception):
    """The words make no command. The message is one sentence that ends with what to type instead."""


class HelpRequested(Exception):
    """Help or the version was asked for: the message is that."""


@dataclass(frozen=True)
class ParsedCommand:
    """A command with its options; ``options.overrides`` are settings that were given as flags."""

    command: Command
    options: argparse.Namespace


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as a `UsageError`."""

    def __init__(self, command: Command) -> None:
        super().__init__(
            f"{program()} {command.name}",
            description=f"{command.what[:1].upper()}{command.what[1:]}.",
            epilog="\n".join(_lines(command.examples, "examples:") + (["", command.more] if command.more else [])),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self._command = command
        self.add_argument("-h", "--help", action="store_true", help="show this")
        for flag in command.flags:
            self.add_argument(*flag["names"], **{name: value for name, value in flag.items() if name != "names"})

    def error(self, message: str) -> NoReturn:
        name = self._command.name
        choice = re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            allowed = choice[3].replace("'", "")
            what = {"AGENT": "agent", "install|uninstall": "action"}.get(choice[1], choice[1].lower())
            message = f"there is no {what} {choice[2]!r}; {_near(choice[2], allowed.split(', '))}allowed: {allowed}"
        elif number := re.match(r"argument (\S+): invalid int value: (.*)", message):
            message = f"{number[1].split('/')[0]} {number[2]}: it must be a whole number"
        else:
            message = message.replace("the following arguments are required:", "missing:")
        raise UsageError(f"{name}: {message} (see: `{program()} help {name}`)")


def read(words: Sequence[str]) -> ParsedCommand:
    """The command that is meant: flags alone are for ``serve``. Raises UsageError, HelpRequested."""
    words = list(words)
    if words and words[0] in {"-V", "--version", "version"}:
        raise HelpRequested(f"{program()} {start_llm.__version__} (Python {sys.version.split()[0]})")
    if words and words[0] in {"help", *HELP}:
        return _help(words[1:])
    if not words:
        return _options(COMMANDS["begin"], words)
    if words[0].startswith("-"):
        return _options(COMMANDS["serve"], words)
    words = translated(words)
    if words[0] not in COMMANDS:
        raise UsageError(_no_command(words[0], [*SHOWN, "help"]))
    return _options(COMMANDS[words[0]], words[1:])


def translated(words: list[str]) -> list[str]:
    """What Ollama's words mean here: ``run MODEL TEXT`` names the model first; others are commands by another name."""
    rest = words[1:]
    if words[:1] == ["run"] and rest and not rest[0].startswith("-"):
        rest = ["--model", *rest]
    return [*_OLLAMA.get(words[0], words[:1]), *rest] if words else words


def _options(command: Command, words: list[str]) -> ParsedCommand:
    parser = _Parser(command)
    cut = words.index("--") if command.tail and "--" in words else len(words)
    before, tail = words[:cut], words[cut + 1 :]
    if HELP & set(before):
        raise HelpRequested(parser.format_help().rstrip())
    options, unknown = parser.parse_known_args(before)
    if unknown:
        raise UsageError(_unknown(parser, command, options, unknown))
    options.arguments = tail
    positional = vars(options).pop("model", None)
    if positional is not None:
        if options.model_path not in (None, positional):
            raise UsageError(f"{command.name}: two models, {positional} and {options.model_path}; name one")
        options.model_path = positional
    given = {name: getattr(options, name, None) for name in SETTING_FLAGS}
    options.overrides = {name: value for name, value in given.items() if value is not None}
    return ParsedCommand(command, options)


def _unknown(parser: _Parser, command: Command, options: argparse.Namespace, unknown: list[str]) -> str:
    word = unknown[0]
    kind = "flag" if word.startswith("-") else "argument"
    if command.tail and getattr(options, "client", None):
        title = CLIENTS[options.client].title
        return (
            f"{command.name}: {word} is no {kind} of {command.name}; what is meant for {title} goes behind --: "
            f"{program()} {command.name} {options.client} -- {shlex.join(unknown)}"
        )
    near = _near(word.partition("=")[0], list(parser._option_string_actions)) if kind == "flag" else ""
    return f"{command.name}: there is no {kind} {word}; {near}see: `{program()} help {command.name}`"


def _no_command(word: str, allowed: list[str]) -> str:
    near = _near(word, allowed).strip()
    return f"There is no command {word!r}{'; ' if near else ''}{near} (all commands: `{program()} help`)"


def _near(word: str, allowed: list[str]) -> str:
    """``did you mean serve? `` if something allowed is like `word`, or means what another server calls so."""
    found = [_ELSEWHERE[word]] if _ELSEWHERE.get(word) in allowed else difflib.get_close_matches(word, allowed, 1, 0.7)
    return f"did you mean {found[0]}? " if found else ""


# --- help -----------------------------------------------------------------------------------


def _help(words: list[str]) -> NoReturn:
    if not words or words[0] in {"help", *HELP}:
        raise HelpRequested(overview())
    name = _OLLAMA.get(words[0], words)[0]
    if name not in COMMANDS:
        raise UsageError(_no_command(name, list(SHOWN)))
    raise HelpRequested(_Parser(COMMANDS[name]).format_help().rstrip())


def overview() -> str:
    """How to begin, and all commands in their groups."""
    width = max(map(len, SHOWN)) + 2
    lines = [
        f"start_llm {start_llm.__version__}: a local LLM server for coding agents. A turn costs what is new in it.",
        "",
        f"usage: {program()} COMMAND [flags]",
        f"       {program()} help COMMAND   tells more of one",
    ]
    lines += ["", *_lines(BEGIN, "Begin with:")]
    for group in dict.fromkeys(command.group for command in SHOWN.values()):
        lines += ["", f"{group}:", *(f"  {c.name:{width}}{c.what}" for c in SHOWN.values() if c.group == group)]
    return "\n".join(lines)


def _lines(examples: Sequence[tuple[str, str]], heading: str) -> list[str]:
    if not examples:
        return []
    typed = [(f"  {program()} {words}", what) for words, what in examples]
    width = max(len(words) for words, _ in typed) + 3
    apart = "\n     " if width > 64 else ""  # a clone's command is long
    return [heading, *(f"{words:{0 if apart else width}}{apart} {what}".rstrip() for words, what in typed)]
