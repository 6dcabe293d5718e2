"""The commands `models show`, what is known of a model on this disk and who says so, and `models set`. Load nothing."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from start_llm.cli.commands import context_word
from start_llm.core.errors import Explained, NotSupported, WrongWords
from start_llm.core.modelmap import MAIN_NAME
from start_llm.core.reasoning_tags import REASONING_STYLES
from start_llm.core.settings import Settings
from start_llm.core.sizes import as_size
from start_llm.dashboard.tables import print_table
from start_llm.host.hints import hint
from start_llm.host.home import command as program
from start_llm.host.home import home
from start_llm.models.capabilities import NO_TEMPLATE, Capabilities, Fact, ProbeResult, read_capabilities
from start_llm.models.catalog import (
    EMBEDDED_NAME,
    describe,
    folder_of,
    has_template,
    is_embedded,
    name_of,
    stored_models,
)
from start_llm.models.drafters import DrafterFiles, own_drafter
from start_llm.models.family import families
from start_llm.models.fingerprint import fingerprint
from start_llm.models.overrides import EDITED, FOLDER, SAMPLING, write_overrides
from start_llm.models.probe_table import PROBES, probe_key, read_probe
from start_llm.models.recommended import full_name, published_head
from start_llm.models.servers import card_of, server_cards

_SAMPLING = ("temperature", "top_p", "top_k")


def show(settings: Settings, options: argparse.Namespace) -> int:
    """A summary; with ``--all`` every fact. Raises Explained: no such model is here, or its own file is wrong."""
    asked, source, folder = _model(settings, options.name)
    # What the model's last load found out, if it was ever loaded here.
    probe = read_probe(home() / settings.cache_dir / PROBES, probe_key(fingerprint(folder)))
    try:
        known, makers = read_capabilities(settings, home() / FOLDER, source, folder)
    except (NotSupported, OSError, ValueError) as error:
        raise Explained(str(error)) from None
    known = known if probe is None else known.with_probe(probe)
    head = own_drafter(folder, known.config)
    drafts = {} if head is None else {"drafts_by": Fact(head.detail, "weights")}
    facts = {**known.facts, **drafts}
    if options.json:
        about = {"name": source, "folder": str(folder), "file": known.overrides.path, "trial": probe and probe.trial}
        print(json.dumps({**about, "facts": facts}, indent=1, default=_plain))
        return 0
    print(f"{source}  ({folder})")
    if options.all:
        rows = [(name, _text(fact.value), fact.source) for name, fact in facts.items()]
        print_table(("", "VALUE", "FOUND BY"), rows, words=("", "VALUE", "FOUND BY"))
    else:
        print("\n".join(f"{name:12} {text}" for name, text in _summary(facts, folder)))
    print("".join(f"{why}.\n" for why in makers.odd.values()), end="")
    for line in _remarks(known, probe, head, folder, options.all):
        print(f"{line[:1].upper()}{line[1:]}.")
    if probe is None:
        print(f"How it writes is found out when it is served for the first time: {program()} serve {asked}")
    if not options.all:
        print(f"{program()} models show {asked} --all    every fact, and who says so")
    return 0


def set_values(settings: Settings, options: argparse.Namespace) -> int:
    """Writes values into the model's own file. Raises Explained, WrongWords: then nothing is written."""
    if not options.name or ("=" in options.name and not options.values):
        given = options.name or "KEY=VALUE"
        raise WrongWords(f"models set: NAME is missing: {program()} models set NAME {given}")
    asked, _, folder = _model(settings, options.name)
    source = EMBEDDED_NAME if is_embedded(str(folder)) else name_of(folder)
    try:
        own = write_overrides(home() / FOLDER, source, dict(map(_change, options.values)))
    except NotSupported as error:
        raise WrongWords(str(error)) from None
    print(own.path.read_text("utf-8") if own.path else "", end="")
    card = card_of(server_cards(settings) or [], source)
    loaded = card is not None and card["details"].get("state") != "stored"
    then = f"; `{hint(f'models unload {asked}', settings.mlx_port)}` takes it out of memory" if loaded else ""
    print(f"# {own.path}: counts when {source} is loaded next{then}", file=sys.stderr)
    return 0


def _change(word: str) -> tuple[str, Any]:
    """Key and value of ``KEY=VALUE``; ``None`` where the value is empty. Raises NotSupported."""
    key, sign, text = word.partition("=")
    if not sign:
        raise NotSupported(f"{word!r} is not KEY=VALUE; there are {', '.join(EDITED)}.")
    key = f"sampling.{key}" if key in SAMPLING else key
    words: dict[str, Any] = {"": None} | dict.fromkeys(("on", "yes"), True) | dict.fromkeys(("off", "no"), False)
    if text.lower() in words:
        return key, words[text.lower()]
    try:
        return key, json.loads(re.sub(r"^(-?)\.", r"\g<1>0.", context_word(text)))  # JSON has no number ``.5``
    except ValueError:
        raise NotSupported(f"{key}={text}: {text!r} is neither a number nor on, off, true, false.") from None


def _model(settings: Settings, named: str | None) -> tuple[str, str, Path]:
    """The model's name, its path or repository, and its folder; the main model where none is named.

    It lies where its path or repository says, or has that last part of a name. Raises Explained: it is not here.
    """
    asked = named if named and named != MAIN_NAME else settings.model_path or EMBEDDED_NAME
    source = full_name(asked) or asked
    found = folder_of(source)
    if found is not None and (found / "config.json").is_file():
        return asked, source, found
    names = []
    for model in stored_models(home() / settings.cache_dir, settings.model_path):
        names.append(model.name.rpartition("/")[2])
        # the embedded model's folder also says how its weights are kept
        bare = EMBEDDED_NAME if model.folder.name.startswith(f"{EMBEDDED_NAME}-") else model.folder.name
        if source in {names[-1], bare}:
            return asked, source, model.folder
    near = difflib.get_close_matches(asked.rpartition("/")[2], names, 1)
    question = f" Did you mean {near[0]}?" if near else ""
    raise Explained(f"{asked} is not on this disk; `{program()} models` lists what is.{question}")


def _remarks(
    known: Capabilities, probe: ProbeResult | None, head: DrafterFiles | None, folder: Path, every: bool
) -> Iterator[str]:
    """What else is worth knowing."""
    if probe is not None and every:
        yield probe.trial.report(known.tool_parser)
    if head is None and (published := published_head(name_of(folder))):
        yield f"a head that drafts for it is published: {program()} pull {published}"
    if probe is None and not has_template(folder):
        yield NO_TEMPLATE
    yield from (line for _, line in known.report())


def _plain(value: Any) -> Any:
    """For JSON."""
    return str(value) if isinstance(value, Path) else asdict(value)


def _summary(facts: Mapping[str, Fact], folder: Path) -> Iterator[tuple[str, str]]:
    """(what, words) for people: as much as fits a few lines."""
    stored = describe(str(folder), folder)
    family = families()[facts["family"].value]
    yield "kind", f"{facts['kind'].value}, family {family.name} ({family.title}), {as_size(stored.size)}"
    if stored.problem:
        yield "problem", stored.problem
    yield "context", f"{facts['context'].value:,} tokens (by {facts['context'].source})"
    if stored.can:
        yield "can", ", ".join(stored.can)
    if "tool_parser" in facts:
        yield "tools", f"{facts['tool_parser'].value} (by {facts['tool_parser'].source})"
    if "reasoning_parser" in facts:
        yield "reasoning", _reasoning(facts["reasoning_parser"])
    if "drafts_by" in facts:
        yield "drafts by", str(facts["drafts_by"].value)
    sampling = [f"{name} {facts[key].value:g}" for name in _SAMPLING if (key := f"sampling.{name}") in facts]
    if sampling:
        yield "sampling", f"{', '.join(sampling)} (by {facts[f'sampling.{_SAMPLING[0]}'].source})"


def _reasoning(style: Fact) -> str:
    """Of its family only is known what the tags would be."""
    tags = REASONING_STYLES.get(style.value)
    if style.source != "family" or tags is None or not tags.start:
        return f"{style.value} (by {style.source})"
    return f"no sign of it in the model's files; {tags.start} ... {tags.end} in an answer is read as reasoning"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
