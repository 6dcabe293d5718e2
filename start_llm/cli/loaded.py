"""What a running server has loaded, as it tells."""

from __future__ import annotations

from typing import Any

from start_llm.core.settings import Settings
from start_llm.host.ports import model_cards
from start_llm.models.device import GIB
from start_llm.service.place import Place

_ASK_SECONDS = 2.0

Card = dict[str, Any]
"""A model as ``GET /v1/models`` tells it."""


def server_cards(settings: Settings) -> list[Card] | None:
    """The models of the server on MLX_PORT; ``None`` if none answers there."""
    cards = model_cards(Place(settings).url, settings.api_key, _ASK_SECONDS)
    return None if cards is None else [card for card in cards if isinstance(card.get("details"), dict)]


def card_of(cards: list[Card], name: str) -> Card | None:
    """The card of a model on this disk, by its repository or folder, or else by its short name."""
    bare = [card for card in cards if "base" not in card["details"]]  # not those of its adapters
    by_source = next((card for card in bare if card["details"].get("source") == name), None)
    return by_source or next((card for card in cards if card.get("id") == name.rpartition("/")[2]), None)


def state_of(card: Card) -> tuple[str, str]:
    """(state, KV), for people."""
    details = card["details"]
    kv = details.get("kv_bytes") or 0
    pinned = ", pinned" if details.get("pinned") else ""
    return f"{details.get('state', '-')}{pinned}", f"{kv / GIB:.2f} GiB" if details.get("state") == "ready" else "-"
