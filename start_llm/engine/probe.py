"""Finds out what a model can do when it is loaded for the first time; at later loads that is read from a table.

Model thread; only the model's own answers are computed there, all else in the background.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from start_llm.core.errors import BadRequest
from start_llm.core.settings import Settings
from start_llm.engine.checks import TooSlow, check_decoding, greedy
from start_llm.models.background import Say, in_background
from start_llm.models.capabilities import ProbeResult
from start_llm.models.loader import LoadedModel
from start_llm.models.overrides import LEAST_CONTEXT
from start_llm.models.probe_table import PROBES, keep_probe, probe_key, read_probe
from start_llm.models.tool_probe import ASKED, SAID, SECONDS, TOKENS, ExpectedStyle, ToolCallProbe, question, read_call
from start_llm.parsing.choice import Detokenizer
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.probe import probe
from start_llm.prompt.traits import TemplateError, Traits

log = logging.getLogger(__name__)

_ROUND = 1024  # a context is told in whole thousands


def probe_model(
    settings: Settings, loaded: LoadedModel, say: Say, *, alone: bool = True
) -> Generator[float, None, LoadedModel]:
    """The model with all its capabilities. Pauses while others work for it, and after each pass that it computes.

    `say` gets a line about a model that was asked for the first time. How it decodes is checked if it is `alone`: no
    other rank computes a part of it.
    """
    table, key, asks = settings.cache_dir / PROBES, probe_key(loaded.files), settings.model_probe != "off"
    known = yield from in_background(lambda: read_probe(table, key))
    result = known
    if result is None or (asks and result.trial.outcome == "open"):
        try:
            result = yield from _probe(loaded, asks)
        except TemplateError:  # whoever builds the prompts of this model says why it cannot be served
            return loaded
        if asks:
            say(f"probe     {result.trial.report(loaded.capabilities.tool_parser)}")
        result = replace(result, decoding=None if known is None else known.decoding)
    if result.decoding is None and alone:
        text = loaded.tokenizer.encode(ASKED.content, add_special_tokens=False)
        result = replace(result, decoding=(yield from check_decoding(loaded.model, loaded.make_cache, text)))
    if result != known:
        found = result
        yield from in_background(lambda: keep_probe(table, key, found))
    probed = replace(loaded, capabilities=loaded.capabilities.with_probe(result))
    for topic, line in probed.capabilities.report():
        if topic != "thinking":  # `models show` tells it: most who start a model ask for no budget
            say(f"{topic:10}{line}")
    return probed


def _probe(loaded: LoadedModel, asks: bool) -> Generator[float, None, ProbeResult]:
    """`asks`: the model is asked what it can do. Raises TemplateError: the template cannot render one user message."""
    template, tokenizer, traits = yield from in_background(lambda: _render(loaded))
    family, hints = loaded.capabilities.family.value, loaded.capabilities.hints
    assert hints is not None, "the tokenizer of a loaded model was read"
    trial = ToolCallProbe("open", why="MODEL_PROBE is off")
    if asks:
        assumed = hints.facts(family)
        expected = ExpectedStyle(
            (assumed["tool_parser"].value, *family.tool_parsers),
            assumed["reasoning_parser"].value,
            hints.think_tags,
        )
        generate = partial(greedy, loaded.model, eos=loaded.eos, most=TOKENS, seconds=SECONDS)
        trial = yield from probe_tool_calls(
            template, tokenizer, traits, expected, lambda: loaded.wrapper.detokenizer, generate
        )
    return ProbeResult(family.name, hints, traits, trial)


def probe_tool_calls(
    template: HFTemplate,
    tokenizer: HFTokenizer,
    traits: Traits,
    expected: ExpectedStyle,
    detokenizer: Callable[[], Any],
    generate: Callable[[Sequence[int]], Iterator[int | None]],
) -> Generator[float, None, ToolCallProbe]:
    """Asks and reads; pauses after each token. The rest is done in the background. `generate`: as `greedy`."""
    if not traits.tools:
        return ToolCallProbe("none", why="its template shows no tools")
    try:
        tokens, in_reasoning = yield from in_background(lambda: question(template, tokenizer, traits))
    except BadRequest as error:
        return ToolCallProbe("none", why=error.message)
    began = time.monotonic()
    streaming = Detokenizer((yield from in_background(detokenizer)))
    pieces: list[str] = []
    slow = False
    try:
        for token in generate(tokens):
            if token is not None:
                pieces.append(streaming.feed(token))
            yield 0.0
    except TooSlow:
        slow = True
    except Exception as error:  # a model's own code may do anything; it is served all the same
        log.warning("a model could not be asked for a tool call", exc_info=True)
        return ToolCallProbe("open", why=f"asking it failed ({type(error).__name__}: {error})")
    text = "".join(pieces) + streaming.finish()
    count, seconds = len(pieces), round(time.monotonic() - began, 3)
    found = yield from in_background(lambda: read_call(text, expected, in_reasoning=in_reasoning))
    if found is not None:
        return ToolCallProbe("called", *found, text[:SAID], tokens=count, seconds=seconds)
    outcome, why = ("open", "it takes too long here") if slow else ("silent", "")
    return ToolCallProbe(outcome, said=text[:SAID], why=why, tokens=count, seconds=seconds)


def _render(loaded: LoadedModel) -> tuple[HFTemplate, HFTokenizer, Traits]:
    """The model's template, tokenizer, and what the template can show. Background thread. Raises TemplateError."""
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
