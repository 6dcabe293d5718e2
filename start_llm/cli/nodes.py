"""The command ``nodes``: how the servers are that the proxy shares requests with. Each is asked by itself."""

from __future__ import annotations

import argparse
import json
from typing import Any

from start_llm.core.settings import Settings
from start_llm.core.sizes import as_size
from start_llm.dashboard.tables import print_table, printable
from start_llm.host.ports import address
from start_llm.proxy.nodes import look_at, nodes_of

_HEADINGS = ("NODE", "STATE", "VERSION", "MODELS", "RUNNING", "WAITING", "MEMORY", "STORED", "SHARE")
_ANSWERING = frozenset({"ready", "busy"})


def main(settings: Settings, options: argparse.Namespace) -> int:
    """0: all nodes answer; 1: one does not."""
    nodes = nodes_of(settings, address(settings.mlx_host, settings.mlx_port))
    found = look_at(nodes)
    if options.json:
        print(json.dumps(found, indent=1))
    elif not settings.nodes and found[0]["state"] == "gone":
        print(f"NODES is not set, and no server answers on port {settings.mlx_port}.")
    else:
        if not settings.nodes:
            print("NODES is not set: the proxy has this server alone.")
        print_table(_HEADINGS, [_row(node) for node in found], words=("NODE", "STATE", "VERSION", "MODELS"))
        for node in found:
            if node["detail"]:
                print(printable(f"{node['name']}: {node['detail']}"))
    return 0 if all(node["state"] in _ANSWERING for node in found) else 1


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    if not node["version"]:
        return node["name"], node["state"], *["-"] * (len(_HEADINGS) - 2)
    loaded = [name for name in node["loaded"] if "+" not in name]
    counts = (node["running"], node["waiting"])
    sizes = (as_size(node["memory_bytes"]), f"{node['stored_tokens']:,}", f"{node['share']:.0%}")
    return node["name"], node["state"], node["version"], ", ".join(loaded) or "-", *map(str, counts), *sizes
