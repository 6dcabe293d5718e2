"""Turn records as bytes: a JSON header and the tokens as 32-bit numbers, compressed, with a checksum in front."""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from datetime import datetime
from typing import Any

from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.prompt.turns import Generation, Open, Record, Shown

_SUM = 32


class DamagedRecord(ValueError):
    """The bytes are not those that were written."""


def encode(record: Record) -> bytes:
    """The record as bytes. Token ids must fit 32 bits."""
    numbers = array("I", record.tokens)
    opens = []
    for opened in record.opens:
        generations = []
        for generation in opened.generations:
            numbers.extend(generation.tokens)
            generations.append(
                {
                    "key": generation.key.hex(),
                    "content": generation.content,
                    "reasoning": generation.reasoning,
                    "names": generation.names,
                    "tokens": len(generation.tokens),
                }
            )
        opens.append({"at": [opened.depth, opened.char, opened.end], "generations": generations})
    header = {
        "shown": [_shown(item) for item in record.shown],
        "chain": [link.hex() for link in record.chain],
        "tools": [[tool.name, tool.description, tool.parameters, tool.strict] for tool in record.tools],
        "text": record.text,
        "tokens": len(record.tokens),
        "anchors": record.anchors,
        "opens": opens,
        "clock": record.clock.isoformat() if record.clock is not None else None,
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    body = zlib.compress(len(head).to_bytes(8, "little") + head + numbers.tobytes(), 1)
    return hashlib.sha256(body).digest() + body


def decode(blob: bytes) -> Record:
    """Raises DamagedRecord."""
    body = blob[_SUM:]
    if hashlib.sha256(body).digest() != blob[:_SUM]:
        raise DamagedRecord("checksum differs")
    try:
        data = zlib.decompress(body)
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        numbers = array("I")
        numbers.frombytes(data[8 + size :])
        return _record(header, numbers)
    except (zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedRecord(str(error)) from error


def _shown(item: Shown) -> list[Any]:
    m = item.message
    calls = [[call.id, call.name, call.arguments] for call in m.tool_calls]
    fields = [m.role, m.content, m.reasoning, calls, m.tool_call_id, m.name, m.is_error]
    return [fields, item.link.hex() if item.link is not None else None, item.told, item.transient, item.digest.hex()]


def _read_shown(data: list[Any]) -> Shown:
    (role, content, reasoning, calls, call_id, name, is_error), link, told, transient, digest = data
    message = Message(role, content, reasoning, tuple(ToolCall(*call) for call in calls), call_id, name, is_error)
    chained = bytes.fromhex(link) if link is not None else None
    return Shown(message, chained, tuple((a, b) for a, b in told), bool(transient), bytes.fromhex(digest))


def _record(header: dict[str, Any], numbers: array[int]) -> Record:
    tokens = tuple(numbers[: header["tokens"]])
    position = len(tokens)
    opens = []
    for opened in header["opens"]:
        generations = []
        for item in opened["generations"]:
            generations.append(
                Generation(
                    bytes.fromhex(item["key"]),
                    item["content"],
                    item["reasoning"],
                    tuple(item["names"]),
                    tuple(numbers[position : position + item["tokens"]]),
                )
            )
            position += item["tokens"]
        depth, char, end = opened["at"]
        opens.append(Open(depth, char, end, tuple(generations)))
    if position != len(numbers):
        raise DamagedRecord("tokens are missing")
    clock = header.get("clock")
    return Record(
        shown=tuple(_read_shown(item) for item in header["shown"]),
        chain=tuple(bytes.fromhex(link) for link in header["chain"]),
        tools=tuple(Tool(*tool) for tool in header["tools"]),
        text=header["text"],
        tokens=tokens,
        anchors=tuple((char, token, bool(start)) for char, token, start in header["anchors"]),
        opens=tuple(opens),
        clock=datetime.fromisoformat(clock) if clock else None,
    )
