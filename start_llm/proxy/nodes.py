"""The nodes: start_llm servers that the proxy shares requests with. Which there are, and what each tells of itself.

It does not know requests, and decides nothing. `look_at` is for people (the page, the command `nodes`); the proxy's
own process asks in `fleet`. Used by both processes. Something else than start_llm may answer at a node's address:
whatever it says, `ask` takes a bounded time and reads a bounded number of bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit

import certifi
import httpx

from start_llm.core.settings import Settings

LOOK_SECONDS = 2.0
"""What a node may take to tell people how it is."""
MOST_BYTES = 4 * 2**20
"""Of an answer to a question."""
_SLACK_SECONDS = 0.5
"""httpx looks at the time between two pieces of an answer only, so there is a limit for all of it, too. The one of
httpx is to come first: a request that is cancelled may keep its connection for ever (httpcore 1.0.9)."""
_KEPT_CONNECTIONS = 20
"""Connections to nodes that stay open while nobody needs them."""
_MOST_DETAIL, _MOST_VERSION = 300, 40  # characters
_MOST_CARDS, _MOST_NAME = 1000, 1024  # models that a node lists; characters of a name
_STATE = re.compile(r"[a-z_]{1,20}")
_LOCAL = {"localhost": "127.0.0.1", "[::1]": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class ServerNode:
    """One server."""

    url: str  # without a path
    key: str = field(default="", repr=False)  # its API_KEY; empty: it wants none

    @property
    def name(self) -> str:
        """Host and port: what people and answers call it."""
        return urlsplit(self.url).netloc

    @property
    def id(self) -> str:
        """The same in every proxy that is given the same address."""
        return hashlib.sha256(self.url.encode()).hexdigest()[:8]


def nodes_of(settings: Settings, server_url: str) -> list[ServerNode]:
    """Those of NODES, and this server at `server_url` unless NODES_SELF is off; this server alone without NODES.

    This server counts once, also if NODES names it by another local name.
    """
    own, here = ServerNode(server_url.rstrip("/"), settings.api_key or ""), _place(server_url)
    others = [ServerNode(url, settings.nodes_api_key or "") for url in settings.node_addresses if _place(url) != here]
    is_named = len(others) < len(settings.node_addresses)
    return others if others and settings.nodes_self == "off" and not is_named else [own, *others]


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    host = parts.netloc.rpartition(":")[0] if parts.port else parts.netloc
    return _LOCAL.get(host.lower(), host.lower()), parts.port or (443 if parts.scheme == "https" else 80)


def headers_for(node: ServerNode) -> dict[bytes, bytes]:
    return {b"x-api-key": node.key.encode()} if node.key else {}


# --- asking a node ----------------------------------------------------------------------------------


def node_client() -> httpx.AsyncClient:
    """For one event loop. ``https://`` nodes are checked with the usual certificates and those of SSL_CERT_FILE."""
    certificates = ssl.create_default_context()
    certificates.load_verify_locations(certifi.where())
    # No limit of connections: requests that wait for an answer must not keep anybody from asking how a node is.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT_CONNECTIONS)
    return httpx.AsyncClient(
        timeout=LOOK_SECONDS,
        trust_env=False,
        verify=certificates,
        limits=limits,
        # Answers are passed on as they come, without the header that says how they are packed.
        headers={"accept-encoding": "identity"},
        # All clients' requests share this client: what a node stores with one of them must not come with another one.
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
    )


@contextmanager
def only_http_errors() -> Iterator[None]:
    """Around reading a node's answer: whatever it says, httpx raises httpx.HTTPError, or TimeoutError.

    httpx (0.28) lets out others, too: of a `Location` that is no address (it parses it, and does not go there), of TLS
    records that are broken after the handshake, of a body that was read before.
    """
    try:
        yield
    except (httpx.HTTPError, TimeoutError):
        raise
    except (httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
        raise httpx.RemoteProtocolError(f"Its answer cannot be read: {error or type(error).__name__}") from error


async def ask(
    client: httpx.AsyncClient,
    url: str,
    *,
    body: bytes | None = None,
    headers: Mapping[bytes, bytes] | None = None,
    seconds: float = LOOK_SECONDS,
) -> httpx.Response:
    """All of an answer; a POST if there is a `body`.

    Raises httpx.HTTPError and nothing else, whatever the node does: nothing came or nothing that can be read, it took
    longer than `seconds`, it has over `MOST_BYTES`, or it is packed.
    """
    asked = client.build_request("GET" if body is None else "POST", url, content=body, headers=headers, timeout=seconds)
    try:
        async with asyncio.timeout(seconds + _SLACK_SECONDS):
            with only_http_errors():
                answer = await client.send(asked, stream=True)
            return await read_all(answer)
    except TimeoutError:
        raise httpx.ReadTimeout("Its answer came too slowly.") from None


async def read_all(answer: httpx.Response) -> httpx.Response:
    """An answer whose head has come, with its body. Raises as `ask` does."""
    content = bytearray()
    try:
        if "content-encoding" in answer.headers:  # little of it may be much
            raise httpx.RemoteProtocolError("Its answer is packed, which it was not asked for.")
        with only_http_errors():
            async for piece in answer.aiter_raw():
                content += piece
                if len(content) > MOST_BYTES:
                    raise httpx.RemoteProtocolError(f"Its answer has more than {MOST_BYTES} bytes.")
    finally:
        await answer.aclose()
    return httpx.Response(answer.status_code, headers=answer.headers, content=bytes(content))


# --- what a node tells of itself ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """How a node was when it was asked last."""

    name: str
    # `ready`, `busy`: it answers; `loading`, `wedged`, `failed`, ...: it says so itself; `gone`: nobody answers,
    # `silent`: not in time; `refused`: it does not take the key, or its name; `foreign`: something else
    # than start_llm answers
    state: str
    running: int = 0
    waiting: int = 0
    version: str = ""
    models: tuple[str, ...] = ()  # names that it lists
    loaded: tuple[str, ...] = ()  # those of them that are in memory
    memory_bytes: int = 0  # weights and KV in memory
    stored_tokens: int = 0  # tokens with KV in memory
    requests: int = 0  # that it has answered since its start
    detail: str = ""


def state_of(answer: httpx.Response | httpx.HTTPError) -> tuple[str, Mapping[str, Any]]:
    """(state, what `/health` says), see `NodeStatus.state`."""
    if isinstance(answer, httpx.TimeoutException):
        return "silent", {"detail": f"It did not answer in {LOOK_SECONDS:.0f} s."}
    if isinstance(answer, httpx.HTTPError):
        return "gone", {"detail": str(answer)[:200] or type(answer).__name__}
    body = json_of(answer)
    state, error = body.get("state"), body.get("error")
    if answer.status_code == 403 and isinstance(error, dict):  # a name that is not in its ALLOWED_HOSTS
        return "refused", {"detail": error.get("message", "")}
    if answer.status_code not in {200, 503} or not isinstance(state, str) or not _STATE.fullmatch(state):
        return "foreign", {"detail": "What answers at this address is no start_llm server."}
    return state, body


def detail_of(health: Mapping[str, Any]) -> str:
    """What `state_of` says beside the state: a line."""
    return " ".join(str(health.get("detail", ""))[:_MOST_DETAIL].split())


def cards_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The models that `/v1/models` lists."""
    listed = json_of(answer).get("data") if answer.status_code == 200 else None
    found = [card for card in listed[:_MOST_CARDS] if isinstance(card, dict)] if isinstance(listed, list) else []
    return [card for card in found if isinstance(card.get("id"), str) and len(card["id"]) <= _MOST_NAME]


def talks(card: Mapping[str, Any]) -> bool:
    """Whether it is of a language model, as far as the card says: others say of which kind they are."""
    details = card.get("details")
    return not isinstance(details, dict) or "kind" not in details


def loaded_of(cards: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    details = {card["id"]: card.get("details") for card in cards}
    return tuple(name for name, found in details.items() if isinstance(found, dict) and found.get("state") == "ready")


def count_of(answer: Any, name: str) -> int:
    """A count in a node's answer, 0 or more; 0 for whatever is none."""
    value = answer.get(name) if isinstance(answer, dict) else None
    try:
        number = float(value) if isinstance(value, int | float) else 0.0
    except OverflowError:  # JSON has whole numbers of any length
        return 0
    return max(0, int(number)) if math.isfinite(number) else 0


def json_of(answer: httpx.Response) -> dict[str, Any]:
    """The object that an answer is; an empty one where it is none."""
    try:
        found = answer.json()
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def look_at(nodes: Sequence[ServerNode], own: NodeStatus | None = None) -> list[dict[str, Any]]:
    """How all nodes are now, as plain JSON types; all are asked at once, `LOOK_SECONDS` for each question.

    For a thread without an event loop. `own`: of the server that asks; it is not asked over HTTP: its only thread may
    be the one that waits for the others.

    `share`: of all requests that these nodes have answered since they were started, 0.0 to 1.0.
    """
    others = [node for node in nodes if own is None or node.name != own.name]
    found = [own] if own is not None and len(others) < len(nodes) else []
    found += asyncio.run(_look_at_all(others))
    total = sum(status.requests for status in found)
    return [asdict(status) | {"share": status.requests / total if total else 0.0} for status in found]


async def _look_at_all(nodes: Sequence[ServerNode]) -> Sequence[NodeStatus]:
    async with node_client() as client:
        return await asyncio.gather(*(_look_at(client, node) for node in nodes))


async def _look_at(client: httpx.AsyncClient, node: ServerNode) -> NodeStatus:
    """How one node is now, for people (`fleet` asks by itself). Nothing that a node does raises."""
    try:
        state, health = state_of(await ask(client, f"{node.url}/health"))
    except httpx.HTTPError as error:
        state, health = state_of(error)
    if state in {"gone", "silent", "foreign", "refused"}:
        return NodeStatus(node.name, state, detail=detail_of(health))
    try:
        paths = ("/v1/models", "/v1/loads")
        models, loads = [await ask(client, node.url + path, headers=headers_for(node)) for path in paths]
    except httpx.HTTPError as error:
        return NodeStatus(node.name, state_of(error)[0], detail=str(error)[:200])
    if models.status_code in {401, 403}:
        return NodeStatus(node.name, "refused", detail="It does not take the key: NODES_API_KEY must be its API_KEY.")
    return status_of(node.name, health, cards_of(models), json_of(loads))


def status_of(
    name: str, health: Mapping[str, Any], cards: Sequence[Mapping[str, Any]], loads: Mapping[str, Any]
) -> NodeStatus:
    """For `_look_at`, of what a server says at `/health` (it has a state), `/v1/models` and `/v1/loads`."""
    listed = loads.get("loads")
    load = listed[0] if isinstance(listed, list) and listed else None
    loaded = loaded_of(cards)
    sizes = [card["details"] for card in cards if card["id"] in loaded]
    return NodeStatus(
        name, health["state"], count_of(health, "running"), count_of(health, "queued"),
        detail=detail_of(health),
        version=str(loads.get("version", ""))[:_MOST_VERSION] if listed else "",
        models=tuple(str(card["id"]) for card in cards), loaded=loaded,
        memory_bytes=sum(count_of(each, "weight_bytes") + count_of(each, "kv_bytes") for each in sizes),
        stored_tokens=count_of(load, "num_used_tokens"), requests=count_of(load, "requests"),
    )  # fmt: skip
