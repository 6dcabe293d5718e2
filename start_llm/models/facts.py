"""What is known of a model, each fact with who says so. Knows no MLX: `models show` loads nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from start_llm.models.capabilities import Fact, Signs, context_length, kind_of
from start_llm.models.family import Family
from start_llm.models.override import TRAIT_NAMES, Override
from start_llm.models.trial import Trial
from start_llm.prompt.probe import Traits


def facts_of(
    config: Mapping[str, Any],
    family: Fact,
    override: Override,
    sampling: Mapping[str, Fact],
    *,
    signs: Signs | None = None,
    traits: Traits | None = None,
    trial: Trial | None = None,
) -> dict[str, Fact]:
    """By name, in the order in which they are shown. What nobody has looked at yet (``None``) is left out.

    Args:
        family: its value is a `Family`.
        sampling: as of `makers.sampling_facts`.
    """
    kin: Family = family.value
    facts = {
        "kind": Fact(kind_of(config), "config"),
        "family": Fact(kin.name, family.source),
        "context": Fact(context_length(config), "config"),
    }
    if signs is not None:
        facts["tool_parser"] = signs.tool_parser(kin)
        facts["reasoning_parser"] = signs.reasoning_parser(kin)
        facts["thinking_budget"] = Fact(signs.budget, "vocabulary")
    if kin.efforts:
        facts["reasoning_effort"] = Fact(kin.efforts, "family")
    if trial is not None and trial.outcome == "called":
        if trial.format is not None:
            facts["tool_parser"] = Fact(trial.format, "probe")
        if trial.reasoning is not None:
            facts["reasoning_parser"] = Fact(trial.reasoning, "probe")
    if traits is not None:
        facts |= {f"template.{name}": Fact(getattr(traits, name), "probe") for name in TRAIT_NAMES}
    for name, value in override.values.items():
        if name != "family":
            facts[name] = Fact(value, "file")
    if facts["kind"].value in ("text", "vision"):
        facts |= {f"sampling.{name}": fact for name, fact in sampling.items()}
    return facts
