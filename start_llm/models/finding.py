"""What a model can do, as it is loaded: read from the table, or found out now and written there.

Model thread; but it only asks the model there, all else is done aside.

    config, tokenizer, template --signs--> assumed --traits (rendering), trial (generating)--> Probed --> facts

What the model's own file says comes last and counts most.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

from start_llm.core.settings import Settings
from start_llm.models.aside import aside
from start_llm.models.capabilities import Capabilities, Fact
from start_llm.models.facts import facts_of
from start_llm.models.loader import LoadedModel
from start_llm.models.override import LEAST_CONTEXT, Override
from start_llm.models.probed import FILE, Probed, ProbeTable, probe_key
from start_llm.models.trial import Answer, Assumed, Trial, told, try_tools
from start_llm.parsing.registry import ExternalFormat
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.ports import TemplateError
from start_llm.prompt.probe import Traits, probe

_ROUND = 1024  # a context is told in whole thousands


def find_out(
    settings: Settings, loaded: LoadedModel, answer: Answer | None, say: Callable[[str], None]
) -> Generator[float, None, LoadedModel]:
    """The model with its whole record. Pauses while others work for it, and after each token that it answers.

    Args:
        answer: how it answers a prompt; ``None``: it is not asked (MODEL_PROBE=off).
        say: is told in a line what a model did that was asked for the first time.
    """
    table = settings.cache_dir / FILE
    known = yield from aside(lambda: _known(table, loaded))
    if known is not None and not (answer is not None and known[0].trial.outcome == "open"):
        return replace(loaded, capabilities=known[1])
    try:
        probed = yield from _probe(loaded, answer)
    except TemplateError:  # whoever builds the prompts of this model says why it cannot be served
        return loaded
    capabilities = yield from aside(lambda: _keep(table, loaded, probed))
    if answer is not None:
        say(f"probe     {told(probed.trial, loaded.capabilities.tool_parser)}")
    return replace(loaded, capabilities=capabilities)


def _known(path: Path, loaded: LoadedModel) -> tuple[Probed, Capabilities] | None:
    """What an earlier start found out, if one did, and the record with it."""
    table = ProbeTable(path)
    try:
        probed = table.get(probe_key(loaded.files))
    finally:
        table.close()
    return None if probed is None else (probed, resolve(loaded, probed))


def _keep(path: Path, loaded: LoadedModel, probed: Probed) -> Capabilities:
    table = ProbeTable(path)
    try:
        table.put(probe_key(loaded.files), loaded.name, probed)
    finally:
        table.close()
    return resolve(loaded, probed)


def _probe(loaded: LoadedModel, answer: Answer | None) -> Generator[float, None, Probed]:
    """Raises TemplateError: the template cannot render one user message."""
    template, tokenizer, traits = yield from aside(lambda: _render(loaded))
    kin = loaded.family.value
    trial = Trial("open", why="MODEL_PROBE is off")
    if answer is not None:
        parser, signs = loaded.tool_parser, loaded.signs
        assumed = Assumed(
            order=(str(signs.tool_parser(kin).value), *kin.tool_parsers),
            reasoning=str(signs.reasoning_parser(kin).value),
            think_tags=signs.think_tags,
            external=None if parser is None else ExternalFormat(parser.start, parser.end, parser.parse),
        )
        trial = yield from try_tools(template, tokenizer, traits, assumed, lambda: loaded.wrapper.detokenizer, answer)
    return Probed(kin.name, loaded.signs, traits, trial)


def _render(loaded: LoadedModel) -> tuple[HFTemplate, HFTokenizer, Traits]:
    """Raises TemplateError."""
    template, tokenizer = HFTemplate(loaded.tokenizer), HFTokenizer(loaded.tokenizer, eos_ids=loaded.eos)
    return template, tokenizer, probe(template, tokenizer)


def resolve(loaded: LoadedModel, probed: Probed) -> Capabilities:
    """The record: what was found, with the model's own file over it."""
    facts = facts_of(
        loaded.config,
        loaded.family,
        loaded.override,
        loaded.sampling,
        signs=probed.signs,
        traits=probed.traits,
        trial=probed.trial,
    )
    return replace(
        loaded.capabilities,
        tool_parser=facts["tool_parser"].value,
        reasoning_parser=facts["reasoning_parser"].value,
        traits=with_traits(probed.traits, loaded.override),
        facts=facts,
    )


def with_traits(traits: Traits, override: Override) -> Traits:
    """`traits` as the model's file wants them; their fingerprint is then another one."""
    changed = override.traits()
    if not changed:
        return traits
    text = f"{traits.fingerprint} {json.dumps(changed, sort_keys=True)}"
    return replace(traits, **changed, fingerprint=hashlib.sha256(text.encode()).hexdigest())


def with_room(loaded: LoadedModel, most_tokens: int | None, say: Callable[[str], None]) -> LoadedModel:
    """The model with the context that its KV finds room for, if that is less than its own.

    Args:
        most_tokens: of one request beside the weights; ``None``: nobody knows.
    """
    able = loaded.capabilities
    if most_tokens is None or most_tokens >= able.context:
        return loaded
    practical = max(LEAST_CONTEXT, most_tokens // _ROUND * _ROUND)
    say(f"context   {practical:,} tokens of KV fit into memory; {loaded.name} could take {able.context:,}")
    facts = {**able.facts, "context": Fact(practical, "memory")}
    return replace(loaded, capabilities=replace(able, context=practical, facts=facts))
