"""The table that `models` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from start_llm.cli.loaded import Card, card_of, state_of
from start_llm.core.modelmap import ADAPTER_SIGN
from start_llm.dashboard.tables import print_table
from start_llm.models.adapter import StoredAdapter
from start_llm.models.catalog import StoredModel
from start_llm.models.recommended import SHORT_NAMES

GB = 1e9
_OF_A_SERVER = ("state", "kv")


class ListedModel(NamedTuple):
    """`state` and `kv`: as a running server tells."""

    name: str
    size: str
    context: str = "-"
    state: str = "-"
    kv: str = "-"
    can: str = ""


def print_models(found: Sequence[StoredModel], cards: Sequence[Card] | None, adapters: Sequence[StoredAdapter]) -> None:
    """`cards`: of the running server, which tell of adapters, too; ``None`` where none runs."""
    columns = [name for name in ListedModel._fields if cards is not None or name not in _OF_A_SERVER]
    rows = ([getattr(row, name) for name in columns] for row in _rows(found, cards, adapters))
    print_table([name.upper() for name in columns], rows, words=("NAME", "STATE", "CAN"))


def fitting(model: StoredModel, adapters: Iterable[StoredAdapter]) -> list[StoredAdapter]:
    """Those that can be put on the model."""
    if model.problem:
        return []
    return [each for each in adapters if not each.problem and each.fits(model.name, model.folder.name)]


def _rows(
    found: Sequence[StoredModel], cards: Sequence[Card] | None, adapters: Sequence[StoredAdapter]
) -> Iterator[ListedModel]:
    left = list(cards or ())
    for model in found:
        card = card_of(left, model.name)
        if card is not None:
            left.remove(card)
        yield _of_model(model, card)
        if cards is None:
            yield from (_of_adapter(model, adapter) for adapter in fitting(model, adapters))
    for adapter in adapters:
        if not any(fitting(model, [adapter]) for model in found):
            why = adapter.problem or f"its model is not on this disk: {adapter.base}"
            yield ListedModel(f"{ADAPTER_SIGN}{adapter.name}", _added(adapter), can=why)
    yield from map(_of_card, left)


def _of_model(model: StoredModel, card: Card | None) -> ListedModel:
    short = next((short for short, repository in SHORT_NAMES.items() if repository == model.name), None)
    name = f"{model.name} ({short})" if short else model.name
    can = model.problem or ", ".join(model.can)
    size = f"{model.size / GB:.1f} GB"
    if card is None:
        return ListedModel(name, size, _tokens(model.context), can=can)
    return ListedModel(name, size, _tokens(card.get("context_length")), *state_of(card), can)


def _of_adapter(model: StoredModel, adapter: StoredAdapter) -> ListedModel:
    name = f"{model.name.rpartition('/')[2]}{ADAPTER_SIGN}{adapter.name}"
    return ListedModel(name, _added(adapter), _tokens(model.context))


def _of_card(card: Card) -> ListedModel:
    """What only the server knows: another folder, an encoder."""
    can = ", ".join(name for name, able in card.get("capabilities", {}).items() if able is True)
    size = f"{card['details'].get('weight_bytes', 0) / GB:.1f} GB"
    return ListedModel(str(card.get("id")), size, _tokens(card.get("context_length")), *state_of(card), can)


def _added(adapter: StoredAdapter) -> str:
    return f"+{adapter.size / GB:.1f} GB"


def _tokens(context: int | None) -> str:
    return "-" if context is None else f"{context:,}"
