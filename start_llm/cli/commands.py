"""Every command, as `commands.toml` lists them. Standard library only, so that help and refusals come at once."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from start_llm.clients import CLIENTS
from start_llm.core.paths import expanded

Flag = dict[str, Any]
"""Names, and arguments of `argparse.ArgumentParser.add_argument`."""
SETTING_FLAGS = (
    *("model_path", "mlx_host", "mlx_port", "proxy_port", "proxy"),
    *("max_kv_size", "hosts", "log_level", "log_json"),
)
"""Names of options that are settings: they win over the environment and `.env`."""


@dataclass(frozen=True)
class Command:
    """One word after the program's name."""

    name: str
    what: str  # one line for the list of commands
    place: str  # ``module:function`` that runs it, as ``function(settings, options)``; imported only then
    group: str = ""  # the heading under which help lists it; without one it is for this program itself
    flags: tuple[Flag, ...] = ()  # its flags and arguments
    examples: tuple[tuple[str, str], ...] = ()  # what follows the program's name, and what it does
    joins: bool = False  # is for a server that runs: the one that there is, where no port is named
    in_home: bool = False  # runs in the folder of `.env` and logs, not in the caller's
    more: str = ""  # what help says besides
    tail: bool = False  # takes words behind ``--`` that are not ours (``options.arguments``)
    begins: str = ""  # what is said at once, before what takes its time; ``{agent}``: the one that is launched

    def first_words(self, options: argparse.Namespace) -> str:
        """What is said on standard error; empty where only the outcome matters (in a script)."""
        if getattr(options, "print", False) or (self.name == "chat" and not sys.stderr.isatty()):
            return ""
        return self.begins.format(agent=CLIENTS[options.client].title) if "{agent}" in self.begins else self.begins


def _model(name: str) -> str:
    """A folder is meant from where the caller stands."""
    folder = expanded(name)
    return str(folder.resolve()) if folder.exists() else name


def context_word(text: str) -> str:
    """``32k`` are 32,768 tokens, as others write it."""
    number, unit = text[:-1], text[-1:].lower()
    return str(int(number) * 1024) if unit == "k" and number.isdigit() else text


_TYPES: dict[str, Callable[[str], Any]] = {"model": _model, "context": context_word, "whole": int, "json": json.loads}


def _flag(flag: Flag) -> Flag:
    """As argparse takes it."""
    if flag.get("choices") == "agents":
        flag["choices"] = list(CLIENTS)
    if "choices" in flag:
        flag.setdefault("help", ", ".join(flag["choices"]))
    return flag | ({"type": _TYPES[flag["type"]]} if "type" in flag else {})


def _commands(file: dict[str, Any]) -> Iterator[Command]:
    shared = {name: _flag({"names": [f"--{name}"], **flag}) for name, flag in file["flags"].items()}
    for command in file["commands"]:
        flags: list[Flag] = []
        for flag in command.pop("flags", ()):
            used = flag if isinstance(flag, str) else flag.get("use")
            flags += [_flag(flag)] if used is None else [shared[name] for name in file["sets"].get(used, [used])]
        examples = tuple((words, "".join(what)) for words, *what in command.pop("examples", ()))
        yield Command(flags=tuple(flags), examples=examples, **command)


COMMANDS = {
    command.name: command
    for command in _commands(tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8")))
}
SHOWN = {name: command for name, command in COMMANDS.items() if command.group}
"""Those that a user types, group by group."""
