"""Nodes of the conversation tree as bytes: a JSON header and 32-bit tokens, compressed, with a checksum in front."""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from datetime import datetime
from typing import Any

from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.prompt.reading import Slot
from start_llm.prompt.tree import Difference, Node, RenderDelta, ShownMessage, SpecialTokenPlace

_SUM = 32


class DamagedNode(ValueError):
    """The bytes are not those that were written."""


def encode(node: Node) -> bytes:
    """The node as bytes. Token ids must fit 31 bits."""
    grown = node.grown
    numbers = grown.new_tokens + array("i", node.answer_tokens)
    header = {
        "id": node.id,
        "parent": node.parent,
        "key": node.key.hex(),
        "who": [node.owner, node.session, node.nonce],
        "counts": [node.length, node.spoken, node.difference, *node.noted],
        "digests": [digest.hex() for digest in node.digests],
        "results": [[call, digest.hex()] for call, digest in node.results],
        "shown": [[_message(shown.message), shown.place] for shown in node.shown],
        "told": [[list(slot), value] for slot, value in node.told],
        "tools": None if node.tools is None else [[t.name, t.description, t.parameters, t.strict] for t in node.tools],
        "clock": node.clock.isoformat() if node.clock is not None else None,
        "kept": [grown.chars, grown.tokens, grown.anchors, grown.generation],
        "text": grown.text,
        "anchors": grown.new_anchors,
        "answer": _message(node.answer),
        "answer_tokens": len(node.answer_tokens),
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    body = zlib.compress(len(head).to_bytes(8, "little") + head + numbers.tobytes(), 1)
    return hashlib.sha256(body).digest() + body


def decode(blob: bytes) -> Node:
    """Raises DamagedNode."""
    body = blob[_SUM:]
    if hashlib.sha256(body).digest() != blob[:_SUM]:
        raise DamagedNode("checksum differs")
    try:
        data = zlib.decompress(body)
        size = int.from_bytes(data[:8], "little")
        numbers = array("i")
        numbers.frombytes(data[8 + size :])
        return _node(json.loads(data[8 : 8 + size]), numbers)
    except (zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedNode(str(error)) from error


def _message(m: Message) -> list[Any]:
    calls = [[call.id, call.name, call.arguments] for call in m.tool_calls]
    return [m.role, m.content, m.reasoning, calls, m.tool_call_id, m.name, m.is_error, m.images]


def _read_message(data: list[Any]) -> Message:
    role, content, reasoning, calls, answers, name, is_error, *images = data
    made = tuple(ToolCall(*call) for call in calls)
    return Message(role, content, reasoning, made, answers, name, is_error, tuple(*images))


def _node(header: dict[str, Any], numbers: array[int]) -> Node:
    chars, tokens, anchors, generation = header["kept"]
    split = len(numbers) - header["answer_tokens"]
    if split < 0:
        raise DamagedNode("tokens are missing")
    owner, session, nonce = header["who"]
    length, spoken, difference, *noted = header["counts"]
    clock, tools = header["clock"], header["tools"]
    return Node(
        id=header["id"],
        parent=header["parent"],
        key=bytes.fromhex(header["key"]),
        owner=owner,
        session=session,
        nonce=nonce,
        length=length,
        spoken=spoken,
        difference=Difference(difference),
        noted=(noted[0], noted[1]),
        digests=tuple(bytes.fromhex(digest) for digest in header["digests"]),
        results=tuple((call, bytes.fromhex(digest)) for call, digest in header["results"]),
        shown=tuple(ShownMessage(_read_message(message), place) for message, place in header["shown"]),
        told=tuple((Slot(*slot), value) for slot, value in header["told"]),
        tools=None if tools is None else tuple(Tool(*tool) for tool in tools),
        clock=datetime.fromisoformat(clock) if clock else None,
        grown=RenderDelta(
            chars,
            tokens,
            anchors,
            header["text"],
            numbers[:split],
            tuple(SpecialTokenPlace(char, token, bool(start)) for char, token, start in header["anchors"]),
            generation,
        ),
        answer=_read_message(header["answer"]),
        answer_tokens=tuple(numbers[split:]),
    )
