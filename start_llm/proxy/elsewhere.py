"""Names of MODEL_MAP that mean a model of another provider of LiteLLM's: ``gpt-5=openai/gpt-5``.

The proxy asks that provider for who asks by such a name, and for nobody else. The server itself refuses the name.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from start_llm.core.modelmap import ModelMap

BACK_HEADER = "x-start-llm-elsewhere"
"""Of what is sent to a provider. Should that lead back to this proxy, by whatever way, it ends there."""
_PROVIDERS = "provider_endpoints_support_backup.json"  # LiteLLM's own table


def names_elsewhere(table: ModelMap, is_here: Callable[[str], object]) -> dict[str, str]:
    """Models elsewhere by their names. A pattern is no name.

    LiteLLM knows the provider, the environment has its key, and no such model is on this disk: ``openai/gpt-oss-20b``
    is a repository, too.
    """
    models = {entry.pattern: entry.model for entry in table.entries if not {"*", "?"} & {*entry.pattern}}
    meant = {name: model for name, model in models.items() if table.resolve(name) == model and _has_key(model)}
    return {name: model for name, model in meant.items() if _provider(model) in _providers() and not is_here(model)}


def _provider(model: str) -> str:
    return model.partition("/")[0]


def _has_key(model: str) -> bool:
    return "/" in model and bool(os.environ.get(f"{_provider(model).upper()}_API_KEY"))


def _providers() -> Collection[str]:
    """Those that LiteLLM knows, read without importing it, which takes seconds."""
    library = importlib.util.find_spec("litellm")
    table = Path(library.origin).with_name(_PROVIDERS) if library and library.origin else Path()
    return json.loads(table.read_text(encoding="utf-8"))["providers"] if table.is_file() else ()


def entries(models: Mapping[str, str], keepalive_seconds: float) -> list[dict[str, Any]]:
    """LiteLLM's, which looks for the provider's key and address in the environment."""
    common = {"drop_params": True, "keepalive_seconds": keepalive_seconds, "extra_headers": {BACK_HEADER: "no"}}
    return [
        {"model_name": name, "litellm_params": {"model": model, **common}, "model_info": {"id": f"elsewhere:{name}"}}
        for name, model in models.items()
    ]


def cards(models: Mapping[str, str]) -> list[dict[str, Any]]:
    """For lists of models."""
    return [{"id": name, "object": "model", "created": 0, "owned_by": _provider(models[name])} for name in models]
