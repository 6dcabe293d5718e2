"""Finds out at load what a chat template does, by rendering small conversations. Nothing is guessed from names."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Set
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any

from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.traits import VARIABLE, Clock, TemplateError, Traits

_A, _B, _C, _D = "alpha7", "bravo7", "carol7", "delta7"
_MOMENTS = (datetime(2001, 2, 3, 4, 5, 6), datetime(2012, 11, 10, 21, 48, 57))
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool7",
        "description": "tools7",
        "parameters": {"type": "object", "properties": {"k7": {"type": "string"}}, "required": ["k7"]},
    },
}

_ARGUMENTS: dict[str, Any] = {"mapping": {"k7": "v7"}, "string": '{"k7": "v7"}'}


def _message(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


_system, _user, _assistant = (partial(_message, role) for role in ("system", "user", "assistant"))
_result = partial(_message, "tool", tool_call_id="callprobe", name="probe_tool7")


def _call(arguments: Any, call_id: str = "callprobe") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "probe_tool7", "arguments": arguments}}


def _probe_dates(template: HFTemplate) -> tuple[str, ...]:
    """Formats of the dates in what the template prints, found by rendering with two clocks."""
    found: dict[str, None] = {}
    for messages in ([_user(_A)], [_system(_D), _user(_A)]):
        for tools in (None, [_PROBE_TOOL]):
            asked: dict[str, None] = {}

            def clock(form: str, moment: datetime, asked: dict[str, None] = asked) -> str:
                asked[form] = None
                return moment.strftime(form)

            clocks = [{VARIABLE: partial(clock, moment=moment)} for moment in _MOMENTS]
            with suppress(TemplateError):
                if len({template.render(messages, tools, True, **variables) for variables in clocks}) > 1:
                    found.update(asked)
    return tuple(found)


class _Prober:
    def __init__(self, template: HFTemplate, tokenizer: HFTokenizer) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.seen = hashlib.sha256()
        self.dates = _probe_dates(template)
        # With a clock that stands the fingerprint is the same tomorrow.
        self._pinned = {VARIABLE: Clock(_MOMENTS[0], self.dates)} if self.dates else {}

    def render(self, messages: list[dict[str, Any]], tools: Any = None, agp: bool = False, **kwargs: Any) -> str | None:
        try:
            text = self.template.render(messages, tools, agp, **self._pinned, **kwargs)
        except TemplateError:
            text = None
        self.seen.update(repr(text).encode())
        return text

    def shows(self, messages: list[dict[str, Any]], *needles: str, tools: Any = None, **kwargs: Any) -> bool:
        """The template takes the messages and shows the needles, in this order."""
        text = self.render(messages, tools, **kwargs)
        return text is not None and re.search(".*".join(map(re.escape, needles)), text, re.DOTALL) is not None


def probe(template: HFTemplate, tokenizer: HFTokenizer) -> Traits:
    """Renders the probes.

    Raises:
        TemplateError: if the template cannot even render one user message.
    """
    prober = _Prober(template, tokenizer)
    template.render([_user(_A)], None, True)
    calls, string_too, results = _probe_tools(prober)
    key, inline, old = _probe_reasoning(prober)
    starts, structure = _probe_specials(prober)
    switches = tuple(
        name
        for name in ("enable_thinking", "thinking")
        if prober.render([_user(_A)], agp=True, **{name: True}) != prober.render([_user(_A)], agp=True, **{name: False})
    )
    shows = prober.shows
    first, system, second = _user(_A), _system(_D), _system(_C)
    traits: dict[str, Any] = {
        "system": shows([system, first], _D, _A),
        "systems": shows([system, second, first], _D, _C, _A),
        "mid_system": shows([first, system, _user(_B)], _A, _D, _B)
        and shows([first, _assistant(_B), system, _user(_C)], _A, _B, _D, _C)
        and shows([second, first, system], _C, _A, _D),
        "repeats": shows([first, _user(_B)], _A, _B)
        and shows([first, _assistant(_B), _assistant(_C), _user(_D)], _A, _B, _C, _D),
        "assistant_first": shows([_assistant(_A), _user(_B)], _A, _B),
        "tools": shows([first], "probe_tool7", tools=[_PROBE_TOOL]) and shows([first], "k7", tools=[_PROBE_TOOL]),
    }
    preserve = _probe_preserve(prober, key)
    encoded = repr(tokenizer.encode(f"probe {_A} ünï 123\n\n  x")) + repr(sorted(tokenizer.special_tokens.items()))
    prober.seen.update(encoded.encode())
    return Traits(
        **traits,
        calls=calls,
        string_too=string_too,
        results=results,
        reasoning_key=key,
        reasoning_beside_text=key is None or calls is None or _takes_both(prober, key, calls),
        reasoning_inline=inline,
        old_reasoning=old,
        switches=switches,
        preserve=preserve,
        many_calls=calls is None or _takes_many_calls(prober, calls),
        short_ids=calls is not None and _refuses_long_ids(prober, calls),
        starts=starts,
        structure=structure,
        dates=prober.dates,
        fingerprint=prober.seen.hexdigest(),
    )


def _probe_tools(prober: _Prober) -> tuple[str | None, bool, bool]:
    """Traits `calls`, `string_too`, `results`."""

    def rendered(arguments: Any) -> str:
        turn = [_user(_A), _assistant("", tool_calls=[_call(arguments)]), _result(_C), _user(_D)]
        return prober.render(turn, [_PROBE_TOOL]) or ""

    mapping, string = rendered(_ARGUMENTS["mapping"]), rendered(_ARGUMENTS["string"])
    good_mapping = all(word in mapping.split(_A)[-1] for word in ("probe_tool7", "k7", "v7")) and "{'k7'" not in mapping
    good_string = _ARGUMENTS["string"] in string
    if good_mapping and '\\"k7\\"' not in mapping:
        calls: str | None = "mapping"
    else:
        calls = "string" if good_string else None
    shown = {"mapping": mapping, "string": string, None: ""}[calls]
    return calls, good_string, calls is not None and _C in shown and _D in shown


def _takes_many_calls(prober: _Prober, calls: str) -> bool:
    pair = [_call(_ARGUMENTS[calls], name) for name in ("callprob1", "callprob2")]
    results = [_result(text, tool_call_id=call["id"]) for text, call in zip((_C, _D), pair, strict=True)]
    return prober.shows([_user(_A), _assistant("", tool_calls=pair), *results], _A, "v7", "v7", _C, _D)


def _takes_both(prober: _Prober, key: str, calls: str) -> bool:
    answer = _assistant(_B, tool_calls=[_call(_ARGUMENTS[calls])], **{key: "why7"})
    return prober.shows([_user(_A), answer, _result(_C)], _A, _B, _C)


def _refuses_long_ids(prober: _Prober, calls: str) -> bool:
    def rendered(name: str) -> str | None:
        answer = _assistant("", tool_calls=[_call(_ARGUMENTS[calls], name)])
        return prober.render([_user(_A), answer, _result(_C, tool_call_id=name)])

    return rendered("call_probe_0123456") is None and rendered("callprobe") is not None


def _probe_reasoning(prober: _Prober) -> tuple[str | None, bool, bool]:
    """The key that reasoning is read from, whether tags in the content are shown, whether old turns show it."""
    tool = {"role": "tool", "content": _C, "tool_call_id": "callprobe"}
    for key in ("reasoning_content", "reasoning", "thinking"):
        last = [_user(_A), _assistant(_B, **{key: "why7"})]
        loop = [_user(_A), _assistant("", tool_calls=[_call({"k7": "v7"})], **{key: "why7"}), tool]
        if prober.shows(last, "why7") or prober.shows(loop, "why7"):
            return key, False, prober.shows([*last, _user(_C)], "why7")
    inline = prober.shows(
        [_user(_A), _assistant(f"<think>\nwhy7\n</think>\n\n{_B}"), _user(_C)], "<think>\nwhy7", _B, _C
    )
    return None, inline, False


def _probe_preserve(prober: _Prober, key: str | None) -> bool:
    if key is None:
        return False
    old = [_user(_A), _assistant(_B, **{key: "why7"}), _user(_C)]
    return prober.shows(old, "why7", preserve_thinking=True) and prober.render(
        old, preserve_thinking=False
    ) != prober.render(old, preserve_thinking=True)


def special_pattern(names: Set[str]) -> re.Pattern[str] | None:
    """Matches any of `names`, the longest first."""
    if not names:
        return None
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name))))


def _probe_specials(prober: _Prober) -> tuple[frozenset[str], frozenset[str]]:
    """Special tokens that begin messages, and all that the template writes."""
    specials = prober.tokenizer.special_tokens
    pattern = special_pattern(specials.keys())
    if pattern is None:
        return frozenset(), frozenset()
    ends = {name for name, index in specials.items() if index in prober.tokenizer.eos_ids}
    structure: set[str] = set()
    starts = _leading(prober, pattern)
    first, call, system = _user(_A), _assistant(_B, tool_calls=[_call(_ARGUMENTS["mapping"])]), _system(_D)
    talks = (  # messages of every role follow each other; the words that are said in turn
        ([first, _assistant(_B), _user(_C)], (_A, _B, _C)),
        ([first, call, _result(_D)], (_A, _B, _D)),
        ([system, first], (_D, _A)),
        ([first, _assistant(_B), system, _user(_C)], (_B, _D, _C)),
    )
    for messages, words in talks:
        text = prober.render(messages, agp=True) or ""
        structure.update(pattern.findall(text))
        for before, after in pairwise(words):
            found = pattern.findall(_between(text, before, after))
            if found and starts.isdisjoint(found):
                starts.add(([name for name in found if name not in ends] or found)[-1])
    return frozenset(starts), frozenset(structure)


def _leading(prober: _Prober, pattern: re.Pattern[str]) -> set[str]:
    """The special token that the generation prompt begins with, if it does with one."""
    closed, opened = prober.render([_user(_A)]) or "", prober.render([_user(_A)], agp=True) or ""
    lead = pattern.match(opened[len(closed) :]) if opened.startswith(closed) else None
    return {lead.group()} if lead is not None else set()


def _between(text: str, before: str, after: str) -> str:
    """What stands between two words; nothing where one of them is missing."""
    if before not in text or after not in text:
        return ""
    return text[text.find(before) + len(before) : text.rfind(after)]
