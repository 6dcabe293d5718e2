"""The nodes: start_llm servers that the proxy shares requests with. Which there are, and what each tells of itself.

It does not know requests, and decides nothing. `look_at` is for people (the page, the command `nodes`); the proxy's
own process asks in `fleet`. Used by both processes.
"""

from __future__ import annotations

import hashlib
import math
import ssl
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from start_llm.core.paths import expanded
from start_llm.core.settings import Settings

LOOK_SECONDS = 2.0
"""What a node may take to tell people how it is."""
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


def headers_for(node: ServerNode) -> dict[str, str]:
    return {"x-api-key": node.key} if node.key else {}


def certificates(ca_file: Path | None) -> ssl.SSLContext | bool:
    """What `https://` nodes are checked with. Raises OSError (ssl.SSLError is one): there is no such file, or none of
    certificates."""
    if ca_file is None:
        return True
    context = ssl.create_default_context()
    context.load_verify_locations(expanded(ca_file))
    return context


# --- what a node tells of itself ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """How a node was when it was asked last."""

    name: str
    # `ready`, `busy`: it answers; `loading`, `wedged`, `failed`, ...: it says so itself; `gone`: nobody answers,
    # `silent`: not in time; `refused`: it does not take the key; `foreign`: something else than start_llm answers
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

    @property
    def answers(self) -> bool:
        return self.state in {"ready", "busy"}


def state_of(answer: httpx.Response | httpx.HTTPError) -> tuple[str, Mapping[str, Any]]:
    """(state, what `/health` says), see `NodeStatus.state`."""
    if isinstance(answer, httpx.TimeoutException):
        return "silent", {"detail": f"It did not answer in {LOOK_SECONDS:.0f} s."}
    if isinstance(answer, httpx.HTTPError):
        return "gone", {"detail": str(answer)[:200] or type(answer).__name__}
    body = _json(answer)
    state = body.get("state") if isinstance(body, dict) else None
    if answer.status_code not in {200, 503} or not isinstance(state, str):
        return "foreign", {"detail": "What answers at this address is no start_llm server."}
    return state, body


def cards_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The models that `/v1/models` lists."""
    body = _json(answer) if answer.status_code == 200 else None
    listed = body.get("data") if isinstance(body, dict) else None
    found = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    return [card for card in found if isinstance(card.get("id"), str)]


def loaded_of(cards: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    details = {card["id"]: card.get("details") for card in cards}
    return tuple(name for name, found in details.items() if isinstance(found, dict) and found.get("state") == "ready")


def count_of(answer: Any, name: str) -> int:
    """A count in a node's answer; 0 for whatever is none."""
    value = answer.get(name) if isinstance(answer, dict) else None
    return max(0, int(value)) if isinstance(value, int | float) and math.isfinite(value) else 0


def seconds_of(answer: Mapping[str, Any], name: str) -> float | None:
    """A time in a node's answer; ``None`` for whatever is none."""
    value = answer.get(name)
    return max(0.0, float(value)) if isinstance(value, int | float) and math.isfinite(value) else None


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except (ValueError, RecursionError):
        return None


def look_at(
    nodes: Sequence[ServerNode], ca_file: Path | None = None, own: NodeStatus | None = None
) -> list[dict[str, Any]]:
    """How all nodes are now, as plain JSON types; all are asked at once, `LOOK_SECONDS` for each question.

    `own`: of the server that asks. It is not asked over HTTP: its only thread may be the one that waits for the others.

    `share`: of all requests that these nodes have answered since they were started, 0.0 to 1.0. Raises OSError.
    """
    with (
        httpx.Client(timeout=LOOK_SECONDS, trust_env=False, verify=certificates(ca_file)) as client,
        ThreadPoolExecutor(max(1, len(nodes))) as threads,
    ):
        known = {own.name: own} if own else {}
        found = list(threads.map(lambda node: known.get(node.name) or _look_at(client, node), nodes))
    total = sum(status.requests for status in found)
    return [asdict(status) | {"share": status.requests / total if total else 0.0} for status in found]


def _look_at(client: httpx.Client, node: ServerNode) -> NodeStatus:
    try:
        state, health = state_of(client.get(f"{node.url}/health"))
    except httpx.HTTPError as error:
        state, health = state_of(error)
    if state in {"gone", "silent", "foreign"}:
        return NodeStatus(node.name, state, detail=str(health.get("detail", "")))
    try:
        models, metrics = (
            client.get(node.url + path, headers=headers_for(node)) for path in ("/v1/models", "/metrics")
        )
    except httpx.HTTPError as error:
        return NodeStatus(node.name, state_of(error)[0], detail=str(error)[:200])
    if models.status_code in {401, 403}:
        return NodeStatus(node.name, "refused", detail="It does not take the key: NODES_API_KEY must be its API_KEY.")
    return status_of(node.name, health, cards_of(models), metrics.text)


def status_of(name: str, health: Mapping[str, Any], cards: Sequence[Mapping[str, Any]], metrics: str) -> NodeStatus:
    """Of what a server says at `/health`, `/v1/models` and `/metrics`."""
    figures = _figures(metrics)
    return NodeStatus(
        name, health["state"], count_of(health, "running"), count_of(health, "queued"),
        detail=str(health.get("detail", "")),
        version=figures.get("version", ""), models=tuple(str(card["id"]) for card in cards), loaded=loaded_of(cards),
        memory_bytes=count_of(figures, "start_llm_models_weight_bytes") + count_of(figures, "start_llm_kv_bytes"),
        stored_tokens=count_of(figures, "start_llm_kv_tokens"), requests=count_of(figures, "requests"),
    )  # fmt: skip


def _figures(text: str) -> dict[str, Any]:
    """Of `/metrics`: values by name; `requests` is the sum over dialects and statuses."""
    found: dict[str, Any] = {"requests": 0.0}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "start_llm_requests_total":
                    found["requests"] += sample.value
                elif sample.name == "start_llm_build_info":
                    found["version"] = sample.labels.get("version", "")
                elif not sample.labels:
                    found[sample.name] = sample.value
    except ValueError:  # another program's, or cut
        pass
    return found
