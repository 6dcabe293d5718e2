"""What a model can do: one record, and for each fact the source that says so. Knows no MLX, and asks no model.

Sources, from the weakest to the strongest; a later one replaces what an earlier one says:

1. ``config.json``, and the file of the model's family (`family`);
2. the vocabulary and the chat template's text (`WritingHints`);
3. the probe (`probe`): the template was rendered, and the model was asked to call a tool;
4. the user's override file (`overrides`);
5. memory, for the context only.

A sampling default comes from the first of these that has one: override file, setting, ``generation_config.json``,
built-in value.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from start_llm.core.reasoning_tags import REASONING_STYLES
from start_llm.core.settings import Settings
from start_llm.models.checkpoint import context_length, library_of, maps_ngrams, read_config
from start_llm.models.family import Family, chosen_family, detect_family, families
from start_llm.models.generation_config import GenerationConfig, read_generation_config
from start_llm.models.overrides import SAMPLING, TRAIT_NAMES, Overrides, read_overrides
from start_llm.models.tool_probe import ToolCallProbe
from start_llm.prompt.traits import Traits

Kind = Literal["text", "vision", "embeddings", "audio"]
NO_TEMPLATE = "the model brings no chat template; plain ChatML is used, which it may not know"
_AUDIO = ("whisper", "parakeet", "kokoro", "bark", "csm", "outetts", "voxtral", "wav2vec", "canary")
_ENCODERS = ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "modernbert", "nomic-bert", "deberta")
_MARKS: dict[str, str] = tomllib.loads(Path(__file__).with_name("marks.toml").read_text("utf-8"))
"""Tool formats by a token that stands in no other family's vocabulary."""


@dataclass(frozen=True, slots=True)
class Fact:
    """`source`: probe, template, vocabulary, config, family, setting, file, makers, memory or built-in."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class WritingHints:
    """What vocabulary and template show of how a model writes; ``None`` where they show nothing."""

    known: str | None = None  # the tool format that mlx-lm reads in the template
    marked: str | None = None  # the tool format that tokens of the vocabulary belong to
    reasoning: str | None = None  # id of the reasoning style; ``tags``: `think_tags` are of no known style
    think_tags: tuple[str, str] | None = None  # what opens and closes a thought, where the tokenizer knows that
    budget: bool = False  # each of the tags is one token, so that thinking can be ended
    template: bool = True  # the model brings a chat template

    def facts(self, family: Family) -> dict[str, Fact]:
        """Models of which nothing is known may still write ``<think>`` as text."""
        tools = Fact(self.marked, "vocabulary") if self.marked else Fact(family.tool_parsers[0], "family")
        style = Fact(family.reasoning_parser or "think_tag", "family")
        return {
            "tool_parser": Fact(self.known, "template") if self.known else tools,
            "reasoning_parser": Fact(self.reasoning, "vocabulary") if self.reasoning else style,
            "thinking_budget": Fact(self.budget, "vocabulary"),
        }


@dataclass(frozen=True, slots=True)
class DecodingCheck:
    """Which ways of decoding cannot be used: the reason as the end of a sentence, or an empty text."""

    batches: str = ""  # rows of different lengths in a batch
    reuse: str = ""  # a row that goes on from stored KV

    def report(self) -> list[str]:
        """Lines for people; none if all can be used."""
        found = [f"requests are decoded one by one, not in batches: {self.batches}"] if self.batches else []
        return [*found, *([f"stored KV is not used: {self.reuse}"] if self.reuse else [])]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What was found out about a checkpoint, once. It is kept on disk (`probe_table`)."""

    family: str  # the name of the one that was detected with the vocabulary
    hints: WritingHints
    traits: Traits
    trial: ToolCallProbe
    decoding: DecodingCheck | None = None  # ``None``: it is to be checked at a later load

    def facts(self) -> dict[str, Fact]:
        found = {f"template.{name}": Fact(getattr(self.traits, name), "probe") for name in TRAIT_NAMES}
        if self.trial.format is not None:
            found["tool_parser"] = Fact(self.trial.format, "probe")
        if self.trial.reasoning is not None:
            found["reasoning_parser"] = Fact(self.trial.reasoning, "probe")
        if self.decoding is not None:
            found["batches"] = Fact(not self.decoding.batches, "probe")
            found["kv_reuse"] = Fact(not self.decoding.reuse, "probe")
        return found


@dataclass(frozen=True)
class Capabilities:
    """What is known of a model. Its sources are filled in as they become known; `facts` combines them."""

    name: str  # the last part of its repository's or folder's name
    config: Mapping[str, Any]
    family: Fact  # its value is a `Family`
    overrides: Overrides = field(default_factory=Overrides)
    sampling: Mapping[str, Fact] = field(default_factory=dict)  # values for requests that do not say them
    hints: WritingHints | None = None  # ``None`` until the tokenizer is read
    probe: ProbeResult | None = None  # ``None`` until the model is probed
    memory_context: int | None = None  # tokens of KV that memory has room for, if that limits the context

    @cached_property
    def facts(self) -> Mapping[str, Fact]:
        """By name, in the order in which they are shown. What no source has said yet is left out."""
        family: Family = self.family.value
        found = {
            "kind": Fact(kind_of(self.config), "config"),
            "family": Fact(family.name, self.family.source),
            "context": Fact(context_length(self.config), "config"),
        }
        if library_of(self.config) == "mlx-vlm":
            found["library"] = Fact("mlx-vlm", "config")
        if maps_ngrams(self.config):
            found["ngram_table"] = Fact("read from the disk, not in memory", "config")
        if self.hints is not None:
            found |= self.hints.facts(family)
            if not self.hints.template:
                found["chat_template"] = Fact("plain ChatML", "built-in")
        if family.efforts:
            found["reasoning_effort"] = Fact(family.efforts, "family")
        if self.probe is not None:
            found |= self.probe.facts()
        found |= {name: Fact(value, "file") for name, value in self.overrides.values.items() if name != "family"}
        if self.memory_context is not None:
            found["context"] = Fact(self.memory_context, "memory")
        if found["kind"].value in ("text", "vision"):
            found |= {f"sampling.{name}": fact for name, fact in self.sampling.items()}
        return found

    @property
    def context(self) -> int:
        """Most tokens of a request: the model's own limit, or less where its KV finds no room."""
        return int(self.facts["context"].value)

    @property
    def tool_parser(self) -> str:
        """Id of `parsing.registry`. KeyError before the tokenizer is read."""
        return str(self.facts["tool_parser"].value)

    @property
    def reasoning_parser(self) -> str:
        """Id of `parsing.registry`; ``tags`` is the style of `think_tags`. KeyError before the tokenizer is read."""
        return str(self.facts["reasoning_parser"].value)

    @property
    def decoding(self) -> DecodingCheck:
        """How its rows may be decoded. What was not checked may be used."""
        return (self.probe and self.probe.decoding) or DecodingCheck()

    def report(self) -> list[tuple[str, str]]:
        """For people, what requests do not get here as they may expect: topics, each with a line."""
        found = []
        if self.hints is not None and not self.hints.template:
            found.append(("template", NO_TEMPLATE))
        if self.hints is not None and self.hints.reasoning is not None and not self.hints.budget:
            found.append(("thinking", "budgets are not kept: no token of its own ends the thoughts of this model"))
        return [*found, *(("decoding", line) for line in self.decoding.report())]

    @cached_property
    def traits(self) -> Traits | None:
        """What the template does, as the override file corrects it; its fingerprint is then another one."""
        if self.probe is None:
            return None
        traits, changed = self.probe.traits, self.overrides.table("template")
        if not changed:
            return traits
        text = f"{traits.fingerprint} {json.dumps(changed, sort_keys=True)}"
        return replace(traits, **changed, fingerprint=hashlib.sha256(text.encode()).hexdigest())

    def with_vocabulary(self, vocab: Mapping[str, int], hints: WritingHints) -> Capabilities:
        """After the tokenizer was read."""
        family = self.family
        if family.source == "config":
            family = Fact(detect_family(self.config, self.name, vocab), "config")
        return replace(self, family=family, hints=hints)

    def with_probe(self, probe: ProbeResult) -> Capabilities:
        """After the model was probed. Where its tokenizer was not read, what was found with it then counts."""
        family = self.family
        if self.hints is None and family.source == "config" and probe.family in families():
            family = Fact(families()[probe.family], "config")
        return replace(self, family=family, hints=probe.hints, probe=probe)


def read_capabilities(
    settings: Settings, override_folder: Path, source: str, folder: Path
) -> tuple[Capabilities, GenerationConfig]:
    """What the files of a model say, without its tokenizer; and its makers' recommendations, to tell people of them.

    `source` is the repository or folder that the user named, `folder` where that lies on this disk.

    Raises NotSupported: the override file cannot be used, or MODEL_FAMILY is none; OSError, ValueError: ``config.json``
    cannot be read.
    """
    config = read_config(folder)
    name = source.rstrip("/").rsplit("/", 1)[-1]
    overrides = read_overrides(override_folder, source)
    if "family" in overrides.values:
        family = Fact(families()[overrides.values["family"]], "file")
    elif settings.model_family is not None:
        family = Fact(chosen_family(settings.model_family), "setting")
    else:
        family = Fact(detect_family(config, name), "config")
    makers = read_generation_config(folder)
    return Capabilities(name, config, family, overrides, sampling_facts(settings, overrides, makers)), makers


def sampling_facts(settings: Settings, overrides: Overrides, makers: GenerationConfig) -> dict[str, Fact]:
    """Each value that requests are drawn with which do not say it, by its name."""
    recommended = makers.values if settings.makers_sampling else {}
    values = {name: getattr(settings, f"default_{name}") for name in SAMPLING}
    chosen = [name for name in SAMPLING if f"default_{name}" in settings.model_fields_set]
    facts = {name: Fact(value, "built-in") for name, value in values.items()}
    facts |= {name: Fact(value, "makers") for name, value in recommended.items()}
    facts |= {name: Fact(values[name], "setting") for name in chosen}
    return facts | {name: Fact(value, "file") for name, value in overrides.table("sampling").items()}


def sampling_report(facts: Mapping[str, Fact], makers: GenerationConfig) -> list[str]:
    """Lines for people: which recommendations are used, and which cannot be used."""
    used = ", ".join(f"{name} {fact.value:g}" for name, fact in facts.items() if fact.source == "makers")
    lines = [f"{used}, as the model's makers recommend"] if used else []
    return [*lines, *(why for name, why in makers.odd.items() if not name or facts[name].source == "built-in")]


def kind_of(config: Mapping[str, Any]) -> Kind:
    """What goes in and comes out, by ``config.json``."""
    kind = str(config.get("model_type", "")).lower().replace("_", "-")
    if kind.startswith(_AUDIO) or ("audio_config" in config and "vision_config" not in config):
        return "audio"
    if kind in _ENCODERS:
        return "embeddings"
    return "vision" if isinstance(config.get("vision_config"), dict) else "text"


def read_hints(
    known: str | None, vocab: Mapping[str, int], think_tags: tuple[str, str] | None, template: str = ""
) -> WritingHints:
    """`known`: the tool format that mlx-lm found in the template, if any. `think_tags`: as the tokenizer knows them."""
    reasoning = _reasoning(vocab, think_tags, template)
    marked = (
        "harmony" if reasoning == "harmony" else next((form for mark, form in _MARKS.items() if mark in vocab), None)
    )
    if marked == "minimax_m3":  # mlx-lm takes its template for one of plain JSON
        known = None
    style = REASONING_STYLES.get(reasoning or "")
    tags = think_tags or ((style.start, style.end) if style is not None and style.start else None)
    return WritingHints(known, marked, reasoning, think_tags, tags is not None and all(tag in vocab for tag in tags))


def _reasoning(vocab: Mapping[str, int], think_tags: tuple[str, str] | None, template: str) -> str | None:
    """What stands in the vocabulary counts first, then what the chat template writes."""
    if "<|channel|>" in vocab and "<|message|>" in vocab:
        return "harmony"
    if think_tags is not None:
        return next((s.id for s in REASONING_STYLES.values() if (s.start, s.end) == think_tags), "tags")
    tagged = [style for style in REASONING_STYLES.values() if style.start]
    found = [style.id for style in tagged if style.start in vocab and style.end in vocab]
    found += [style.id for style in tagged if style.start in template and style.end in template]
    return found[0] if found else None
