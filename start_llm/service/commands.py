"""The commands `start`, `stop`, `restart`, `status`, `ps` and `logs`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import psutil

from start_llm.core.paths import expanded
from start_llm.core.settings import Settings, load_settings
from start_llm.core.sizes import as_size
from start_llm.dashboard.tables import print_table, words_only
from start_llm.files.logs import last_lines
from start_llm.host.awake import CHILDREN
from start_llm.host.hints import hint
from start_llm.host.home import BEGIN, home
from start_llm.host.home import command as program
from start_llm.host.mac import read_mac, remarks
from start_llm.host.ports import ask_json, free_port, model_cards
from start_llm.host.processes import running
from start_llm.models.device import LEAST_FREE, free_disk, inspect_device, likely_accelerator
from start_llm.models.servers import running_ports
from start_llm.service.control import Follower, NotRunning, ServiceError, bring_up, family, stop
from start_llm.service.place import Place, ServerState
from start_llm.service.supervisor import how

_FOLLOW_SECONDS = 0.2
_ASK_SECONDS = 2.0
_NEXT = (("launch pi", "an agent in the folder of your project"), ("status", "how it does"), ("stop", "ends it"))


def main_start(settings: Settings, options: argparse.Namespace) -> int:
    """0 once the server answers. Raises ServiceError: it does not come up."""
    place = Place(settings, settings.mlx_port or free_port())
    was_running = place.is_running
    place.keep()
    try:
        begun = bring_up(settings, place, options.overrides, partial(print, flush=True))
    except ServiceError:
        if not was_running:
            place.forget_keep()
        raise
    place.keep()  # also where a launch began it in the same moment
    state = place.read()
    proxy = f", proxy {state.proxy_url}" if state is not None and state.proxy_url else ""
    server = place.url if state is None else f"{state.model or 'a model'} at {place.url}{proxy}"
    print(f"{'ready' if begun else 'already running'}: {server}")
    print(f"page      {place.url}\nlog       {place.log}\nsettings  {_env_file()}")
    for words, what in _NEXT:
        print(f"{hint(words, place.port)}    {what}")
    return 0


def _env_file() -> str:
    path = home() / ".env"
    return str(path) if path.exists() else f"{path} (not there yet)"


def main_stop(settings: Settings, options: argparse.Namespace) -> int:
    """0 if nothing of ours is left there."""
    ports = running_ports(settings) if options.all else [settings.mlx_port]
    if not ports:
        print("No server of this user runs.")
    return max([_stop(settings, port) for port in ports], default=0)


def _stop(settings: Settings, port: int) -> int:
    place = Place(settings, port)
    try:
        if place.is_running:
            print(f"stopping the server on port {port} ...", flush=True)
        if stop(place):
            print("stopped")
            return 0
    except ServiceError as error:
        print(error, file=sys.stderr)
        return 1
    others = running_ports(settings)
    more = f" Running: {'    '.join(hint('stop', other) for other in others)}" if others else ""
    print(f"No server of this user runs on port {port}.{more}")
    return 0


def main_restart(settings: Settings, options: argparse.Namespace) -> int:
    """Starts with the flags of the last start, but for those that are given now."""
    place = Place(settings)
    before = place.read()
    if code := _stop(settings, place.port):
        return code
    flags = {**(before.flags if before is not None else {}), **options.overrides}
    flags["mlx_port"] = str(place.port)
    return main_start(load_settings(home() / ".env", **flags), argparse.Namespace(overrides=flags))


# --- status ---------------------------------------------------------------------------------


def main_status(settings: Settings, options: argparse.Namespace) -> int:
    """0 if the server answers, 1 if it runs but does not answer yet, 3 if it does not run."""
    place = Place(settings)
    known = look(place, settings.api_key) | machine(settings)
    if options.json:
        print(json.dumps(known, indent=1))
    else:
        print(words_only("\n".join(_status_lines(place, known))))  # whoever listens there has said some of it
    if known["state"] in {"ready", "busy"}:
        return 0
    return 1 if known["running"] else NotRunning.exit_code


def look(place: Place, key: str | None) -> dict[str, Any]:
    """What can be known of a server: its state on disk, /health, /metrics, its processes."""
    running, state = place.is_running, place.read()
    answer = ask_json(f"{place.url}/health", seconds=_ASK_SECONDS)[1]
    health = answer if isinstance(answer, dict) else {}
    known: dict[str, Any] = {
        "port": place.port,
        "url": place.url,
        "running": running or bool(health),
        "managed": running,
        "state": health.get("state") or _phase(state, running=running),
        "detail": health.get("detail", ""),
        "requests": {"running": health.get("running", 0), "queued": health.get("queued", 0)},
        "log": str(place.log),
    }
    if state is not None:
        fields = asdict(state)
        names = ("pid", "since", "model", "proxy_url", "restarts", "last_exit", "background")
        known |= {name: fields[name] for name in names} | {"users": place.users()}
        members = _members(state) if running else []
        known["memory_bytes"] = sum(size for _, size in members)
        known["awake"] = any(name in CHILDREN for name, _ in members)
    if health:
        models = _loaded_models(place, key)
        known |= {"models": models, "model": models[0]["id"] if models else ""}
    return known


def machine(settings: Settings) -> dict[str, Any]:
    """What this machine is and has left (`machine`), and what is to be done about it (`notes`). Reads only."""
    device = inspect_device(likely_accelerator)
    here, free = free_disk(home() / (settings.disk_dir or settings.cache_dir))
    told = list(remarks(read_mac(), device.chip)) if device.system == "macOS" else [(True, device.system)]
    if free <= LEAST_FREE:
        told.append(
            (False, f"stored KV may not fit under {here}: delete models (`{program()} rm`), or set KV_DISK_DIR")
        )
    about = ", ".join([device.chip, *(line for well, line in told if well)])
    left = psutil.virtual_memory().available
    room = f"{as_size(left)} of {as_size(device.memory)} of memory and {as_size(free)} of disk are free"
    return {"machine": f"{about}; {room}", "notes": [line for well, line in told if not well]}


def _phase(state: ServerState | None, *, running: bool) -> str:
    """What is known of a server that does not say it itself."""
    if state is None:
        return "not running"
    return state.phase if running or state.phase == "gave up" else "died"


def _loaded_models(place: Place, key: str | None) -> list[dict[str, Any]]:
    cards = ((card, card.get("details", {})) for card in model_cards(place.url, key, _ASK_SECONDS) or ())
    return [
        {
            "id": card.get("id"),
            "context": card.get("context_length"),
            "state": details.get("state", "ready"),
            "weight_bytes": details.get("weight_bytes", 0),
            "kv_bytes": details.get("kv_bytes", 0),
        }
        for card, details in cards
        if details.get("state") not in {"stored", "failed"}
    ]


def _members(state: ServerState) -> list[tuple[str, int]]:
    """(name, bytes in memory) of the server's processes."""
    process, found = running(state.pid, state.created), []
    for member in family(process) if process is not None else ():
        with suppress(psutil.Error):
            found.append((member.name(), member.memory_info().rss))
    return found


def _status_lines(place: Place, known: dict[str, Any]) -> Iterator[str]:
    if not known["running"]:
        yield from _ended_lines(place, known)
        return
    where = "in the background" if known.get("background") else "in the foreground"
    of_ours = f"process {known['pid']}, {where}, {ago(known['since'])}" if known["managed"] else ""
    requests = known["requests"]
    users = f", {known['users']} connected by launch" if known.get("users") else ""
    lines = [
        (known["state"], f"{known['url']}  ({of_ours or 'not one that `start` knows'})"),
        *(("model", f"{each['id']}  (context {each['context'] or 0:,} tokens)") for each in known.get("models", ())),
        ("proxy", known.get("proxy_url")),
        ("requests", f"{requests['running']} running, {requests['queued']} waiting{users}"),
        ("now", known["detail"]),
        ("memory", as_size(size) if (size := known.get("memory_bytes")) else ""),
        ("machine", known["machine"]),
        *(("note", line) for line in known["notes"]),
        ("awake", known.get("awake") and "the machine does not go to sleep meanwhile (KEEP_AWAKE=off lets it)"),
        ("restarts", _restarts(known)),
        ("log", known.get("background") and known["log"]),
        ("settings", _env_file()),
    ]
    yield from (f"{label:12} {text}" for label, text in lines if text)


def _restarts(known: dict[str, Any]) -> str:
    last = known.get("last_exit")
    if not last or not known["restarts"]:
        return ""
    return f"{known['restarts']}; the last because {how(last['code'])}, {ago(last['time'])} ago"


def _ended_lines(place: Place, known: dict[str, Any]) -> Iterator[str]:
    yield f"not running  port {place.port}; {hint('start', place.port)}"
    if others := [port for port in running_ports(place.settings) if port != place.port]:
        yield f"running      {'    '.join(hint('status', port) for port in others)}"
    last = known.get("last_exit")
    if known["state"] == "gave up" and last:
        yield f"why          gave up after {known['restarts']} restarts: {how(last['code'])}"
    elif known["state"] == "died":
        yield "why          it ended without a word: killed, or the machine went down"
    if last and last["words"]:
        yield from (f"             {line}" for line in last["words"].splitlines())
    if "last_exit" in known:
        yield f"log          {known['log']}"


def ago(moment: float) -> str:
    """The time since then, in the largest unit that fits."""
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def main_begin(settings: Settings, options: argparse.Namespace) -> int:
    """What is running, or how to begin. Fetches and starts nothing."""
    if ports := running_ports(settings):
        options.json = False
        main_ps(settings, options)
        print(f"{hint('launch pi', ports[0] if len(ports) > 1 else None)}    an agent")
        print(f"{program()} help    all commands")
        return 0
    print(f"No server runs. To begin (all commands: `{program()} help`):")
    for words, what in BEGIN:
        print(f"  {program()} {words:12}    {what}")
    return 0


# --- ps and logs ----------------------------------------------------------------------------


def main_ps(settings: Settings, options: argparse.Namespace) -> int:
    """A line for each server of this user, and below it one for each further model that it has loaded."""
    found = [look(Place(settings, port), settings.api_key) for port in running_ports(settings)]
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    if not found:
        print(f"No server of this user runs. {program()} start")
        return 0
    headings = ("PORT", "MODEL", "STATE", "WEIGHTS", "KV", "REQUESTS", "WAITING", "AGENTS", "MEMORY", "UP")
    print_table(headings, (row for known in found for row in _rows(known)), words=("MODEL", "STATE"))
    return 0


def _rows(known: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """What counts for all of the server stands in the first one."""
    counts = (known["requests"]["running"], known["requests"]["queued"], known.get("users", 0))
    memory, up = as_size(known.get("memory_bytes", 0)), ago(known.get("since", time.time()))
    port, state, of_all = str(known["port"]), known["state"], (*map(str, counts), memory, up)
    for model in known.get("models") or [{"id": known.get("model") or "-"}]:
        sizes = (as_size(model.get(name, 0)) for name in ("weight_bytes", "kv_bytes"))
        yield port, model["id"], state or model["state"], *sizes, *of_all
        port, state, of_all = "", "", ("",) * len(of_all)


def main_logs(settings: Settings, options: argparse.Namespace) -> int:
    """The last lines of the server's log, and with -f what comes after them until Ctrl-C."""
    place = Place(settings)
    path = home() / expanded(settings.log_root) / "proxy.log" if options.proxy_log else place.log
    if not path.is_file():
        raise ServiceError(f"There is no log {path}; a server in the foreground writes to its terminal.")
    print(words_only(last_lines(path, options.lines)))
    follower = Follower(path, partial(print, flush=True), path.stat().st_size)
    while options.follow:
        time.sleep(_FOLLOW_SECONDS)
        follower.look()
    return 0
