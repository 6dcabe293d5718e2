"""The command `completion`: a script for the user's shell, made from the table of commands."""

from __future__ import annotations

import argparse

from start_llm.cli.commands import SHOWN, Command
from start_llm.core.settings import Settings
from start_llm.host.home import NAME

BASH = """# completion of {name} for bash
_{ident}() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; else
    case "$command" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [ "${{#COMPREPLY[@]}}" -gt 0 ] || COMPREPLY=($(compgen -o default -- "$word"))
}}
complete -F _{ident} {name}
"""
ZSH = """#compdef {name}
# completion of {name} for zsh
_{ident}() {{
  local -a commands
  commands=(
{described}
  )
  if (( CURRENT == 2 )); then _describe command commands; return; fi
  case "$words[2]" in
{cases}
  esac
}}
if [ "$funcstack[1]" = "_{ident}" ]; then _{ident} "$@"; else compdef _{ident} {name}; fi
"""


def main(settings: Settings, options: argparse.Namespace) -> int:
    """Prints the script of one shell."""
    print(script(options.shell), end="")
    return 0


def script(shell: str) -> str:
    """`shell`: bash, zsh or fish."""
    if shell == "fish":
        return _fish()
    names = [*SHOWN, "help"]
    ident = NAME.replace("-", "_")
    if shell == "bash":
        cases = [f'      {c.name}) words="{" ".join(words_of(c))}";;' for c in SHOWN.values()]
        cases.append(f'      help) words="{" ".join(SHOWN)}";;')
        return BASH.format(name=NAME, ident=ident, commands=" ".join(names), cases="\n".join(cases))
    described = "\n".join(f"    '{c.name}:{c.what.replace(chr(39), '')}'" for c in SHOWN.values())
    cases = [f"    {c.name}) compadd -- {' '.join(words_of(c))}; _files;;" for c in SHOWN.values()]
    cases.append(f"    help) compadd -- {' '.join(SHOWN)};;")
    return ZSH.format(name=NAME, ident=ident, described=described, cases="\n".join(cases))


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
