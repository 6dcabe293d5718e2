"""Looks for models on the hub by name: how large they are, and whether they fit this machine. Knows no MLX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from start_llm.core.jsontext import parse_json
from start_llm.models.catalog import StoredModel
from start_llm.models.checkpoint import context_length, readable_config
from start_llm.models.pull import PullError, reach_hub
from start_llm.models.recommended import KV_TOKENS, SHORT_NAMES, needed_bytes

MOST = 20
READERS = 8  # threads that read configs
TIMEOUT_SECONDS = 10.0
MOST_CONFIG_BYTES = 1 << 20
ITEM_BYTES = {"F32": 4.0, "U32": 4.0, "I32": 4.0, "F16": 2.0, "BF16": 2.0, "U8": 1.0, "I8": 1.0, "F8_E4M3": 1.0}
TEXT, GROWING = "text_config", ("full_attention", "attention")


@dataclass(frozen=True, slots=True)
class HubModel:
    """What the hub says of a model; ``None`` and ``""``: it does not say. `needs`: see `needed_bytes`."""

    name: str
    short: str
    downloads: int
    bytes: int | None
    quantisation: str
    context: int | None
    needs: int | None

    def fits(self, usable: int) -> bool | None:
        """Whether it fits with 32k tokens of KV where weights and KV may take `usable` bytes; ``None``: not known."""
        return None if self.needs is None or not usable else self.needs <= usable


def search_hub(words: str) -> list[HubModel]:
    """Models for MLX whose names hold the words, those that are fetched most first. Raises PullError."""
    reach_hub(f"A list of models for {words!r}")
    wanted: dict[str, str | int | list[str]] = {
        "search": words,
        "filter": "mlx",
        "sort": "downloads",
        "direction": -1,
        "limit": MOST,
        "expand": ["downloads", "safetensors"],
    }
    with httpx.Client(base_url=constants.ENDPOINT, headers=build_hf_headers(), timeout=TIMEOUT_SECONDS) as client:
        client.follow_redirects = True
        try:
            answer = client.get("/api/models", params=wanted)
            answer.raise_for_status()
            rows = parse_json(answer.content)
        except (httpx.HTTPError, ValueError) as error:
            raise PullError(f"The hub does not answer the search ({error}).") from error
        listed = [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
        with ThreadPoolExecutor(READERS) as pool:
            configs = pool.map(lambda row: _config(client, row["id"]), listed[:MOST])
            return [_found(row, config) for row, config in zip(listed, configs, strict=False)]


def _config(client: httpx.Client, name: str) -> dict[str, Any]:
    """Empty where there is none, or it cannot be read."""
    try:
        answer = client.get(f"/{name}/resolve/main/config.json")
        answer.raise_for_status()
        config = parse_json(answer.content) if len(answer.content) <= MOST_CONFIG_BYTES else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _found(row: Mapping[str, Any], config: dict[str, Any]) -> HubModel:
    size, kv, name = _weights(row.get("safetensors")), kv_numbers(config), row["id"][:200]
    downloads = row.get("downloads")
    needs = None if size is None or kv is None else needed_bytes(size, kv, KV_TOKENS)
    short = next((short for short, repository in SHORT_NAMES.items() if repository == name), "")
    context = context_length(config) if config else None
    known = downloads if isinstance(downloads, int) else 0
    return HubModel(name, short, known, size, quantisation(config), context, needs)


def _weights(safetensors: Any) -> int | None:
    """Bytes of all weights, by the numbers of each kind that the hub has counted in their files."""
    counts = safetensors.get("parameters") if isinstance(safetensors, dict) else None
    if not isinstance(counts, dict) or not all(isinstance(count, int) for count in counts.values()):
        return None
    return int(sum(ITEM_BYTES.get(kind, 2.0) * count for kind, count in counts.items())) or None


def needed_for(model: StoredModel) -> int:
    """As `HubModel.needs`, of a model on this disk; without KV where its config does not say."""
    kv = kv_numbers(readable_config(model.folder)) or 0
    return needed_bytes(model.weight_bytes or model.size, kv, KV_TOKENS)


def quantisation(config: Mapping[str, Any]) -> str:
    """As ``4-bit``; ``""``: it is not quantised, or does not say."""
    said = config.get("quantization") or config.get("quantization_config")
    bits = said.get("bits") if isinstance(said, dict) else None
    return f"{bits}-bit" if isinstance(bits, int) else ""


def kv_numbers(config: Mapping[str, Any]) -> int | None:
    """Numbers that a token adds to the cache, by a model's config: keys and values; ``None``: it does not say.

    Caches of other shapes (latent attention) are smaller than what is said here.
    """
    inner = config.get(TEXT)
    text: Mapping[str, Any] = inner if isinstance(inner, dict) else config
    try:
        layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
        groups = int(text.get("num_key_value_heads") or heads)
        size = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    kinds, interval = text.get("layer_types"), text.get("full_attention_interval")
    if isinstance(kinds, Sequence) and len(kinds) == layers:
        layers = sum(kind in GROWING for kind in kinds)
    elif isinstance(interval, int) and interval > 0:
        layers //= interval
    return 2 * layers * groups * size
