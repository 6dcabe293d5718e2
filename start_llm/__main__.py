"""Command line: ``python -m start_llm [serve|demo|doctor|launch] [flags]``. Flags win over environment and `.env`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from start_llm.core.settings import Settings, SettingsError, load_settings
from start_llm.dashboard.jsonlines import json_line

ROOT = Path(__file__).resolve().parent.parent

# A command's module is imported only when it runs: what one command needs (MLX, say) does not slow down the others.
COMMANDS = {
    "serve": ("start_llm.serve", "run the server and the LiteLLM proxy in front of it (default)"),
    "demo": ("start_llm.demo", "start both on free ports, run a short agent conversation, print what each turn cost"),
    "doctor": ("start_llm.doctor", "say what this machine has and what is missing"),
    "launch": ("start_llm.launch", "run an agent connected to the server; see: launch --help"),
}


INTERRUPTED = 130  # what shells say of a process that Ctrl-C ended


def main(arguments: Sequence[str]) -> int:
    """Runs one command. The exit code: 2 for a bad flag or setting, else the command's own."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of what is no fault here: no PyTorch
    try:
        if arguments and arguments[0] == "launch":  # the rest is its own, down to the agent's flags
            return _run("launch", list(arguments[1:]), {})
        parsed = vars(_parser().parse_args(_with_command(arguments)))
        command = parsed.pop("command")
        return _run(command, [], {name: value for name, value in parsed.items() if value is not None})
    except KeyboardInterrupt:  # before the command has its own answer to it, mostly while it is imported
        return INTERRUPTED


def _run(command: str, arguments: list[str], overrides: dict[str, Any]) -> int:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises PyTorch, which nothing here needs
    if command != "launch":  # an agent works in the caller's folder; `.env` and logs are the server's
        os.chdir(ROOT)
    try:
        settings = load_settings(ROOT / ".env", **overrides)
    except SettingsError as error:
        as_json = command != "launch" and _truth(_raw_setting("LOG_JSON"))
        print(json_line(str(error), level="error") if as_json else error, file=sys.stderr)
        return 2
    return _start(command, arguments, settings)


def _start(command: str, arguments: list[str], settings: Settings) -> int:
    module = import_module(COMMANDS[command][0])
    if command == "serve":
        return int(module.main_serve(settings))
    if command == "launch":
        return int(module.main(arguments, settings))
    return int(module.main(settings))


def _raw_setting(name: str) -> str:
    """A variable as it stands, for when the settings as a whole cannot be read."""
    return os.environ.get(name) or dotenv_values(ROOT / ".env").get(name) or ""


def _truth(word: str) -> bool:
    return word.strip().lower() in {"1", "true", "t", "yes", "y", "on"}


def _with_command(arguments: Sequence[str]) -> list[str]:
    if arguments and (arguments[0] in COMMANDS or arguments[0] in {"-h", "--help"}):
        return list(arguments)
    return ["serve", *arguments] if not arguments or arguments[0].startswith("-") else list(arguments)


def _parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(add_help=False)
    flags.add_argument("--model", dest="model_path", type=_model, help="repository or folder (MODEL_PATH)")
    flags.add_argument("--host", dest="mlx_host", help="address of the server (MLX_HOST)")
    flags.add_argument("--port", dest="mlx_port", help="port of the server, 0 for a free one (MLX_PORT)")
    flags.add_argument("--proxy-port", help="port of the proxy, 0 for a free one (PROXY_PORT)")
    flags.add_argument("--no-proxy", dest="proxy", action="store_const", const="off", help="no proxy (PROXY=off)")
    parser = argparse.ArgumentParser("start_llm", epilog="Every setting is a variable, too: see .env.example.")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (_, what) in COMMANDS.items():
        commands.add_parser(name, help=what, description=what, parents=[flags])
    return parser


def _model(name: str) -> str:
    """A folder is meant from where the caller stands."""
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.exists() else name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
