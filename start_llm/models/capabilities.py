"""What a checkpoint can do, read from its config, tokenizer and template; no weights needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from start_llm.core.reasoning_tags import REASONING_STYLES
from start_llm.models.family import Family
from start_llm.prompt.probe import Traits

DEFAULT_CONTEXT = 32768
Kind = Literal["text", "vision", "embeddings", "audio"]
_AUDIO = ("whisper", "parakeet", "kokoro", "bark", "csm", "outetts", "voxtral", "wav2vec", "canary")
_ENCODERS = ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "modernbert", "nomic-bert", "deberta")


@dataclass(frozen=True, slots=True)
class Fact:
    """`source`: who says so: probe, template, vocabulary, config, family, setting or file."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Signs:
    """What vocabulary and template show of how a model writes; ``None`` where they show nothing.

    Attributes:
        known: the tool format that mlx-lm reads in the template.
        marked: the tool format that tokens of the vocabulary belong to.
        reasoning: id of the reasoning style, ``tags`` where only `think_tags` say it.
        think_tags: the reasoning block's opening and closing text, where the tokenizer knows them.
        budget: each of the tags is one token, so that thinking can be ended.
    """

    known: str | None = None
    marked: str | None = None
    reasoning: str | None = None
    think_tags: tuple[str, str] | None = None
    budget: bool = False

    def tool_parser(self, family: Family) -> Fact:
        """The id of the tool-call format, as far as nobody has asked the model."""
        if self.known is not None:
            return Fact(self.known, "template")
        if self.marked is not None:
            return Fact(self.marked, "vocabulary")
        return Fact(family.tool_parsers[0], "family")

    def reasoning_parser(self, family: Family) -> Fact:
        """The id of the reasoning style. Models of which nothing is known may still write ``<think>`` as text."""
        if self.reasoning is not None:
            return Fact(self.reasoning, "vocabulary")
        return Fact(family.reasoning_parser or "think_tag", "family")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model can do: one record, made when it is loaded.

    Attributes:
        family: a name of `models.family`.
        context: most tokens of a request: the model's own limit, or less where its KV finds no room.
        tool_parser, reasoning_parser: ids of `parsing.registry`; ``tags`` is the style of `think_tags`.
        think_tags: the reasoning block's opening and closing text, where the tokenizer knows them.
        traits: what the template does; ``None`` where nobody has looked yet.
        facts: all of it by name with its source, for people.
    """

    family: str
    context: int
    tool_parser: str
    reasoning_parser: str
    think_tags: tuple[str, str] | None
    traits: Traits | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)


def kind_of(config: Mapping[str, Any]) -> Kind:
    """What goes in and comes out, by ``config.json``."""
    kind = str(config.get("model_type", "")).lower().replace("_", "-")
    if kind.startswith(_AUDIO) or ("audio_config" in config and "vision_config" not in config):
        return "audio"
    if kind in _ENCODERS:
        return "embeddings"
    return "vision" if isinstance(config.get("vision_config"), dict) else "text"


def context_length(config: Mapping[str, Any]) -> int:
    """The model's own limit; multimodal configs keep it in ``text_config``."""
    text = config.get("text_config") or {}
    for source in (config, text):
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
            value = source.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return DEFAULT_CONTEXT


def read_signs(
    known: str | None, vocab: Mapping[str, int], think_tags: tuple[str, str] | None, template: str = ""
) -> Signs:
    """
    Args:
        known: the tool format that mlx-lm found in the template, if any.
        think_tags: as the tokenizer knows them.
    """
    reasoning = _reasoning(vocab, think_tags, template)
    marked = None
    if reasoning == "harmony":
        marked = "harmony"
    elif "<|python_tag|>" in vocab or "<|python_start|>" in vocab:
        marked = "llama"
    style = REASONING_STYLES.get(reasoning or "")
    tags = think_tags or ((style.start, style.end) if style is not None and style.start else None)
    return Signs(known, marked, reasoning, think_tags, tags is not None and all(tag in vocab for tag in tags))


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


def read_config(folder: Path) -> dict[str, Any]:
    """Raises FileNotFoundError, ValueError."""
    data = json.loads((folder / "config.json").read_text("utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"{folder / 'config.json'} is not a JSON object")
    return data
