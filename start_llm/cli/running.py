"""Runs a command that was typed: reads the settings, refuses what can be refused, then imports what it needs."""

from __future__ import annotations

import gc
import logging
import os
import sys
from importlib import import_module

from dotenv import dotenv_values

from start_llm.cli.preflight import PreflightError, check
from start_llm.cli.reading import Typed
from start_llm.core.errors import ExitCode
from start_llm.core.settings import Settings, SettingsError, load_settings
from start_llm.dashboard.process_log import json_line
from start_llm.host.blas import begin_again
from start_llm.host.home import home, made_home
from start_llm.host.importing import import_transformers
from start_llm.models.recommended import full_name

log = logging.getLogger(__name__)


COMPUTES = frozenset({"serve", "demo", "doctor"})
"""Commands in whose process, or in children of it, MLX computes."""


def run(typed: Typed, *, own_process: bool = False) -> int:
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
        if (repository := full_name(settings.model_path)) != settings.model_path:
            settings = settings.model_copy(update={"model_path": repository})
        check(typed.command, settings, typed.options)
    except (SettingsError, PreflightError) as error:
        return _refuse(str(error), typed)
    except OSError as error:
        return _refuse(f"START_LLM_HOME={home()} cannot be used: {error}; name another folder.", typed)
    if own_process and folder is not None and typed.command.name in COMPUTES:
        begin_again(folder)
    try:
        return _start(typed, settings)
    except BrokenPipeError:
        raise
    except OSError as error:  # a disk that is full, a folder that is a file: no fault of the program's
        log.debug("%s failed", typed.command.name, exc_info=True)
        print(f"{typed.command.name}: {error}", file=sys.stderr)
        return ExitCode.NOT_STARTED


def _here() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return None


def _start(typed: Typed, settings: Settings) -> int:
    module, _, function = typed.command.place.partition(":")
    # What imports make stays: looking for garbage in it is an eighth of the work of a start, and some 80 ms in each
    # full collection later, inside whichever request sets it off. Frozen here, before a model is loaded: what a model
    # leaves is found only where it is not frozen.
    gc.disable()
    try:
        if typed.command.name in COMPUTES:
            import_transformers()
        command = getattr(import_module(module), function)
    finally:
        gc.freeze()
        gc.enable()
    return int(command(settings, typed.options))


def _refuse(message: str, typed: Typed) -> int:
    as_json = typed.command.in_home and _truth(_raw_setting("LOG_JSON"))
    print(json_line(message, level="error") if as_json else message, file=sys.stderr)
    return ExitCode.BAD_SETTING


def _raw_setting(name: str) -> str:
    """A variable as it stands, for when the settings as a whole cannot be read."""
    return os.environ.get(name) or dotenv_values(home() / ".env").get(name) or ""


def _truth(word: str) -> bool:
    return word.strip().lower() in {"1", "true", "t", "yes", "y", "on"}
