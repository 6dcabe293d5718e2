"""``models show NAME``: all that is known of a model on this disk, and who says so. Loads nothing."""

from __future__ import annotations

import difflib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from start_llm.core.errors import NotSupported
from start_llm.core.settings import Settings
from start_llm.dashboard.tables import print_table
from start_llm.host.home import command as program
from start_llm.host.home import home
from start_llm.models.capabilities import read_capabilities
from start_llm.models.catalog import EMBEDDED_NAME, folder_of, stored_models
from start_llm.models.fingerprint import fingerprint
from start_llm.models.probe_table import FILE, probe_key, read_probe
from start_llm.models.recommended import full_name


def show(settings: Settings, name: str | None, *, as_json: bool) -> int:
    """0; 1 with a sentence where there is no such model here, or its own file is wrong."""
    asked = name or settings.model_path or EMBEDDED_NAME
    source = full_name(asked) or asked
    folder = _folder(settings, source)
    if folder is None:
        stored = stored_models(home() / settings.cache_dir, settings.model_path)
        found = difflib.get_close_matches(
            asked.rpartition("/")[2], [model.name.rpartition("/")[2] for model in stored], 1
        )
        near = f" Did you mean {found[0]}?" if found else ""
        print(f"{asked} is not on this disk; {program()} models lists what is.{near}", file=sys.stderr)
        return 1
    tried = home() / settings.cache_dir / FILE
    probe = read_probe(tried, probe_key(fingerprint(folder))) if tried.exists() else None
    try:
        capabilities, makers = read_capabilities(settings, home() / settings.model_files.expanduser(), source, folder)
    except (NotSupported, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if probe is not None:
        capabilities = capabilities.with_probe(probe)
    facts = capabilities.facts
    if as_json:
        values = {key: {"value": fact.value, "source": fact.source} for key, fact in facts.items()}
        trial = None if probe is None else asdict(probe.trial)
        file = None if capabilities.overrides.path is None else str(capabilities.overrides.path)
        print(
            json.dumps({"name": source, "folder": str(folder), "file": file, "trial": trial, "facts": values}, indent=1)
        )
        return 0
    print(f"{source}  ({folder})")
    rows = [(name, _text(fact.value), fact.source) for name, fact in facts.items()]
    print_table(("", "VALUE", "FOUND BY"), rows, words=("", "VALUE", "FOUND BY"))
    for why in makers.odd.values():
        print(f"{why}.")
    if probe is None:
        print(f"How it writes is found out when it is served for the first time: {program()} serve {asked}")
    else:
        report = probe.trial.report(capabilities.tool_parser)
        for line in (report, *capabilities.decoding.report()):
            print(f"{line[:1].upper()}{line[1:]}.")
    return 0


def _folder(settings: Settings, source: str) -> Path | None:
    """Where the model lies: by its path or repository, else by the last part of its name."""
    found = folder_of(source)
    if found is not None and (found / "config.json").is_file():
        return found
    stored = stored_models(home() / settings.cache_dir, settings.model_path)
    named = (model.folder for model in stored if source in {model.name.rpartition("/")[2], _plain(model.folder)})
    return next(named, None)


def _plain(folder: Path) -> str:
    """The embedded model's name without what says how its weights are kept."""
    return EMBEDDED_NAME if folder.name.startswith(f"{EMBEDDED_NAME}-") else folder.name


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
