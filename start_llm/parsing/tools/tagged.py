"""Calls whose parameters stand in tags: Qwen's XML and its relatives, and GLM's and LongCat's keys and values.

One reader for all of them; a family is a `Tags` table. GLM writes
``<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from start_llm.parsing.calls import MAX_NAME, NAME, CallBuilder, Calls, NotACall, Opener, ToolFormat
from start_llm.parsing.jsonstream import Dialect
from start_llm.parsing.schema import Schema, dump, escape, parse_literal
from start_llm.parsing.source import ENDS, LEAKED, STARTS, Source, Step, turn_ends

_ATTRIBUTE = re.compile(r"""([\w:]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_MAX_HEAD = 300
_MAX_KEY = 200
_CDATA = "<![CDATA["


@dataclass(frozen=True)
class Tags:
    """A family's markup, and the reader of calls that are written in it."""

    outer: tuple[str, str]  # (start, end) around all calls, ``("", "")`` if there is none
    call: tuple[str, str]  # (start of the head, end of the call); ``("", "")`` where `outer` stands around each call
    param: tuple[str, str]  # (start of the head, end of the value)
    head_end: str = ">"  # what ends a head
    value_start: str = ""  # what stands between a head that is a key alone and its value; ``""``: heads are tags
    trim_end: bool = False  # one line break before a value's end is always markup
    json_block: tuple[str, str] | None = None  # head of a block that holds all arguments as JSON, and its end
    cdata: bool = False  # values may be wrapped as in XML

    def read_block(self, calls: Calls) -> Step[None]:
        """Reads calls from after `outer`'s start to its end."""
        source = calls.source
        count = 0
        while True:
            yield from source.skip()
            if not (yield from source.starts((self.call[0],))):
                break
            yield from self.read_call(calls)
            count += 1
        if not count:
            raise NotACall

    def read_call(self, calls: Calls) -> Step[None]:
        """One call; its head is what comes next."""
        source = calls.source
        head = yield from self._tag(source, self.call[0])
        name = head.get("name") or head.get("tool") or head.get("")
        if not name or not all(NAME.match(char) for char in name):
            raise NotACall
        call = calls.begin(name)
        while (yield from source.after_space(f"{self.call[0]}={name}{self.head_end}")):
            pass  # the opening, twice
        if (yield from source.ahead()) == "{":
            complete = yield from self._json_arguments(call)
        elif self.json_block and (yield from source.starts((self.json_block[0],))):
            yield from source.until((self.head_end,), _MAX_HEAD)
            complete = yield from call.json_arguments(Dialect(enders=(self.json_block[1],)))
            yield from source.after_space(self.json_block[1])
        else:
            complete = yield from self._parameters(call)
        yield from call.finish_behind(self.call[1], complete)

    def read_keyed(self, calls: Calls) -> Step[None]:
        """A call whose name is what comes next. The outer end is consumed."""
        source = calls.source
        name = yield from source.span(NAME, MAX_NAME)
        yield from source.skip()
        follows = yield from source.starts((self.param[0], self.outer[1], *LEAKED))
        is_json = (yield from source.ahead()) == "{" and calls.knows(name)
        if not name or not (is_json or follows == self.param[0] or (follows and calls.knows(name))):
            raise NotACall
        call = calls.begin(name)
        complete = yield from self._json_arguments(call) if is_json else self._parameters(call)
        yield from call.finish_behind(self.outer[1], complete)

    def _json_arguments(self, call: CallBuilder) -> Step[bool]:
        return call.json_arguments(Dialect(enders=tuple(filter(None, (self.call[1], self.outer[1], *LEAKED)))))

    def _tag(self, source: Source, start: str) -> Step[dict[str, str]]:
        """A tag's attributes; ``""`` is the key of the value in ``<tag=value>``. Raises NotACall."""
        source.take(len(start))
        text, end = yield from source.until((self.head_end, "\n"), _MAX_HEAD)
        if not end or any(token in text + end for token in (*ENDS, *STARTS)):  # the answer ended inside the tag
            raise NotACall
        text = text.strip()
        if text.startswith("="):
            return {"": text[1:].strip().strip("\"'")}
        found = {match[1]: match[2] or match[3] or match[4] or "" for match in _ATTRIBUTE.finditer(text)}
        return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in found.items()}

    def _key(self, source: Source) -> Step[dict[str, str]]:
        """As `_tag`, for a head that is a key alone; the value comes next."""
        source.take(len(self.param[0]))
        key, end = yield from source.until((self.head_end, self.value_start), _MAX_KEY)
        if not end:
            raise NotACall
        yield from source.after_space(self.value_start)
        return {"": key.strip()}

    def _parameters(self, call: CallBuilder) -> Step[bool]:
        """All parameters, as one JSON object. False if the text ended inside one."""
        source = call.source
        complete = True
        while complete:
            yield from source.skip()
            if not (yield from source.starts((self.param[0],))):
                break
            try:
                head = yield from self._key(source) if self.value_start else self._tag(source, self.param[0])
            except NotACall:  # cut inside the head
                head = {}
            key = head.get("name") or head.get("key") or head.get("") or ""
            if key:
                call.key(key)
            complete = bool(key) and (yield from self._value(call, head, key))
        call.end_keys()
        return complete

    def _value(self, call: CallBuilder, head: dict[str, str], key: str) -> Step[bool]:
        source = call.source
        schema = call.schema.member(key)
        if not schema.types and head.get("type"):
            schema = Schema({"type": head["type"]})
        close = ValueEnd(
            tags=(self.param[1],),
            followers=tuple(filter(None, (self.param[0], *self.call, *self.outer))),
            breaks=tuple(filter(None, (self.param[0], self.call[1], self.outer[1]))),
            restart=tuple(filter(None, (self.outer[0], self.call[0]))),
            anywhere=bool(self.value_start),
        )
        offset = (yield from source.blank()) if self.cdata else 0
        wrapped = self.cdata and (yield from source.starts((_CDATA,), offset))
        if wrapped:
            source.take(offset + len(_CDATA))
            close = ValueEnd(tags=("]]>",), followers=(self.param[1],))
        breaks = partial(self._ends_value, call, equals="" in head)
        writer = ValueWriter(call, schema, as_string=head.get("string") == "true")
        writer.trim_start, writer.trim_end = not wrapped, self.trim_end and not wrapped
        complete = yield from ValueReader(source, close, writer, breaks).read_value()
        if wrapped:
            yield from source.after_space(self.param[1])
        return complete

    def _ends_value(self, call: CallBuilder, tag: str, *, equals: bool) -> Step[bool]:
        """Whether markup inside a value shows that the value's closing tag is missing.

        `equals`: the value's own tag is ``<tag=name>``. A tag that is written in another way is text about a format.
        """
        source = call.source
        if tag == self.param[0]:
            keys = [key for key in call.schema.keys if self.value_start or key not in call.keys]
            return bool((yield from source.starts(self._equal_heads(tag, keys) if equals else _named_heads(tag, keys))))
        again = self._equal_heads(self.call[0], call.tools) + _named_heads(self.call[0], call.tools)
        if self.outer[0]:
            begins = () if self.value_start else (self.call[0],)
            again += tuple(f"{self.outer[0]}{space}{begin}" for begin in begins or call.tools for space in ("", "\n"))
        if tag in (self.outer[0], self.call[0]):
            return bool((yield from source.starts(again)))
        return (yield from turn_ends(source, len(tag), again + tuple(filter(None, (self.outer[1],)))))

    def _equal_heads(self, start: str, names: Iterable[str]) -> tuple[str, ...]:
        """The ways to write a tag (or a key alone) with one of these names."""
        equals = "" if self.value_start else "="
        return tuple(f"{start}{equals}{name}{self.head_end}" for name in names)


def _named_heads(start: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f'{start} {word}="{name}"' for name in names for word in ("name", "key", "tool"))


def tagged_format(ident: str, tags: Tags) -> ToolFormat:
    """The format of a family, opened by its outer markup or by a bare call."""
    opener = Opener(tags.outer[0], tags.read_block)
    if not tags.outer[0]:
        opener = Opener(f"{tags.call[0]} name=", tags.read_call, keep=True)
    return ToolFormat(ident, (opener,), tuple(filter(None, (tags.outer[1], tags.call[1], tags.param[1]))))


# --- values between tags, written as JSON while they come ---


@dataclass(frozen=True)
class ValueEnd:
    """Where a value ends.

    A value may hold its closing tag as content (code that is about such tags). So the tag counts only if one of
    `followers`, or the end of the turn, comes after it. Where no such tag comes at all, the first one that was seen is
    taken after all. `breaks` end a value whose closing tag is missing, if they begin a line (or `anywhere`) and are
    plausible; `restart` does the same behind a closing tag that was not sure.
    """

    tags: tuple[str, ...]
    followers: tuple[str, ...]
    breaks: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    anywhere: bool = False


@dataclass
class ValueReader:
    """Reads one value from `source` into `writer`, up to where `close` says.

    `plausible`: whether one of `close.breaks` or `close.restart` ends the value where it stands.
    """

    source: Source
    close: ValueEnd
    writer: ValueWriter
    plausible: Callable[[str], Step[bool]] | None = None
    _last: str = "\n"
    _held: list[str] = field(default_factory=list)
    _mark: int | None = None
    _mark_tag: str = ""

    def read_value(self) -> Step[bool]:
        """False if the turn ended before the value did."""
        source, close, complete = self.source, self.close, True
        tags = (*close.tags, *close.breaks, *close.restart, *LEAKED)
        leads = "".join({tag[0] for tag in tags})
        plain = re.compile(f"[^{re.escape(leads)}]+")
        while True:
            run = plain.match(source.text, source.pos)
            if run:
                self._content(source.take(run.end() - source.pos))
            char = yield from source.ahead()
            if not char:
                complete = self._fall_back()
                break
            if char not in leads:
                continue
            tag = yield from source.starts(tags)
            if tag in close.tags:
                if (yield from turn_ends(source, len(tag), close.followers)):
                    if self._mark is not None:
                        source.unmark()
                        self.writer.add("".join(self._held))
                    source.pos += len(tag)
                    break
                if self._mark is None:
                    self._mark, self._mark_tag = source.mark(), tag
            elif tag in LEAKED and (yield from turn_ends(source, 0, roles=False)):
                complete = self._fall_back()
                break
            elif tag and (yield from self._breaks(tag)):
                self._fall_back()
                break
            self._content(source.take(1))
        self.writer.end_value()
        return complete

    def _breaks(self, tag: str) -> Step[bool]:
        if self.plausible is None or (self._last != "\n" and not self.close.anywhere):
            return False
        if tag not in self.close.breaks and (tag not in self.close.restart or self._mark is None):
            return False
        return (yield from self.plausible(tag))

    def _content(self, text: str) -> None:
        self._last = text[-1]
        if self._mark is None:
            self.writer.add(text)
        else:
            self._held.append(text)

    def _fall_back(self) -> bool:
        """No closing tag was sure: take the first that was seen, or the end of the turn. False if none was seen."""
        if self._mark is None:
            return False
        self.source.rewind(self._mark)
        self.source.take(len(self._mark_tag))
        return True


class ValueWriter:
    """Text of one parameter, written into the call's JSON as the schema says.

    A value that must be a string is written as it comes. Anything else is held until its end, then read as a literal
    and coerced. With `trim_start` a line break at the start is markup, and then one at the end is, too.
    """

    def __init__(self, call: CallBuilder, schema: Schema, *, as_string: bool = False) -> None:
        self.trim_start = True
        self.trim_end = False
        self._call = call
        self._schema = schema
        self._string = as_string or schema.types == {"string"}
        self._nullable = not as_string and schema.types == {"string", "null"}
        self._started = False
        self._has_begun = False
        self._gap = ""
        self._text: list[str] = []

    def add(self, text: str) -> None:
        if not text:
            return
        if not self._has_begun:
            self._has_begun = True
            if self.trim_start and text[0] == "\n":
                text, self.trim_end = text[1:], True
        text = self._gap + text
        self._gap = ""
        if self.trim_end and text.endswith("\n"):
            text, self._gap = text[:-1], "\n"
        self._put(text)

    def _put(self, text: str) -> None:
        if not text:
            return
        if self._nullable:  # only until it is clear that this is not the word "null"
            self._text.append(text)
            if "null".startswith("".join(self._text).strip().lower()):
                return
            text, self._nullable, self._string = "".join(self._text), False, True
            self._text.clear()
        if not self._string:
            self._text.append(text)
            return
        self._call.write(escape(text) if self._started else '"' + escape(text))
        self._started = True

    def end_value(self) -> None:
        if self._string:
            self._call.write('"' if self._started else '""')
            return
        self._call.write(dump(self._schema.coerce(self._value("".join(self._text)))))

    def _value(self, text: str) -> object:
        """What a text without quotes stands for: a literal where the schema allows it, else the text."""
        schema, stripped = self._schema, text.strip()
        word = stripped.lower()
        if not stripped and schema.allows("string"):
            return text
        if word in ("null", "none") and (self._nullable or not schema.types):
            return None
        if self._nullable:
            return text
        found, literal = parse_literal(stripped)
        if not found and word in ("true", "false"):
            found, literal = True, word == "true"
        if found and schema.types and not schema.valid(literal) and schema.allows("string"):
            return text
        return literal if found else text


# --- families ---


def _xml(outer: str, call: str, param: str, *, trim_end: bool = False, cdata: bool = False) -> Tags:
    pair = (f"<{outer}>", f"</{outer}>") if outer else ("", "")
    return Tags(pair, (f"<{call}", f"</{call}>"), (f"<{param}", f"</{param}>"), trim_end=trim_end, cdata=cdata)


def keyed(prefix: str = "", suffix: str = "") -> Tags:
    """Keys and values in tags of their own."""
    outer, key, value = (f"{prefix}{name}{suffix}" for name in ("tool_call", "arg_key", "arg_value"))
    ends = (f"</{key}>", f"<{value}>")
    return Tags((f"<{outer}>", f"</{outer}>"), ("", ""), (f"<{key}>", f"</{value}>"), *ends)


QWEN = _xml("tool_call", "function", "parameter", trim_end=True)
MINIMAX_M2 = tagged_format("minimax_m2", _xml("minimax:tool_call", "invoke", "parameter"))
MUSE_SPARK = tagged_format("muse_spark", _xml("atem:function_calls", "atem:invoke", "atem:parameter"))
# DeepSeek V3.2, V4 and V4.1; in the latter's tags each name stands behind a space.
_DSML = (
    _xml("｜DSML｜function_calls", "｜DSML｜invoke", "｜DSML｜parameter"),
    _xml("｜DSML｜tool_calls", "｜DSML｜invoke", "｜DSML｜parameter"),
    _xml("｜DSML｜ calls", "｜DSML｜ invoke", "｜DSML｜ parameter"),
)
DEEPSEEK_V4 = ToolFormat(
    "deepseek_v4",
    tuple(Opener(tags.outer[0], tags.read_block) for tags in _DSML),
    tuple(pair[1] for tags in _DSML for pair in (tags.outer, tags.call, tags.param)),
)
MINICPM5 = tagged_format("minicpm5", _xml("", "function", "param", cdata=True))
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

GLM, LONGCAT_TAGS, IFM = keyed(), keyed("longcat_"), keyed("ifm|")
