"""MiniMax M3: tags behind a mark, each argument in a tag of its name, with children in lists and objects.

With ``]<]minimax[>[`` as ``~``: ``~<tool_call>~<invoke name="read">~<path>a.py~</path>~<tags>~<item>x~</item>~</tags>
~</invoke>~</tool_call>``.
"""

from __future__ import annotations

from start_llm.parsing.calls import MAX_NAME, CallBuilder, Calls, NotACall, Opener, ToolFormat
from start_llm.parsing.schema import Schema, dump, parse_literal
from start_llm.parsing.source import LEAKED, Source, Step
from start_llm.parsing.tools.tagged import ValueEnd, ValueReader, ValueWriter

MARK = "]<]minimax[>["
_MAX_DEPTH = 32
_MAX_LEAF = 1 << 20


def _calls(calls: Calls) -> Step[None]:
    """What follows ``~<tool_call>``."""
    source, count = calls.source, 0
    while (yield from source.after_space(f'{MARK}<invoke name="')):
        name, end = yield from source.until(('">',), MAX_NAME)
        if not end:
            raise NotACall
        call, complete = calls.begin(name), True
        while complete and (key := (yield from _opening(source))):
            call.key(key)
            complete = yield from _argument(call, key)
        call.end_keys()
        yield from call.finish_behind(f"{MARK}</invoke>", complete)
        count += 1
    if not count:
        raise NotACall
    yield from source.after_space(f"{MARK}</tool_call>")


def _opening(source: Source) -> Step[str]:
    """The name of the tag that opens here, which is consumed; ``""`` if none does."""
    offset = yield from source.blank()
    if (yield from source.starts((f"{MARK}<", f"{MARK}</"), offset)) != f"{MARK}<":
        return ""
    with source.lookahead():
        source.take(offset + len(MARK) + 1)
        name, _ = yield from source.until((">",), MAX_NAME)
    source.take(offset + len(MARK) + 1 + (len(name) + 1 if name else 0))
    return name


def _argument(call: CallBuilder, key: str) -> Step[bool]:
    """The value of an argument, written as it comes if it is a text. False if the turn ended in it."""
    source, schema, end = call.source, call.schema.member(key), f"{MARK}</{key}>"
    if schema.types & {"array", "object"} or (yield from source.starts((MARK,), (yield from source.blank()))):
        value, complete = yield from _tree(source, schema, key, 0)
        call.write(dump(schema.coerce(value)))
        return complete
    writer = ValueWriter(call, schema)
    writer.trim_start = False
    return (yield from ValueReader(source, ValueEnd((end,), (MARK,)), writer).read_value())


def _tree(source: Source, schema: Schema, name: str, depth: int) -> Step[tuple[object, bool]]:
    """What stands up to the end of `name`: children, or a text; and whether the end came."""
    children = list[tuple[str, object]]()
    complete = True
    while complete and depth < _MAX_DEPTH and (child := (yield from _opening(source))):
        inner = schema.items if child == "item" and schema.allows("array") else schema.member(child)
        value, complete = yield from _tree(source, inner, child, depth + 1)
        children.append((child, value))
    end = f"{MARK}</{name}>"
    if children or not complete:
        complete = complete and bool((yield from source.after_space(end)))
        listed = all(child == "item" for child, _ in children) and schema.allows("array")
        return [value for _, value in children] if listed else dict(children), complete
    text, found = yield from source.until((end, *LEAKED), _MAX_LEAF)
    return _leaf(text, schema), found == end


def _leaf(text: str, schema: Schema) -> object:
    """What a text stands for. Nothing at all is what the schema allows of a text, an object and an array."""
    if not text and not schema.allows("string"):
        return {} if schema.allows("object") else [] if schema.allows("array") else None
    is_literal, literal = (False, None) if schema.types == {"string"} else parse_literal(text.strip())
    return literal if is_literal else schema.coerce(text)


MINIMAX_M3 = ToolFormat(
    "minimax_m3",
    (Opener(f"{MARK}<tool_call>", _calls),),
    (f"{MARK}</tool_call>", f"{MARK}</invoke>"),
)
