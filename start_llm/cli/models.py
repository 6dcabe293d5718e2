"""The commands `models`, with its table, and `recommend`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from importlib import import_module
from typing import Any

from start_llm.core.errors import WrongWords
from start_llm.core.modelmap import ADAPTER_SIGN
from start_llm.core.settings import Settings
from start_llm.core.sizes import as_size
from start_llm.dashboard.tables import print_table
from start_llm.host.home import command as program
from start_llm.host.home import home
from start_llm.models.adapter import AdapterFolder, StoredAdapter
from start_llm.models.catalog import EMBEDDED_NAME, StoredModel, stored_models
from start_llm.models.device import GIB, NO_GPU, inspect_device, likely_accelerator
from start_llm.models.recommended import (
    SHORT_NAMES,
    SOURCE,
    Recommendation,
    bandwidth,
    outdated,
    published_head,
    recommend,
    tokens_per_second,
)
from start_llm.models.servers import Card, card_of, server_cards

_COLUMNS = ("NAME", "SIZE", "CONTEXT", "STATE", "KV", "CAN")
_OF_A_SERVER = ("STATE", "KV")
_SHORT = {repository: short for short, repository in SHORT_NAMES.items()}
_BELONGS = {"off": ("pin", "--off", "NAME --off"), "values": ("set", "KEY=VALUE", "NAME KEY=VALUE")}


def main_models(settings: Settings, options: argparse.Namespace) -> int:
    """What is on this disk, and what of it a server has loaded; or what is known of one; or a change of one."""
    for option, (what, written, example) in _BELONGS.items():
        if getattr(options, option) and options.what != what:
            raise WrongWords(f"models: {written} belongs to {what}: {program()} models {what} {example}")
    if options.what in ("show", "set"):  # what reads all of a model takes a second to import
        shown = import_module("start_llm.cli.show")
        return int((shown.show if options.what == "show" else shown.set_values)(settings, options))
    if options.what is not None:
        return int(import_module("start_llm.cli.loading").change(settings, options))
    _list(settings, as_json=options.json)
    return 0


def _list(settings: Settings, *, as_json: bool) -> None:
    found = _embedded_once(stored_models(home() / settings.cache_dir, settings.model_path), settings)
    adapters = AdapterFolder(home() / settings.adapters_folder).all()
    cards = server_cards(settings)
    if as_json:
        print(json.dumps([_plain(model, cards, adapters) for model in found], indent=1))
        return
    if not found and not cards:
        print(f"No model is on this disk. `{program()} recommend` names some; `{program()} pull NAME` fetches one.")
        return
    columns = [name for name in _COLUMNS if cards is not None or name not in _OF_A_SERVER]
    rows = ([row[name] for name in columns] for row in _rows(found, cards, adapters))
    print_table(columns, rows, words=("NAME", "STATE", "CAN"))
    for entry in settings.models_by_name.entries:
        print(f"MODEL_MAP    {entry.pattern} means {entry.model}")


def _embedded_once(models: Iterable[StoredModel], settings: Settings) -> list[StoredModel]:
    """Those in the folder of the cache under their folder's name, as a server tells it; the embedded model once."""
    found: dict[str, StoredModel] = {}
    made = home() / settings.cache_dir / "models"
    for model in models:
        if model.folder.parent == made:
            name = EMBEDDED_NAME if model.folder.name.startswith(f"{EMBEDDED_NAME}-") else model.folder.name
            same = found.get(name)
            other = same.size if same is not None and same.folder != model.folder else 0
            model = replace(model, name=name, size=model.size + other)
        found[model.name] = model
    return list(found.values())


def _plain(model: StoredModel, cards: list[Card] | None, adapters: Iterable[StoredAdapter]) -> dict[str, Any]:
    """``server``: what a running one tells of it; ``null`` where none runs, or that one does not know it."""
    card = card_of(cards or [], model.name)
    server: dict[str, Any] | None = None
    if card is not None:
        server = {"name": card["id"], "context": card.get("context_length")}
        server |= {name: card["details"].get(name) for name in ("state", "pinned", "weight_bytes", "kv_bytes")}
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


def main_recommend(settings: Settings, options: argparse.Namespace) -> int:
    """Models for this machine, or for one with so much memory."""
    device = inspect_device(likely_accelerator)
    memory, usable = device.memory, device.usable
    if options.memory:
        memory, usable = options.memory * GIB, int(options.memory * GIB * usable / max(device.memory, 1))
    speed = f", {rate} GB/s" if (rate := bandwidth(device.chip)) else ""
    print(f"{device.chip}, {as_size(memory)}{speed}: {as_size(usable)} for weights and KV")
    if device.backend == "cpu" and not options.memory:
        print(NO_GPU)
    found = recommend(memory, usable)
    if not found:
        print("None of the table fits; the small embedded model does: leave MODEL_PATH unset.")
        return 0
    headings = ("NAME", "WEIGHTS", "KV 32K", "KV 100K", "KV 200K", "TOKENS/S", "")
    print_table(headings, [_row(model, device.chip) for model in found], words=("NAME", ""))
    if old := outdated(found, date.today()):
        print(old)
    for model in found:
        if head := published_head(model.repository):
            print(f"{model.short}: `{program()} pull {model.short}` fetches {head} with it, which drafts for it")
    print(f"{program()} serve {found[0].short}    fetches and serves the first.    Table: {SOURCE}")
    return 0


def _row(model: Recommendation, chip: str) -> tuple[str, ...]:
    sizes = (model.weights, *(model.kv_bytes(tokens) for tokens in (32_768, 100_000, 200_000)))
    rate = tokens_per_second(model, chip)
    speed = "-" if rate is None else f"~{rate:.0f}"
    return model.short, *map(as_size, sizes), speed, model.note


# --- the table of models ------------------------------------------------------------------------


def fitting(model: StoredModel, adapters: Iterable[StoredAdapter]) -> list[StoredAdapter]:
    """Those that can be put on the model."""
    if model.problem:
        return []
    return [each for each in adapters if not each.problem and each.fits(model.name, model.folder.name)]


def _rows(
    found: Sequence[StoredModel], cards: Sequence[Card] | None, adapters: Sequence[StoredAdapter]
) -> Iterator[dict[str, str]]:
    """`cards`: of the running server, which tell of adapters, too; ``None`` where none runs."""
    left = list(cards or ())
    for model in found:
        card = card_of(left, model.name)
        if card is not None:
            left.remove(card)
        name = f"{model.name} ({_SHORT[model.name]})" if model.name in _SHORT else model.name
        can = model.problem or ", ".join(model.can)
        yield _listed(name, as_size(model.size), model.context, card, can)
        if cards is None:
            served = model.name.rpartition("/")[2]
            for adapter in fitting(model, adapters):
                yield _listed(f"{served}{ADAPTER_SIGN}{adapter.name}", f"+{as_size(adapter.size)}", model.context)
    for adapter in adapters:
        if not any(fitting(model, [adapter]) for model in found):
            why = adapter.problem or f"its model is not on this disk: {adapter.base}"
            yield _listed(f"{ADAPTER_SIGN}{adapter.name}", f"+{as_size(adapter.size)}", can=why)
    for card in left:  # what only the server knows: another folder, an encoder
        able = ", ".join(name for name, able in card.get("capabilities", {}).items() if able is True)
        yield _listed(str(card.get("id")), as_size(card["details"].get("weight_bytes", 0)), card=card, can=able)


def _listed(
    name: str, size: str, context: int | None = None, card: Card | None = None, can: str = ""
) -> dict[str, str]:
    """A row, by column. `card`: what a running server tells of it."""
    state, kv, tokens = "-", "-", context
    if card is not None:
        details, tokens = card["details"], card.get("context_length")
        state = f"{details.get('state', '-')}{', pinned' if details.get('pinned') else ''}"
        kv = as_size(details.get("kv_bytes") or 0) if details.get("state") == "ready" else "-"
    return dict(zip(_COLUMNS, (name, size, "-" if tokens is None else f"{tokens:,}", state, kv, can), strict=True))
