"""The command `completion`: a script for the user's shell, made from the table of commands."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from start_llm.cli.commands import SHOWN, Command
from start_llm.core.settings import Settings
from start_llm.host.home import NAME


def main(settings: Settings, options: argparse.Namespace) -> int:
    """Prints the script of one shell."""
    print(script(options.shell), end="")
    return 0


def script(shell: str) -> str:
    """`shell`: bash, zsh or fish."""
    if shell == "fish":
        return _fish()
    following = {command.name: words_of(command) for command in SHOWN.values()} | {"help": list(SHOWN)}
    if shell == "bash":
        cases = [f'      {name}) words="{" ".join(words)}";;' for name, words in following.items()]
    else:
        cases = [f"    {name}) compadd -- {' '.join(words)}; _files;;" for name, words in following.items()]
    filled = {
        "NAME": NAME,
        "IDENT": NAME.replace("-", "_"),
        "COMMANDS": " ".join(following),
        "CASES": "\n".join(cases),
        "DESCRIBED": "\n".join(f"    '{c.name}:{c.what.replace(chr(39), '')}'" for c in SHOWN.values()),
    }
    text = Path(__file__).with_name(f"completion.{shell}").read_text("utf-8")
    return re.sub("@([A-Z]+)@", lambda found: filled[found[1]], text)


def _fish() -> str:
    lines = [f"# completion of {NAME} for fish", f"complete -c {NAME} -f"]
    for command in SHOWN.values():
        what = command.what.replace("'", "")
        lines.append(f"complete -c {NAME} -n __fish_use_subcommand -a {command.name} -d '{what}'")
        seen = f"-n '__fish_seen_subcommand_from {command.name}'"
        for word in words_of(command):
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c {NAME} {seen} {kind}")
    return "\n".join(lines) + "\n"


def words_of(command: Command) -> list[str]:
    """What may follow a command: its choices and its long flags."""
    parser = argparse.ArgumentParser(add_help=False)
    command.add_flags(parser)
    words: list[str] = []
    for action in parser._actions:
        words += [str(choice) for choice in action.choices or ()]
        words += [name for name in action.option_strings if name.startswith("--")]
    return [*words, "--help"]
