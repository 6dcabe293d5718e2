"""The conversation tree on disk, so that it survives a restart: a row for each node, so a turn writes what is new.

One SQLite file, written by one thread, off the request path: a kill loses at most what was not yet written. Nodes
belong to a fingerprint (template, tokenizer, policy); others are left alone until they age out. Two servers may share a
file: the ids of nodes are random.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import zlib
from array import array
from datetime import datetime
from pathlib import Path
from typing import Any

from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.files.batches import BatchWriter
from start_llm.files.database import CacheDatabase, FileUnavailable
from start_llm.prompt.reading import Slot
from start_llm.prompt.tree import Difference, Node, RenderDelta, ShownMessage, SpecialTokenPlace

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE nodes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id INTEGER NOT NULL UNIQUE, root INTEGER NOT NULL,
    fingerprint TEXT NOT NULL, blob BLOB NOT NULL);
CREATE INDEX nodes_root ON nodes (root)
"""
_VERSION = 3
_INSERT = """
INSERT OR REPLACE INTO nodes (id, root, fingerprint, blob)
VALUES (?, ifnull((SELECT root FROM nodes WHERE id = ?), ?), ?, ?)
"""
_GATHER_SECONDS = 0.2
_SUM = 32  # bytes of the checksum


class TurnDB:
    """The file. `save` may be called from any thread and returns at once; `load` once, before it."""

    def __init__(self, path: Path, *, limit_bytes: int = 256 * 2**20, load_bytes: int = 128 * 2**20) -> None:
        """`limit_bytes`: of the file's nodes; the conversations that were not gone on with for longest go first."""
        self._database = CacheDatabase(path, _SCHEMA, _VERSION, what="conversation tree")
        self._limit = limit_bytes
        self._load_limit = load_bytes
        self._fingerprint = ""
        self._writer = BatchWriter("turndb", self._database, self._write, _GATHER_SECONDS)

    def load(self, fingerprint: str) -> list[Node]:
        """The nodes of `fingerprint`, the newest up to the byte limit, parents first; damaged rows are left out."""
        self._fingerprint = fingerprint

        def read(connection: sqlite3.Connection) -> list[bytes]:
            query = "SELECT blob FROM nodes WHERE fingerprint = ? ORDER BY number DESC"
            found: list[bytes] = []
            used = 0
            for (blob,) in connection.execute(query, (fingerprint,)):
                used += len(blob)
                if used > self._load_limit:
                    break
                found.append(bytes(blob))
            return found[::-1]

        try:
            rows = self._database.run(read)
        except FileUnavailable:
            return []
        nodes = []
        for blob in rows:
            try:
                nodes.append(decode(blob))
            except DamagedNode as error:
                log.warning("conversation tree: a turn on disk is damaged (%s); it is left out", error)
        return nodes

    def save(self, node: Node) -> None:
        """Writes a node, and may delete the oldest conversations for it."""
        self._writer.put(node)

    def close(self) -> None:
        """Writes what is waiting and ends the thread."""
        self._writer.close()

    def _write(self, connection: sqlite3.Connection, waiting: list[Node]) -> None:
        """The writer thread."""
        rows = ((node.id, node.parent, node.id, self._fingerprint, encode(node)) for node in waiting)
        connection.executemany(_INSERT, rows)
        _trim(connection, self._limit)


def _trim(connection: sqlite3.Connection, limit: int) -> None:
    """Deletes whole conversations, the one first that was not gone on with for longest."""
    (used,) = connection.execute("SELECT TOTAL(LENGTH(blob)) FROM nodes").fetchone()
    while used > limit:
        row = connection.execute("SELECT root FROM nodes GROUP BY root ORDER BY MAX(number) LIMIT 1").fetchone()
        (size,) = connection.execute("SELECT TOTAL(LENGTH(blob)) FROM nodes WHERE root = ?", row).fetchone()
        connection.execute("DELETE FROM nodes WHERE root = ?", row)
        used -= size


# --- a node as bytes: a JSON header and 32-bit tokens, compressed, with a checksum in front ---------------------------


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
    """The node of these bytes. Raises DamagedNode."""
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
    places = tuple(SpecialTokenPlace(char, token, bool(start)) for char, token, start in header["anchors"])
    split = len(numbers) - header["answer_tokens"]
    if split < 0:
        raise DamagedNode("tokens are missing")
    owner, session, nonce = header["who"]
    length, spoken, difference, noted_chars, noted_tokens = header["counts"]
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
        noted=(noted_chars, noted_tokens),
        digests=tuple(bytes.fromhex(digest) for digest in header["digests"]),
        results=tuple((call, bytes.fromhex(digest)) for call, digest in header["results"]),
        shown=tuple(ShownMessage(_read_message(message), place) for message, place in header["shown"]),
        told=tuple((Slot(*slot), value) for slot, value in header["told"]),
        tools=None if tools is None else tuple(Tool(*tool) for tool in tools),
        clock=datetime.fromisoformat(clock) if clock else None,
        grown=RenderDelta(chars, tokens, anchors, header["text"], numbers[:split], places, generation),
        answer=_read_message(header["answer"]),
        answer_tokens=tuple(numbers[split:]),
    )
