"""The commands ``models load``, ``models unload`` and ``models pin``, for a running server."""

from __future__ import annotations

import argparse
import difflib
import json
import shlex
import sys
import time
from concurrent.futures import Future, wait
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from start_llm.core.errors import WrongWords
from start_llm.core.paths import expanded
from start_llm.core.settings import Settings
from start_llm.core.sizes import as_size
from start_llm.dashboard.progress import ProgressLines
from start_llm.dashboard.terminal import LiveRows
from start_llm.host.hints import hint
from start_llm.host.home import command as program
from start_llm.host.home import home
from start_llm.host.ports import ask_json, server_state
from start_llm.models.background import Progress, on_thread
from start_llm.models.recommended import full_name
from start_llm.models.servers import Card, running_ports, server_cards
from start_llm.service.control import NotRunning, ServiceError
from start_llm.service.place import Place

_CHANGE_SECONDS = 3600.0  # the server gives up earlier
_LOOK_SECONDS = 0.5
_PATHS = ("/", "~", "./", "../")
_DOING = {"load": "loading", "unload": "unloading", "pin": "pinning"}


def change(settings: Settings, options: argparse.Namespace) -> int:
    """Loads, unloads or pins a model of the running server. Raises ServiceError, WrongWords, NotRunning."""
    what, name = options.what, options.name
    if not name:
        raise WrongWords(f"models {what}: NAME is missing; `{program()} models` lists them")
    place = Place(settings)
    if server_state(place.host, place.port) is None:
        raise NotRunning(_no_server(settings, what, name))
    meant = str(expanded(name).resolve()) if name.startswith(_PATHS) else name
    body: dict[str, Any] = {"model": meant} | ({"pinned": not options.off} if what == "pin" else {})
    began, doing = time.monotonic(), f"{_DOING[what]} {name}"
    asked = on_thread(partial(ask_json, f"{place.url}/v1/models/{what}", settings.api_key, _CHANGE_SECONDS, body), what)
    with closing(LiveRows(Console(stderr=True))) as rows:  # it may take minutes
        _follow(settings, asked, doing, ProgressLines(partial(print, file=sys.stderr, flush=True), rows))
    status, answer = asked.result()
    if status != 200 or not isinstance(answer, dict):
        raise ServiceError(_refusal(settings, name, status, answer))
    print(json.dumps(answer, indent=1) if options.json else _done(what, answer, time.monotonic() - began))
    return 0


def _follow(settings: Settings, asked: Future[Any], doing: str, show: Progress) -> None:
    """Shows which step of a loading the server is in, until it has answered."""
    show(doing, 0.0)
    step = doing
    while not wait([asked], _LOOK_SECONDS).done:
        details = (card["details"] for card in server_cards(settings) or ())
        for now in (each["loading"] for each in details if "loading" in each):
            if step not in {doing, now["step"]}:
                show(step, 1.0)
            step = now["step"]
            show(step, now["part"])


def _no_server(settings: Settings, what: str, name: str) -> str:
    here = f"No server answers on port {settings.mlx_port}."
    if others := running_ports(settings):
        return f"{here} Running: {'    '.join(hint(f'models {what} {name}', port) for port in others)}"
    if what == "unload":
        return f"{here} Nothing is loaded there."
    return f"{here} `{hint(f'start {name}', settings.mlx_port)}` starts one with that model."


def _refusal(settings: Settings, name: str, status: int, answer: Any) -> str:
    """Why it could not be done, and what to do."""
    if status == 0:
        return f"The server has stopped answering. `{hint('status', settings.mlx_port)}` tells how it is."
    error = answer.get("error") if isinstance(answer, dict) else None
    reason = error.get("message") if isinstance(error, dict) else None
    sentence = str(reason or f"The server answered with status {status}.")
    if status == 404:
        return f"{sentence}{_near(settings, name)}"
    if status == 507:
        return f"{sentence} `{program()} models unload NAME` makes room."
    return sentence


def _near(settings: Settings, name: str) -> str:
    names = {str(card["id"]).lower(): str(card["id"]) for card in server_cards(settings) or ()}
    found = difflib.get_close_matches(name.rpartition("/")[2].lower(), names, 3, 0.6)
    if found and not name.startswith(_PATHS):
        return f" Did you mean {' or '.join(names[near] for near in found)}?"
    if name.startswith(_PATHS):
        return _linked(settings, expanded(name).resolve())
    return f" `{program()} pull {name}` fetches it." if "/" in (full_name(name) or name) else ""


def _linked(settings: Settings, folder: Path) -> str:
    """How a folder becomes a model of this server."""
    if not (folder / "config.json").is_file():
        return f" {folder} is no model: there is no config.json in it."
    place = (home() / settings.cache_dir / "models").resolve()
    link = shlex.join(["ln", "-s", str(folder), f"{place}/"])
    load = hint(f"models load {shlex.quote(folder.name)}", settings.mlx_port)
    return f" A link in {place} makes a folder a model of it:\n  {link}\n  {load}"


def _done(what: str, card: Card, seconds: float) -> str:
    name, details = card.get("id"), card.get("details", {})
    state = details.get("state")
    if what == "load":
        weights, context = as_size(details.get("weight_bytes", 0)), card.get("context_length", 0)
        return f"{name} is loaded: {weights} of weights, context {context:,} tokens, {seconds:.1f} s"
    if what == "unload":
        return f"{name} is still being unloaded." if state == "unloading" else f"{name} is not loaded any more."
    if not details.get("pinned"):
        return f"{name} is not pinned: it may go when another model needs its memory."
    more = "" if state == "ready" else f" It is not loaded; {program()} models load {name}"
    return f"{name} is pinned: once it is loaded, it stays.{more}"
