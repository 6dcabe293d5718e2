"""Finds out what a model can do when it is loaded for the first time; at later loads that is read from a table.

Model thread; only the model's own answers are computed there, all else in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from start_llm.core.settings import Settings
from start_llm.models.background import Say, in_background
from start_llm.models.capabilities import DecodingCheck, ProbeResult
from start_llm.models.loader import LoadedModel
from start_llm.models.overrides import LEAST_CONTEXT
from start_llm.models.probe_table import PROBES, keep_probe, probe_key, read_probe
from start_llm.models.tool_probe import ExpectedStyle, Generate, ToolCallProbe, probe_tool_calls
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.probe import probe
from start_llm.prompt.traits import TemplateError, Traits

_ROUND = 1024  # a context is told in whole thousands

Check = Callable[[], Generator[float, None, DecodingCheck | None]]
"""Checks how a model decodes; ``None``: that could not be found out."""


def probe_model(
    settings: Settings, loaded: LoadedModel, generate: Generate | None, check: Check | None, say: Say
) -> Generator[float, None, LoadedModel]:
    """The model with all its capabilities. Pauses while others work for it, and after each pass that it computes.

    `generate`: how it answers a prompt; ``None``: it is not asked (MODEL_PROBE=off). `check`: ``None``: it is not
    checked. `say` gets a line about a model that was asked for the first time.
    """
    path, key = settings.cache_dir / PROBES, probe_key(loaded.files)
    known = yield from in_background(lambda: read_probe(path, key))
    result = known
    if result is None or (generate is not None and result.trial.outcome == "open"):
        try:
            result = yield from _probe(loaded, generate)
        except TemplateError:  # whoever builds the prompts of this model says why it cannot be served
            return loaded
        if generate is not None:
            say(f"probe     {result.trial.report(loaded.capabilities.tool_parser)}")
        result = replace(result, decoding=None if known is None else known.decoding)
    if result.decoding is None and check is not None:
        result = replace(result, decoding=(yield from check()))
    if result != known:
        found = result
        yield from in_background(lambda: keep_probe(path, key, found))
    probed = replace(loaded, capabilities=loaded.capabilities.with_probe(result))
    for topic, line in probed.capabilities.report():
        if topic != "thinking":  # `models show` tells it: most who start a model ask for no budget
            say(f"{topic:10}{line}")
    return probed


def _probe(loaded: LoadedModel, generate: Generate | None) -> Generator[float, None, ProbeResult]:
    """Raises TemplateError: the template cannot render one user message."""
    template, tokenizer, traits = yield from in_background(lambda: _render(loaded))
    family, hints = loaded.capabilities.family.value, loaded.capabilities.hints
    assert hints is not None, "the tokenizer of a loaded model was read"
    trial = ToolCallProbe("open", why="MODEL_PROBE is off")
    if generate is not None:
        assumed = hints.facts(family)
        expected = ExpectedStyle(
            (assumed["tool_parser"].value, *family.tool_parsers),
            assumed["reasoning_parser"].value,
            hints.think_tags,
        )
        detokenizer = lambda: loaded.wrapper.detokenizer  # noqa: E731
        trial = yield from probe_tool_calls(template, tokenizer, traits, expected, detokenizer, generate)
    return ProbeResult(family.name, hints, traits, trial)


def _render(loaded: LoadedModel) -> tuple[HFTemplate, HFTokenizer, Traits]:
    """Raises TemplateError."""
    template, tokenizer = HFTemplate(loaded.tokenizer), HFTokenizer(loaded.tokenizer, eos_ids=loaded.eos)
    inspected = loaded.capabilities.probe
    return template, tokenizer, probe(template, tokenizer) if inspected is None else inspected.traits


def limit_context(loaded: LoadedModel, most_tokens: int | None, say: Say) -> LoadedModel:
    """The model with a context of `most_tokens`, if its own is more: for these its KV finds room. ``None``: unknown."""
    capabilities = loaded.capabilities
    if most_tokens is None or most_tokens >= capabilities.context:
        return loaded
    practical = max(LEAST_CONTEXT, most_tokens // _ROUND * _ROUND)
    say(f"context   {practical:,} tokens of KV fit into memory; {loaded.name} could take {capabilities.context:,}")
    limited = replace(capabilities, memory_context=practical)
    return replace(loaded, capabilities=limited, context=min(loaded.context, practical))
