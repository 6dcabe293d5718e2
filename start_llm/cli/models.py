"""The commands `models`, with its table, `pull`, `rm` and `recommend`."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from start_llm.cli.loaded import Card, card_of, change, server_cards, state_of
from start_llm.core.errors import ExitCode, NotSupported
from start_llm.core.modelmap import ADAPTER_SIGN
from start_llm.core.settings import Settings
from start_llm.dashboard.progress import ProgressBars
from start_llm.dashboard.tables import print_table
from start_llm.host.home import command as program
from start_llm.host.home import home
from start_llm.host.ports import served_model
from start_llm.models.adapter import AdapterFolder, StoredAdapter
from start_llm.models.capabilities import read_capabilities
from start_llm.models.catalog import EMBEDDED_NAME, StoredModel, folder_of, hub_folder, stored_models
from start_llm.models.checkpoint import is_path
from start_llm.models.device import GIB, Accelerator, inspect_device
from start_llm.models.fingerprint import fingerprint
from start_llm.models.probe_table import FILE, probe_key, read_probe
from start_llm.models.pull import PullError, fetch_lock, pull
from start_llm.models.recommended import (
    SHORT_NAMES,
    SOURCE,
    Recommendation,
    bandwidth,
    full_name,
    recommend,
    tokens_per_second,
)
from start_llm.service.place import running_ports

GB = 1e9
_COLUMNS = ("NAME", "SIZE", "CONTEXT", "STATE", "KV", "CAN")
_OF_A_SERVER = ("STATE", "KV")


def main_models(settings: Settings, options: argparse.Namespace) -> int:
    """What is on this disk, and what of it a server has loaded; or what is known of one; or a change of one."""
    if options.off and options.what != "pin":
        print(f"models: --off belongs to pin: {program()} models pin NAME --off", file=sys.stderr)
        return ExitCode.BAD_SETTING
    if options.what == "show":
        return show(settings, options.name, as_json=options.json)
    if options.what is not None:
        return change(settings, options)
    found = list(stored_models(home() / settings.cache_dir, settings.model_path))
    adapters = AdapterFolder(home() / settings.adapters_folder).all()
    cards = server_cards(settings)
    if options.json:
        print(json.dumps([_plain(model, cards, adapters) for model in found], indent=1))
        return 0
    if not found and not cards:
        print(f"No model is on this disk. {program()} recommend names some; {program()} pull NAME fetches one.")
        return 0
    print_models(found, cards, adapters)
    for entry in settings.models_by_name.entries:
        print(f"MODEL_MAP    {entry.pattern} means {entry.model}")
    return 0


def _plain(model: StoredModel, cards: list[Card] | None, adapters: Iterable[StoredAdapter]) -> dict[str, Any]:
    """``server``: what a running one tells of it; ``null`` where none runs, or that one does not know it."""
    card = card_of(cards or [], model.name)
    server: dict[str, Any] | None = None
    if card is not None:
        names = ("state", "pinned", "weight_bytes", "kv_bytes")
        server = {"name": card["id"]} | {name: card["details"].get(name) for name in names}
        server["context"] = card.get("context_length")
    return {
        "name": model.name,
        "folder": str(model.folder),
        "bytes": model.size,
        "context": model.context,
        "can": list(model.can),
        "problem": model.problem,
        "adapters": [adapter.name for adapter in fitting(model, adapters)],
        "server": server,
    }


def main_pull(settings: Settings, options: argparse.Namespace) -> int:
    """0 once all of the model is here and verified; 1 with a sentence."""
    repository = full_name(options.name) or options.name
    bars = ProgressBars(Console(stderr=True))
    try:
        done = pull(repository, bars, revision=options.revision)
    except PullError as error:
        bars.close()
        print(error, file=sys.stderr)
        return 1
    bars.close()
    came = f"{done.fetched / GB:.2f} GB fetched" if done.fetched else "all of it was here"
    print(f"{repository} at {done.commit[:12]}: {done.size / GB:.2f} GB, {came}. {program()} serve {options.name}")
    return 0


def main_rm(settings: Settings, options: argparse.Namespace) -> int:
    """Removes a model that came from a hub. 1 if it is not there, is somebody's own folder, or is served now."""
    repository = full_name(options.name) or options.name
    refusal = _not_removable(settings, repository)
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return 1
    folder = hub_folder(repository)
    lock = fetch_lock(folder)
    if not lock.take():
        print(f"{repository} is being fetched by another process; end that first.", file=sys.stderr)
        return 1
    try:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        shutil.rmtree(folder)
    finally:
        lock.drop()
    print(f"{repository} was removed: {size / GB:.2f} GB are free again.")
    return 0


def _not_removable(settings: Settings, repository: str) -> str | None:
    """Why it cannot be removed, as a sentence."""
    if is_path(repository):
        return f"{repository} is a folder of yours; remove it yourself if you want to (rm -r)."
    try:
        found = hub_folder(repository).is_dir()  # also of a fetch that was begun and never ended
    except ValueError:
        found = False
    if not found:
        return f"{repository} is not on this disk; {program()} models lists what is."
    for port in running_ports(settings):
        if served_model(settings.mlx_host, port, settings.api_key) == repository.rpartition("/")[2]:
            return f"{repository} is served on port {port}; {program()} stop --port {port} first."
    folder = hub_folder(repository)
    if folder.is_symlink():  # to a disk of the user's, say: what is behind it is not ours to remove
        return f"{folder} is a link; remove {os.path.realpath(folder)} yourself if you want to."
    return None


def main_recommend(settings: Settings, options: argparse.Namespace) -> int:
    """Models for this machine, or for one with so much memory."""
    device = inspect_device(lambda: Accelerator("metal" if sys.platform == "darwin" else "cpu"))
    memory, usable = device.memory, device.usable
    if options.memory:
        memory, usable = options.memory * GIB, int(options.memory * GIB * usable / max(device.memory, 1))
    rate = bandwidth(device.chip)
    speed = f", {rate} GB/s" if rate else ""
    print(f"{device.chip}, {memory / GIB:.0f} GiB{speed}: {usable / GIB:.0f} GiB for weights and KV")
    found = recommend(memory, usable)
    if not found:
        print("None of the table fits; the small embedded model does: leave MODEL_PATH unset.")
        return 0
    headings = ("NAME", "WEIGHTS", "KV 32K", "KV 128K", "TOKENS/S", "")
    print_table(headings, [_row(model, device.chip) for model in found], words=("NAME", ""))
    print(f"{program()} serve {found[0].short}    fetches and serves the first.    Table: {SOURCE}")
    return 0


def _row(model: Recommendation, chip: str) -> tuple[str, ...]:
    sizes = (model.weights, model.kv_bytes(32_768), model.kv_bytes(131_072))
    rate = tokens_per_second(model, chip)
    speed = "-" if rate is None else f"~{rate:.0f}"
    return model.short, *(f"{size / GIB:.1f} GiB" for size in sizes), speed, model.note


# --- models show --------------------------------------------------------------------------------


def show(settings: Settings, name: str | None, *, as_json: bool) -> int:
    """All that is known of a model on this disk, and who says so. Loads nothing.

    1 with a sentence where there is no such model here, or its own file is wrong.
    """
    asked = name or settings.model_path or EMBEDDED_NAME
    source = full_name(asked) or asked
    folder = _folder(settings, source)
    if folder is None:
        near = _similar(settings, asked)
        print(f"{asked} is not on this disk; {program()} models lists what is.{near}", file=sys.stderr)
        return 1
    tried = home() / settings.cache_dir / FILE
    probe = read_probe(tried, probe_key(fingerprint(folder))) if tried.exists() else None
    try:
        capabilities, makers = read_capabilities(settings, home() / settings.model_files.expanduser(), source, folder)
    except (NotSupported, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if probe is not None:
        capabilities = capabilities.with_probe(probe)
    facts = capabilities.facts
    if as_json:
        values = {key: {"value": fact.value, "source": fact.source} for key, fact in facts.items()}
        trial = None if probe is None else asdict(probe.trial)
        file = None if capabilities.overrides.path is None else str(capabilities.overrides.path)
        print(
            json.dumps({"name": source, "folder": str(folder), "file": file, "trial": trial, "facts": values}, indent=1)
        )
        return 0
    print(f"{source}  ({folder})")
    rows = [(name, _text(fact.value), fact.source) for name, fact in facts.items()]
    print_table(("", "VALUE", "FOUND BY"), rows, words=("", "VALUE", "FOUND BY"))
    for why in makers.odd.values():
        print(f"{why}.")
    if probe is None:
        print(f"How it writes is found out when it is served for the first time: {program()} serve {asked}")
        return 0
    for line in (probe.trial.report(capabilities.tool_parser), *capabilities.decoding.report()):
        print(f"{line[:1].upper()}{line[1:]}.")
    return 0


def _similar(settings: Settings, asked: str) -> str:
    """A question with the name of a model on this disk that is nearly the one that was asked for; else empty."""
    stored = stored_models(home() / settings.cache_dir, settings.model_path)
    names = [model.name.rpartition("/")[2] for model in stored]
    found = difflib.get_close_matches(asked.rpartition("/")[2], names, 1)
    return f" Did you mean {found[0]}?" if found else ""


def _folder(settings: Settings, source: str) -> Path | None:
    """Where the model lies: by its path or repository, else by the last part of its name."""
    found = folder_of(source)
    if found is not None and (found / "config.json").is_file():
        return found
    stored = stored_models(home() / settings.cache_dir, settings.model_path)
    for model in stored:
        # the embedded model's folder also says how its weights are kept
        bare = EMBEDDED_NAME if model.folder.name.startswith(f"{EMBEDDED_NAME}-") else model.folder.name
        if source in {model.name.rpartition("/")[2], bare}:
            return model.folder
    return None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


# --- the table of models ------------------------------------------------------------------------


def print_models(found: Sequence[StoredModel], cards: Sequence[Card] | None, adapters: Sequence[StoredAdapter]) -> None:
    """`cards`: of the running server, which tell of adapters, too; ``None`` where none runs."""
    columns = [name for name in _COLUMNS if cards is not None or name not in _OF_A_SERVER]
    rows = ([row[name] for name in columns] for row in _rows(found, cards, adapters))
    print_table(columns, rows, words=("NAME", "STATE", "CAN"))


def fitting(model: StoredModel, adapters: Iterable[StoredAdapter]) -> list[StoredAdapter]:
    """Those that can be put on the model."""
    if model.problem:
        return []
    return [each for each in adapters if not each.problem and each.fits(model.name, model.folder.name)]


def _rows(
    found: Sequence[StoredModel], cards: Sequence[Card] | None, adapters: Sequence[StoredAdapter]
) -> Iterator[dict[str, str]]:
    left = list(cards or ())
    for model in found:
        card = card_of(left, model.name)
        if card is not None:
            left.remove(card)
        yield _of_model(model, card)
        if cards is None:
            served = model.name.rpartition("/")[2]
            for adapter in fitting(model, adapters):
                yield _listed(f"{served}{ADAPTER_SIGN}{adapter.name}", f"+{adapter.size / GB:.1f} GB", model.context)
    for adapter in adapters:
        if not any(fitting(model, [adapter]) for model in found):
            why = adapter.problem or f"its model is not on this disk: {adapter.base}"
            yield _listed(f"{ADAPTER_SIGN}{adapter.name}", f"+{adapter.size / GB:.1f} GB", can=why)
    for card in left:  # what only the server knows: another folder, an encoder
        able = (name for name, able in card.get("capabilities", {}).items() if able is True)
        size = f"{card['details'].get('weight_bytes', 0) / GB:.1f} GB"
        yield _listed(str(card.get("id")), size, card=card, can=", ".join(able))


def _of_model(model: StoredModel, card: Card | None) -> dict[str, str]:
    short = next((short for short, repository in SHORT_NAMES.items() if repository == model.name), None)
    name = f"{model.name} ({short})" if short else model.name
    return _listed(name, f"{model.size / GB:.1f} GB", model.context, card, model.problem or ", ".join(model.can))


def _listed(
    name: str, size: str, context: int | None = None, card: Card | None = None, can: str = ""
) -> dict[str, str]:
    """A row, by column. `card`: what a running server tells of it."""
    state, kv = ("-", "-") if card is None else state_of(card)
    tokens = context if card is None else card.get("context_length")
    return dict(zip(_COLUMNS, (name, size, "-" if tokens is None else f"{tokens:,}", state, kv, can), strict=True))
