"""This user's servers that run now, and which models they need: whatever removes a model asks here first. No MLX."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from start_llm.core.errors import Conflict
from start_llm.core.settings import Settings
from start_llm.files.locks import is_locked
from start_llm.host.home import command, home
from start_llm.host.ports import address, model_cards

_LOCK = re.compile(r"server-(\d+)\.lock")
_ASK_SECONDS = 2.0

Card = dict[str, Any]
"""A model as ``GET /v1/models`` tells it."""


def running_ports(settings: Settings) -> list[int]:
    """The ports of this user's servers that run now."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in (home() / settings.cache_dir / "run").iterdir():
            name = _LOCK.fullmatch(path.name)
            if name and is_locked(path):
                found.append(int(name[1]))
    return sorted(found)


def server_cards(settings: Settings, port: int | None = None) -> list[Card] | None:
    """The models of the server on this port, or on MLX_PORT; ``None`` if none answers there."""
    url = address(settings.mlx_host, settings.mlx_port if port is None else port)
    cards = model_cards(url, settings.api_key, _ASK_SECONDS)
    return None if cards is None else [card for card in cards if isinstance(card.get("details"), dict)]


def card_of(cards: list[Card], name: str) -> Card | None:
    """The card of a model on this disk, by its repository or folder, or else by its short name."""
    bare = [card for card in cards if "base" not in card["details"]]  # not those of its adapters
    by_source = next((card for card in bare if card["details"].get("source") == name), None)
    return by_source or next((card for card in cards if card.get("id") == name.rpartition("/")[2]), None)


def check_unused(repository: str, settings: Settings, own_port: int | None = None) -> None:
    """Raises Conflict: a server has it loaded, or was started with it. Not asked: the one on `own_port`."""
    for port in running_ports(settings):
        cards = (server_cards(settings, port) or []) if port != own_port else []
        card = card_of(cards, repository)
        if card is not None and card is cards[0]:
            first = f"`{command()} stop --port {port}` first"
            raise Conflict(f"{repository} is served on port {port}; {first}.", param="model")
        if card is not None and card["details"].get("state") not in {"stored", "failed"}:
            unload = f"{command()} models unload {card['id']} --port {port}"
            raise Conflict(f"{repository} is loaded on port {port}; `{unload}` first.", param="model")
