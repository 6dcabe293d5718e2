"""What the probes share: options, and a reply's figures as a table's row."""

from __future__ import annotations

import argparse
import os
import time

from scripts.bench.client import Client, Reply


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server")
    parser.add_argument("--model", default="", help="the model's name; the server's first one if not given")
    parser.add_argument("--key", default=os.environ.get("OPENAI_API_KEY", "none"), help="API key")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument(
        "--seed", default=f"{time.time_ns():x}", help="makes the texts; new ones every time if not given"
    )


def client_of(options: argparse.Namespace) -> Client:
    """The client for these options. Raises httpx.HTTPError if the server does not say its models."""
    client = Client(options.url, options.model, options.key)
    if not client.model:
        client.model = client.get("/v1/models").json()["data"][0]["id"]
    return client


def cached(reply: Reply) -> int:
    """Prompt tokens that the server says it reused."""
    return int((reply.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def reused(reply: Reply) -> float:
    """The reused share of the prompt, 0 to 1."""
    return cached(reply) / max(1, int(reply.usage.get("prompt_tokens") or 0))


def row_of(reply: Reply) -> list[str]:
    """prompt, reused, share, computed, new, milliseconds to the first token, why."""
    report = reply.report or {}
    miss = report.get("miss") or {}
    why = reply.error or " ".join(filter(None, [miss.get("reason"), miss.get("field"), miss.get("detail")]))
    prompt = int(reply.usage.get("prompt_tokens") or 0)
    return [
        str(prompt),
        str(cached(reply)),
        f"{reused(reply):.1%}",
        str(report.get("computed", prompt - cached(reply))),
        str(report.get("new", "-")),
        f"{reply.seconds_to_first * 1000:.0f}",
        why[:100],
    ]
