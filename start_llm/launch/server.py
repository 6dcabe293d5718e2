"""The server behind a launched client: joined if it runs, started if not, and left to those who still use it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from start_llm.clients.agent import Endpoint
from start_llm.core.limits import IDLE_MINUTES
from start_llm.core.settings import Settings
from start_llm.host.hints import hint
from start_llm.host.home import home
from start_llm.host.ports import address, ask_json, free_port
from start_llm.host.processes import wait_until
from start_llm.models.catalog import expected_model
from start_llm.models.recommended import full_name
from start_llm.proxy.config import master_key
from start_llm.service.control import ServiceError, bring_up
from start_llm.service.place import Place

PROXY_SECONDS = 120.0
SMALL_NAME = "claude-haiku-4-5"  # what Claude Code calls its small model
MIN_ANSWER_TOKENS = 256
MOST_ANSWER_TOKENS = 16_384  # long enough for any file that is written at once; the rest of the context is for history


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def running_server(settings: Settings, flags: dict[str, str], *, via_proxy: bool) -> Iterator[Endpoint]:
    """A running server, or one that is started in the background.

    While the block runs this process counts as a user of the server. One that was started here ends some time after
    its last user (`IDLE_MINUTES`). `flags`: settings that were given as flags.

    Raises ServiceError: it does not come up, something else listens there, or it has another model than `flags` say.
    """
    place = Place(settings, settings.mlx_port or free_port())
    if not place.is_running:
        place.forget_keep()  # of a server that was killed: nobody has started the next one by name
    # Nobody started it by name: it ends when nobody uses it.
    idle = settings.idle_shutdown_minutes or IDLE_MINUTES
    changes = {"idle_shutdown_minutes": idle, **({"proxy": "on"} if via_proxy else {})}
    with place.used():
        bring_up(settings.model_copy(update=changes), place, flags, say)
        yield _connect(settings, flags, place, via_proxy=via_proxy)


def expected_endpoint(settings: Settings, via_proxy: bool) -> Endpoint:
    """The running server's endpoint, or what a server with these settings would be; starts nothing."""
    place = Place(settings)
    url = place.url
    if settings.mlx_port and ask_json(f"{url}/health")[0] == 200:
        return _connect(settings, {}, place, via_proxy=via_proxy)
    print(f"# No server answers at {url}; this is what one would be. Start it: {hint('start', settings.mlx_port)}")
    name, own = expected_model(settings.model_path)
    key = settings.api_key or "none"
    if via_proxy:
        url, key = address(settings.mlx_host, settings.proxy_port), settings.litellm_master_key or ""
        if not key:
            raise ServiceError(
                "The proxy has no key yet: start the server once, it makes one; or set LITELLM_MASTER_KEY."
            )
    return _endpoint(settings, url, key, settings.served_model_name or name, settings.context_within(own))


def _connect(settings: Settings, flags: Mapping[str, str], place: Place, *, via_proxy: bool) -> Endpoint:
    """Asks the server which models it serves. Raises ServiceError."""
    server_url = place.url
    card, cards = _wanted_card(settings, flags, server_url)
    context = card.get("context_length") or settings.max_kv_size
    url, key = server_url, settings.api_key or "none"
    if via_proxy:
        state = place.read() if place.is_running else None
        own = None if state is None else state.proxy_url
        if state is not None and not own:
            raise ServiceError(f"The server at {server_url} runs without its proxy; why stands in {place.log}.")
        url = own or address(settings.mlx_host, settings.proxy_port)
        if not wait_until(lambda: ask_json(f"{url}/health/readiness")[0] == 200, PROXY_SECONDS):
            raise ServiceError(f"The proxy at {url} does not answer. Is the server running with PROXY=on?")
        key = master_key(settings, home() / ".env")
    sees = bool((card.get("capabilities") or {}).get("vision"))
    scale = float((card.get("details") or {}).get("context_scale") or settings.context_scale_for(context))
    small = _small(settings, server_url, [card, cards[0]])
    return replace(_endpoint(settings, url, key, card["id"], context), sees=sees, scale=scale, small=small)


def _wanted_card(settings: Settings, flags: Mapping[str, str], url: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the server tells of the model that `flags` ask for (the main one where they name none), and of all."""
    status, body = ask_json(f"{url}/v1/models", settings.api_key)
    cards = body.get("data") if isinstance(body, dict) else None
    if status == 401:
        raise ServiceError(f"The server at {url} needs its API key: set API_KEY, here or in {home() / '.env'}.")
    if status != 200 or not cards:
        raise ServiceError(f"{url}/v1/models answered {status}: {body}")
    wanted, context = full_name(flags.get("model_path")), flags.get("max_kv_size")
    card = next((card for card in cards if wanted in {None, card["id"], _served(card)[0]}), None)
    stop, start = hint("stop", urlsplit(url).port), hint("start", free_port())
    other = f"Stop it first (`{stop}`), or start another beside it: `{start}`."
    if card is None:
        raise ServiceError(f"The server at {url} serves {cards[0]['id']}, not {wanted}. {other}")
    served = card.get("context_length")
    if context is not None and served and int(context) > served:
        say(f"launch: {card['id']} is served with a context of {served:,} tokens, not {int(context):,}. {other}")
    return card, cards


def _small(settings: Settings, server_url: str, large: list[dict[str, Any]]) -> str:
    """`SMALL_NAME` where the server's MODEL_MAP has a model for it that is none of `large`, else nothing."""
    status, small = ask_json(f"{server_url}/v1/models/{SMALL_NAME}", settings.api_key)
    served = _served(small) if status == 200 and isinstance(small, dict) else (None, None)
    return SMALL_NAME if served[0] and served not in map(_served, large) else ""


def _served(card: dict[str, Any]) -> tuple[Any, Any]:
    """The model, and the adapter that it is served with."""
    details = card.get("details") or {}
    return details.get("source"), details.get("adapter")


def _endpoint(settings: Settings, url: str, key: str, model: str, context: int) -> Endpoint:
    # Clients ask for as much as they are told an answer may have, and compact when prompt and answer do not fit.
    answer = max(MIN_ANSWER_TOKENS, min(settings.default_max_tokens or MOST_ANSWER_TOKENS, context // 4))
    scale = settings.context_scale_for(context)
    return Endpoint(url=url, key=key, model=model, context=context, answer=answer, scale=scale)
