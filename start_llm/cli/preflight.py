"""What can be refused before anything heavy is imported: in one sentence, with the next command."""

from __future__ import annotations

import argparse
import errno
import os

from start_llm.api.http.listener import check_bind
from start_llm.cli.commands import Command
from start_llm.core.errors import NotSupported
from start_llm.core.settings import Settings, SettingsError
from start_llm.host.home import command as program
from start_llm.host.home import home
from start_llm.host.ports import bind_error, free_port, served_model, server_state, who_listens
from start_llm.models.checkpoint import CheckpointError, check_source
from start_llm.models.family import chosen_family
from start_llm.models.recommended import SHORT_NAMES
from start_llm.prompt.clients import Clients, RuleError

_ASK_SECONDS = 0.4
LOADS = frozenset({"serve", "start", "restart", "launch", "chat", "demo"})


class PreflightError(Exception):
    """The command cannot do its work as it stands; the message is one sentence that says what to do."""


def check(command: Command, settings: Settings, options: argparse.Namespace) -> None:
    """Raises Refused."""
    if command.name in LOADS or getattr(options, "what", None) == "install":
        check_server(settings)
    if command.name == "serve" and not options.supervised:
        check_port(settings)


def check_server(settings: Settings) -> None:
    """Everything about a server that can be known now, but for its port. Raises Refused."""
    try:
        check_bind(settings)
        rules = settings.cache_rules_file
        Clients.load(rules and home() / rules.expanduser())
        if settings.model_path is not None:
            trust = settings.trust_remote_code
            check_source(settings.model_path, command=program(), trust_code=trust, known=SHORT_NAMES)
        if settings.model_family is not None:
            chosen_family(settings.model_family)
    except (SettingsError, RuleError, CheckpointError, NotSupported) as error:
        raise PreflightError(str(error)) from None
    if settings.kv_quant_scheme == "turboquant":
        raise PreflightError(
            "KV_QUANT_SCHEME=turboquant: mlx-lm's text models cannot compute with it; set KV_QUANT_SCHEME=uniform."
        )
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
    raise PreflightError(f"START_LLM_CACHE_DIR={settings.cache_dir}: {folder} {problem}; name another place.")


def check_port(settings: Settings) -> None:
    """Raises Refused if the server's port cannot be had, saying who has it."""
    host, port = settings.mlx_host, settings.mlx_port
    if port == 0:
        return
    try:
        error: Exception | None = bind_error(host, port)
    except (OSError, UnicodeError) as wrong:
        error = wrong
    if error is None:
        return
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        raise PreflightError(taken(settings))
    if isinstance(error, OSError) and error.errno == errno.EACCES:
        raise PreflightError(f"MLX_PORT={port}: this user may not listen there; take a port from 1024 on: --port 8080.")
    raise PreflightError(f"MLX_HOST={host!r} is no address of this machine ({error}); 127.0.0.1 is the usual one.")


def taken(settings: Settings) -> str:
    """Who has the server's port, and what to do."""
    host, port = settings.mlx_host, settings.mlx_port
    other = f"{program()} serve --port {free_port()}"
    if server_state(host, port, _ASK_SECONDS) is not None:
        model = served_model(host, port, settings.api_key, _ASK_SECONDS)
        what = f"start_llm serves {model} there" if model else "a start_llm server is there"
        return f"MLX_PORT={port} is in use: {what}; join it with `{program()} launch pi`, or take another: `{other}`."
    return f"MLX_PORT={port} is in use by {who_listens(port)}; take another: `{other}`."
