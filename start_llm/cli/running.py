"""Runs a command that was typed: reads the settings, refuses what can be refused in one sentence, then imports what it
needs.
"""

from __future__ import annotations

import argparse
import errno
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from start_llm.api.http.listener import check_bind
from start_llm.cli.commands import Command
from start_llm.cli.reading import ParsedCommand
from start_llm.core.errors import ExitCode, Explained
from start_llm.core.paths import expanded
from start_llm.core.settings import Settings, SettingsError, load_settings, stored_values
from start_llm.dashboard.process_log import json_line
from start_llm.dashboard.tables import words_only
from start_llm.host.blas import begin_again
from start_llm.host.home import command as program
from start_llm.host.home import home, made_home
from start_llm.host.ports import address, bind_error, free_port, model_cards, server_state, who_listens
from start_llm.models.checkpoint import check_source
from start_llm.models.family import chosen_family
from start_llm.models.recommended import SHORT_NAMES, full_name
from start_llm.prompt.clients import Clients, RuleError
from start_llm.service.place import port_of_one

log = logging.getLogger(__name__)

_ASK_SECONDS = 0.4
_NAMED = frozenset({"audit", "bench", "chat", "launch"})  # commands that say who speaks
_NEEDS_NONE = frozenset({"doctor", "status", "stop"})  # they tell which servers run, or what the machine is
LOADS = frozenset({"serve", "start", "restart", "launch", "chat", "demo", "bench"})
COMPUTES = frozenset({"serve", "demo", "doctor", "bench"})
"""Commands in whose process, or in children of it, MLX computes."""


def run(typed: ParsedCommand, *, own_process: bool = False) -> int:
    """The command's exit code; 2 for a bad flag, setting, path or port.

    Args:
        own_process: this process does nothing else, so that it may be started anew.
    """
    folder = _here()
    # transformers warns of what is no fault here (no PyTorch), and advises it, which nothing here needs
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        if typed.command.in_home:
            os.chdir(made_home())
        settings = load_settings(home() / ".env", **typed.options.overrides)
        if (meant := full_name(settings.model_path, settings.cache_dir.absolute() / "models")) != settings.model_path:
            settings = settings.model_copy(update={"model_path": meant})
        if typed.command.joins:
            one = typed.command.name not in _NEEDS_NONE
            port = port_of_one(settings, typed.options.overrides, must_be_one=one)
            settings = settings.model_copy(update={"mlx_port": port})
        check(typed.command, settings, typed.options)
    except (Explained, RuleError) as error:
        return _refuse(str(error), typed)
    except OSError as error:
        return _refuse(f"START_LLM_HOME={home()} cannot be used: {error}; name another folder.", typed)
    if own_process and folder is not None and typed.command.name in COMPUTES:
        begin_again(folder)
    if own_process and typed.command.name in COMPUTES - {"serve"}:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: their folders go with them
    return called(_imported(typed.command.place), typed, settings)


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return None


def called(command: Callable[..., int], typed: ParsedCommand, settings: Settings) -> int:
    """The command's exit code. Why it could not be done is printed."""
    name = typed.command.name
    try:
        return int(command(settings, typed.options))
    except BrokenPipeError:
        raise
    except Explained as error:
        print(words_only(f"{name}: {error}" if name in _NAMED else f"{error}"), file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a disk that is full, a folder that is a file: no fault of the program's
        log.debug("%s failed", name, exc_info=True)
        print(words_only(f"{name}: {error}"), file=sys.stderr)
        return ExitCode.NOT_STARTED


def _imported(place: str) -> Callable[..., int]:
    module, _, function = place.partition(":")
    # What imports make stays: looking for garbage in it is an eighth of the work of a start, and some 80 ms in each
    # full collection later, inside whichever request sets it off. Frozen here, before a model is loaded: what a model
    # leaves is found only where it is not frozen.
    gc.disable()
    try:
        command: Callable[..., int] = getattr(import_module(module), function)
    finally:
        gc.freeze()
        gc.enable()
    return command


def _refuse(message: str, typed: ParsedCommand) -> int:
    # A variable as it stands: the settings as a whole cannot be read.
    raw = os.environ.get("LOG_JSON", "")
    with suppress(SettingsError):
        raw = raw or stored_values(home() / ".env").get("LOG_JSON") or ""
    as_json = typed.command.in_home and raw.strip().lower() in {"1", "true", "t", "yes", "y", "on"}
    print(json_line(message, level="error") if as_json else words_only(message), file=sys.stderr)
    return ExitCode.BAD_SETTING


# --- what is refused before anything heavy is imported ------------------------------------------


def check(command: Command, settings: Settings, options: argparse.Namespace) -> None:
    """Raises Explained, RuleError."""
    if command.name in LOADS or getattr(options, "what", None) == "install":
        check_server(settings)
    if command.name == "serve" and not options.supervised:
        check_port(settings)


def check_server(settings: Settings) -> None:
    """Everything about a server that can be known now, but for its port. Raises Explained, RuleError."""
    check_bind(settings)
    rules = settings.cache_rules_file
    Clients.load(rules and home() / expanded(rules))
    if settings.model_path is not None:
        check_source(settings.model_path, command=program(), trust_code=settings.trust_remote_code, known=SHORT_NAMES)
    if settings.model_family is not None:
        chosen_family(settings.model_family)
    _check_writable(settings)


def _check_writable(settings: Settings) -> None:
    folder = settings.cache_dir.absolute() / "run"  # where locks are made
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        problem = "is no folder"
    elif not os.access(folder, os.W_OK):
        problem = "cannot be written"
    else:
        return
    raise SettingsError(f"START_LLM_CACHE_DIR={settings.cache_dir}: {folder} {problem}; name another place.")


def check_port(settings: Settings) -> None:
    """Raises SettingsError if the server's port cannot be had, saying who has it."""
    host, port = settings.mlx_host, settings.mlx_port
    error = bind_error(host, port) if port else None
    if error is None:
        return
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        other = f"{program()} serve --port {free_port()}"
        if server_state(host, port, _ASK_SECONDS) is None:
            raise SettingsError(f"MLX_PORT={port} is in use by {who_listens(port)}; take another: `{other}`.")
        cards = model_cards(address(host, port), settings.api_key, _ASK_SECONDS)
        what = f"start_llm serves {cards[0].get('id')} there" if cards else "a start_llm server is there"
        raise SettingsError(
            f"MLX_PORT={port} is in use: {what}; join it with `{program()} launch pi`, or take another: `{other}`."
        )
    if isinstance(error, OSError) and error.errno == errno.EACCES:
        raise SettingsError(f"MLX_PORT={port}: this user may not listen there; take a port from 1024 on: --port 8080.")
    raise SettingsError(f"MLX_HOST={host!r} is no address of this machine ({error}); 127.0.0.1 is the usual one.")
