"""Calls whose parameters stand in tags: Qwen's XML and its relatives.

One reader for all of them; a family is a `Tags` table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from start_llm.parsing.calls import NAME, CallBuilder, Calls, NotACall, Parse
from start_llm.parsing.jsonstream import Dialect
from start_llm.parsing.schema import Schema
from start_llm.parsing.source import ENDS, LEAKED, STARTS, Step, turn_ends
from start_llm.parsing.tools.base import Opener, ToolFormat
from start_llm.parsing.tools.values import Trim, ValueEnd, ValueReader, ValueWriter

_ATTRIBUTE = re.compile(r"""([\w:]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_MAX_HEAD = 300


@dataclass(frozen=True)
class Tags:
    """A family's markup.

    Attributes:
        outer: (start, end) around all calls, ``("", "")`` if there is none.
        call: (start of the head, end of the call).
        param: (start of the head, end of the value).
        head_end: what ends a head.
        trim_end: one line break before a value's end is always markup.
        json_block: head of a block that holds all arguments as JSON, and its end.
        cdata: values may be wrapped as in XML.
    """

    outer: tuple[str, str]
    call: tuple[str, str]
    param: tuple[str, str]
    head_end: str = ">"
    trim_end: bool = False
    json_block: tuple[str, str] | None = None
    cdata: bool = False


QWEN = Tags(
    ("<tool_call>", "</tool_call>"), ("<function", "</function>"), ("<parameter", "</parameter>"), trim_end=True
)


def tagged_block(tags: Tags) -> Parse:
    """Reads calls from after `outer`'s start to its end."""

    def parse(calls: Calls) -> Step[None]:
        source = calls.source
        count = 0
        while True:
            yield from source.skip()
            if not (yield from source.starts((tags.call[0],))):
                break
            yield from tagged_call(calls, tags)
            count += 1
        if not count:
            raise NotACall

    return parse


def tagged_call(calls: Calls, tags: Tags) -> Step[None]:
    """One call; its head is what comes next."""
    source = calls.source
    head = yield from _head(calls, tags, tags.call[0])
    name = head.get("name") or head.get("tool") or head.get("")
    if not name or not all(NAME.match(char) for char in name):
        raise NotACall
    call = calls.begin(name)
    while True:  # the opening, twice
        yield from source.skip()
        if not (yield from source.starts((f"{tags.call[0]}={name}{tags.head_end}",))):
            break
        source.take(len(f"{tags.call[0]}={name}{tags.head_end}"))
    if (yield from source.ahead()) == "{":
        enders = tuple(end for end in (tags.call[1], tags.outer[1], *LEAKED) if end)
        complete = yield from calls.json_arguments(call, Dialect(enders=enders))
    elif tags.json_block and (yield from source.starts((tags.json_block[0],))):
        yield from source.until((tags.head_end,), _MAX_HEAD)
        complete = yield from calls.json_arguments(call, Dialect(enders=(tags.json_block[1],)))
        yield from source.skip()
        yield from source.accept((tags.json_block[1],))
    else:
        complete = yield from _parameters(calls, call, tags)
    yield from source.skip()
    closed = yield from source.accept((tags.call[1],))
    calls.finish(call, complete and bool(closed))


def _head(calls: Calls, tags: Tags, start: str) -> Step[dict[str, str]]:
    """A tag's attributes; ``""`` is the key of the value in ``<tag=value>``. Raises NotACall."""
    source = calls.source
    source.take(len(start))
    text, end = yield from source.until((tags.head_end, "\n"), _MAX_HEAD)
    if not end or any(token in text + end for token in (*ENDS, *STARTS)):  # the answer ended inside the tag
        raise NotACall
    text = text.strip()
    if text.startswith("="):
        return {"": text[1:].strip().strip("\"'")}
    found = {match[1]: match[2] or match[3] or match[4] or "" for match in _ATTRIBUTE.finditer(text)}
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in found.items()}


def _parameters(calls: Calls, call: CallBuilder, tags: Tags) -> Step[bool]:
    """All parameters, as one JSON object. False if the text ended inside one."""
    source = calls.source
    complete = True
    while complete:
        yield from source.skip()
        if not (yield from source.starts((tags.param[0],))):
            break
        try:
            head = yield from _head(calls, tags, tags.param[0])
        except NotACall:  # cut inside the head
            head = {}
        key = head.get("name") or head.get("key") or head.get("") or ""
        if key:
            call.key(key)
        complete = bool(key) and (yield from _value(calls, call, tags, head, key))
    call.end_keys()
    return complete


def _value(calls: Calls, call: CallBuilder, tags: Tags, head: dict[str, str], key: str) -> Step[bool]:
    def plausible(tag: str) -> Step[bool]:
        return _ends_value(calls, call, tags, tag, equals="" in head)

    source = calls.source
    schema = call.schema.member(key)
    if not schema.types and head.get("type"):
        schema = Schema({"type": head["type"]})
    close = ValueEnd(
        tags=(tags.param[1],),
        followers=tuple(tag for tag in (tags.param[0], *tags.call, *tags.outer) if tag),
        breaks=tuple(tag for tag in (tags.param[0], tags.call[1], tags.outer[1]) if tag),
        restart=tuple(tag for tag in (tags.outer[0], tags.call[0]) if tag),
    )
    wrapped = tags.cdata and (yield from _opens_cdata(calls))
    if wrapped:
        close = ValueEnd(tags=("]]>",), followers=(tags.param[1],))
    trim = Trim.NONE if wrapped else Trim.BOTH if tags.trim_end else Trim.PAIR
    writer = ValueWriter(call, schema, trim, as_string=head.get("string") == "true")
    complete = yield from ValueReader(source, close, writer, plausible).read_value()
    if wrapped:
        yield from source.skip()
        yield from source.accept((tags.param[1],))
    return complete


def _opens_cdata(calls: Calls) -> Step[bool]:
    source = calls.source
    offset = yield from source.blank()
    found = yield from source.starts(("<![CDATA[",), offset)
    if found:
        source.take(offset + len(found))
    return bool(found)


def _ends_value(calls: Calls, call: CallBuilder, tags: Tags, tag: str, *, equals: bool) -> Step[bool]:
    """Whether markup inside a value shows that the value's closing tag is missing.

    Args:
        equals: the value's own tag is ``<tag=name>``. A tag that is written in another way is text about a format.
    """
    source = calls.source
    if tag == tags.param[0]:
        keys = [key for key in call.schema.keys if key not in call.keys]
        return bool((yield from source.starts(_equal_heads(tags, tag, keys) if equals else _named_heads(tag, keys))))
    again = _heads(tags, tags.call[0], calls.names)
    if tags.outer[0]:
        again = tuple(f"{tags.outer[0]}{space}{tags.call[0]}" for space in ("", "\n")) + again
    if tag in (tags.outer[0], tags.call[0]):
        return bool((yield from source.starts(again)))
    return (yield from turn_ends(source, len(tag), again + ((tags.outer[1],) if tags.outer[1] else ())))


def _heads(tags: Tags, start: str, names: Iterable[str]) -> tuple[str, ...]:
    """The ways to write a tag with one of these names."""
    each = tuple(names)
    return _equal_heads(tags, start, each) + _named_heads(start, each)


def _equal_heads(tags: Tags, start: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{start}={name}{tags.head_end}" for name in names)


def _named_heads(start: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f'{start} {word}="{name}"' for name in names for word in ("name", "key", "tool"))


def tagged_format(ident: str, tags: Tags) -> ToolFormat:
    """The format of a family, opened by its outer markup or by a bare call."""

    def bare(calls: Calls) -> Step[None]:
        yield from tagged_call(calls, tags)

    opener = (
        Opener(tags.outer[0], tagged_block(tags)) if tags.outer[0] else Opener(f"{tags.call[0]} name=", bare, keep=True)
    )
    closers = tuple(tag for tag in (tags.outer[1], tags.call[1], tags.param[1]) if tag)
    return ToolFormat(ident, (opener,), closers)


MINIMAX_M2 = tagged_format(
    "minimax_m2",
    Tags(("<minimax:tool_call>", "</minimax:tool_call>"), ("<invoke", "</invoke>"), ("<parameter", "</parameter>")),
)
MUSE_SPARK = tagged_format(
    "muse_spark",
    Tags(
        ("<atem:function_calls>", "</atem:function_calls>"),
        ("<atem:invoke", "</atem:invoke>"),
        ("<atem:parameter", "</atem:parameter>"),
    ),
)
MINICPM5 = tagged_format("minicpm5", Tags(("", ""), ("<function", "</function>"), ("<param", "</param>"), cdata=True))
KIMI_K3 = tagged_format(
    "kimi_k3",
    Tags(
        ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        ("<|open|>call", "<|close|>call<|sep|>"),
        ("<|open|>argument", "<|close|>argument<|sep|>"),
        head_end="<|sep|>",
        json_block=("<|open|>json", "<|close|>json<|sep|>"),
    ),
)
