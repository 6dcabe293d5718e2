"""gpt-oss's harmony: messages with a header that names a channel and, for a call, its recipient.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.name
<|constrain|>json<|message|>{...}<|call|>``. The analysis channel is reasoning; everything else is text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from start_llm.parsing.calls import Calls, Parse
from start_llm.parsing.jsonstream import Dialect
from start_llm.parsing.source import Source, Step
from start_llm.parsing.tools.base import ToolFormat
from start_llm.parsing.tools.headed import headed_call

HEADS = ("<|start|>", "<|channel|>")
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|message|>")
_MESSAGE = "<|message|>"
_MAX_HEADER = 300
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_OTHERS = re.compile(r"\s*(?:user|system|developer|tool|functions\.[\w.\-]+)\b")
_JSON = Dialect(enders=("<|call|>", "<|end|>", "<|return|>", "<|start|>"), restart=("<|start|>assistant",))

HARMONY = ToolFormat("harmony")


@dataclass(frozen=True)
class HarmonyHeader:
    """`recipient` is the tool that is called, ``""`` if none is. `other`: the message is somebody else's."""

    channel: str
    recipient: str
    other: bool = False


def header(source: Source, head: str) -> Step[HarmonyHeader | None]:
    """What stands between `head`, just consumed, and the message; ``None`` if no message follows.

    A header that the end of the text cut is consumed.
    """
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


def call_to(recipient: str) -> Parse:
    """Reads the arguments of a call whose header was read."""

    def parse(calls: Calls) -> Step[None]:
        return headed_call(calls, recipient, _JSON, ends=("<|call|>", "<|end|>"))

    return parse
