"""Formats whose calls are a head that names the tool, and JSON: DeepSeek, Gemma, gpt-oss, Kimi K2, Mistral."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from start_llm.parsing.calls import MAX_NAME, NAME, Calls, NotACall, Opener, Parse, ToolFormat
from start_llm.parsing.jsonstream import Dialect
from start_llm.parsing.source import LEAKED, Source, Step
from start_llm.parsing.tools.hermes import json_block, open_fence

type Pair = tuple[str, str]


def headed_call(
    calls: Calls, name: str, dialect: Dialect, ident: str | None = None, *, ends: tuple[str, ...] = ()
) -> Step[None]:
    """The call whose head was read: its arguments, and one of `ends` if it stands behind them."""
    call = calls.begin(name, ident)
    complete = yield from call.json_arguments(dialect)
    if ends:
        yield from calls.source.after_space(*ends)
    call.finish(complete)


def spaced_name(calls: Calls) -> Step[str]:
    """A bare name, maybe ``""``, and the white space around it."""
    yield from calls.source.skip()
    name = yield from calls.source.span(NAME, MAX_NAME)
    yield from calls.source.skip()
    return name


def _sections(
    ident: str, section: Pair, call: Pair, separator: str, parse: Callable[[Calls, Dialect], Step[None]]
) -> ToolFormat:
    """Calls that `parse` reads, from behind ``call[0]``; all between those of `section`, which may be missing."""
    dialect = Dialect(enders=(call[1], section[1], call[0], *LEAKED))

    def block(calls: Calls) -> Step[None]:
        source = calls.source
        any_read = False
        while True:
            opened = yield from source.after_space(call[0], section[0])
            if opened == section[0]:
                continue
            if any_read and not opened:
                break
            yield from parse(calls, dialect)
            any_read = True
        yield from source.accept((section[1],))

    openers = (Opener(section[0], block), Opener(call[0], block, keep=True))
    return ToolFormat(ident, openers, (section[1], call[1], separator))


# --- Kimi K2: ``functions.name:0<|tool_call_argument_begin|>{...}`` ---

_KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI_HEAD = re.compile(r"(?:functions\.)?(.+?)(?::(\d+))?")


def _kimi(calls: Calls, dialect: Dialect) -> Step[None]:
    head = yield from spaced_name(calls)
    match = _KIMI_HEAD.fullmatch(head)
    if match is None or not (yield from calls.source.accept((_KIMI_ARGUMENTS,))):
        raise NotACall
    yield from headed_call(calls, match[1], dialect, head if match[2] else None, ends=(_KIMI_END,))


KIMI_K2 = _sections(
    "kimi_k2",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", _KIMI_END),
    _KIMI_ARGUMENTS,
    _kimi,
)

# --- DeepSeek: ``name<｜tool▁sep｜>{...}``; before V3.1 ``function<｜tool▁sep｜>name`` and a fence ---

_SEPARATOR, _DEEPSEEK_END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _deepseek(calls: Calls, dialect: Dialect) -> Step[None]:
    source = calls.source
    name = yield from spaced_name(calls)
    if not name or not (yield from source.accept((_SEPARATOR,))):
        raise NotACall
    yield from source.skip()
    if (yield from source.ahead()) not in ("{", "`"):  # what stood in front was the kind of tool
        name = yield from spaced_name(calls)
        if not name:
            raise NotACall
    fence = yield from open_fence(source)
    yield from headed_call(calls, name, dialect, ends=(fence or _DEEPSEEK_END,))
    if fence:
        yield from source.after_space(_DEEPSEEK_END)


DEEPSEEK = _sections(
    "deepseek",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁call▁begin｜>", _DEEPSEEK_END),
    _SEPARATOR,
    _deepseek,
)

# --- Gemma: ``call:name{key:<|"|>text<|"|>,other:1}``, with ``<escape>`` as the quote in the older form ---


def _gemma(ident: str, start: str, end: str, quote: str) -> ToolFormat:
    dialect = Dialect(quotes=(quote, '"'), enders=(end, *LEAKED), restart=(f"{start}call:",))

    def block(calls: Calls) -> Step[None]:
        source = calls.source
        any_read = False
        while True:
            yield from source.skip(" \t\r\n,")
            yield from source.accept((start,))
            if not (yield from source.accept(("call:",))):
                break
            name = yield from spaced_name(calls)
            if (yield from source.ahead()) != "{":
                raise NotACall
            yield from headed_call(calls, name, dialect)
            any_read = True
        if not any_read:
            raise NotACall
        yield from source.accept((end,))

    return ToolFormat(ident, (Opener(start, block),), (end,))


GEMMA4 = _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _gemma("function_gemma", "<start_function_call>", "<end_function_call>", "<escape>")

# --- Mistral: ``[TOOL_CALLS]name[ARGS]{...}``, repeated, or a JSON list behind ``[TOOL_CALLS]`` ---

_OPEN, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_JSON = Dialect(enders=(_OPEN, *LEAKED))


def _mistral(calls: Calls) -> Step[None]:
    source = calls.source
    while (yield from source.after_space(_OPEN)):
        pass
    if (yield from source.ahead()) in ("[", "{"):
        yield from json_block(calls, _MISTRAL_JSON)
        return
    while True:  # until something is no call, which is given back
        name = yield from spaced_name(calls)
        ident = ""
        if (yield from source.accept((_ID,))):
            ident = yield from spaced_name(calls)
        if not name or not (yield from source.accept((_ARGS,))):
            raise NotACall
        yield from headed_call(calls, name, _MISTRAL_JSON, ident or None)
        yield from source.skip(" \t\r\n,;")
        yield from source.accept((_OPEN,))


MISTRAL = ToolFormat("mistral", (Opener(_OPEN, _mistral),))

# --- gpt-oss's harmony: messages with a header that names a channel and, for a call, its recipient ---
# ``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.name
# <|constrain|>json<|message|>{...}<|call|>``. The analysis channel is reasoning; everything else is text.

HARMONY_HEADS = ("<|start|>", "<|channel|>")
HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|message|>")
_MESSAGE = "<|message|>"
_MAX_HEADER = 300
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_OTHERS = re.compile(r"\s*(?:user|system|developer|tool|functions\.[\w.\-]+)\b")
_HARMONY_JSON = Dialect(enders=("<|call|>", "<|end|>", "<|return|>", "<|start|>"), restart=("<|start|>assistant",))

HARMONY = ToolFormat("harmony")


@dataclass(frozen=True)
class HarmonyHeader:
    """`recipient` is the tool that is called, ``""`` if none is. `other`: the message is somebody else's."""

    channel: str
    recipient: str
    other: bool = False


def harmony_header(source: Source, head: str) -> Step[HarmonyHeader | None]:
    """What stands between `head`, just consumed, and the message; ``None`` if none follows. What is cut is consumed."""
    text, found = yield from source.until((_MESSAGE,), _MAX_HEADER)
    if not found:
        if source.closed and source.left <= _MAX_HEADER:
            source.take(source.left)
        return None
    channel = _CHANNEL.search(head + text)
    recipient = _RECIPIENT.search(text)
    return HarmonyHeader(
        channel[1] if channel else "",
        recipient[1].removeprefix("functions.") if recipient else "",
        other=head == "<|start|>" and bool(_OTHERS.match(text)),
    )


def harmony_call(recipient: str) -> Parse:
    """Reads the arguments of a call whose header was read."""
    return partial(headed_call, name=recipient, dialect=_HARMONY_JSON, ends=("<|call|>", "<|end|>"))
