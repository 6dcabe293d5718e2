"""Publishes which KV is held, on the wire of vLLM's KV events. Needs the extra `fleet` (pyzmq, msgspec).

The wire: a PUB socket sends [topic, sequence number (8 bytes, big endian), batch], a ROUTER socket sends batches again
from a sequence number on. A batch is msgpack: [seconds, events, rank]; an event is an array that begins with its name
(`BlockStored`, `BlockRemoved`, `AllBlocksCleared`), the form that all of vLLM's versions and all its readers know.

Two rules that vLLM leaves open: sequence numbers begin with the clock, and the first event clears all blocks. So a
router that was told of blocks by an earlier process sees a gap, asks for what it missed, and forgets them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from start_llm.core.errors import Unavailable
from start_llm.kvcache.blocks import PathHash, TokenSequence, as_tokens
from start_llm.kvcache.events import BLOCK, Peek, PublishedBlocks, block_names

log = logging.getLogger(__name__)

MEDIUM = "GPU"  # KV on disk has the same: it is restored without being computed
END = (-1).to_bytes(8, "big", signed=True)
TICK_MILLISECONDS = 20  # between two looks at what the model thread has said; events within it are one batch
REST = 20  # seconds of rest for each second of work: other threads need Python's lock
MOST_WAITING = 20_000  # runs of tokens and turns
REPLAYED = 10_000  # batches, as vLLM keeps
REPLAYED_BYTES = 64 << 20  # of all of them; a prompt of 200,000 tokens makes a batch of a megabyte
MOST_UNREAD = 1000  # batches that wait for a slow router; what it misses then it asks for
MOST_QUESTIONS = 8  # that are answered between two batches; as many wait of each client
UNREAD_MILLISECONDS = 30_000  # after which a client that takes nothing loses its connection, where the system can tell
MOST_ASKED_BYTES = 1024  # of a part of a question, and of a topic; longer ones end their connection
RANK = 0  # of data parallelism; this server has one

# A method that makes events, and its arguments: one object, for the model thread pays for each.
_Work = tuple[Callable[..., list[Any]], *tuple[Any, ...]]


class KVEventPublisher:
    """Has a thread and sockets of its own. All public methods may be called from any thread, and return at once.

    What nobody takes in time is dropped, the oldest first; then all blocks are cleared, and each turn that follows
    publishes what it finds.

    Attributes:
        endpoint: where routers connect; known after `start`.
        replay: where they ask for what they missed.
    """

    def __init__(self, endpoint: str, topic: str = "", *, most_waiting: int = MOST_WAITING) -> None:
        """`endpoint`: ``tcp://HOST:PORT``; PORT + 1 is the replay socket's, and 0 means any two."""
        host, _, port = endpoint.rpartition(":")
        self.endpoint, self.replay = endpoint, f"{host}:{int(port) + 1 if int(port) else 0}"
        self._topic = topic.encode()
        self._waiting: deque[_Work] = deque(maxlen=most_waiting)
        self._blocks = PublishedBlocks()
        self._buffer: deque[tuple[int, zmq.Frame]] = deque()
        self._buffer_bytes = 0
        self._sequence = time.time_ns() // 1_000_000
        self._drops_lock = threading.Lock()
        self._dropped = self._dropped_before = 0
        self._stored = self._removed = 0
        self._stopping = False
        self._encoder = msgspec.msgpack.Encoder()
        self._thread = threading.Thread(target=self._publish_all, name="kv-events", daemon=True)

    def start(self) -> None:
        """Raises Unavailable: an address cannot be bound."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._publish_socket, self._replay_socket = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self._publish_socket.set_hwm(MOST_UNREAD)
        # Else a router that asks for more than a thousand batches gets a part of them, and no end mark.
        self._replay_socket.sndhwm = 2 * REPLAYED
        self._replay_socket.rcvhwm = MOST_QUESTIONS
        for socket in (self._publish_socket, self._replay_socket):
            socket.linger = 0
            socket.maxmsgsize = MOST_ASKED_BYTES
            socket.tcp_maxrt = UNREAD_MILLISECONDS
            socket.ipv6 = "[" in self.endpoint
        try:
            for socket, address in ((self._publish_socket, self.endpoint), (self._replay_socket, self.replay)):
                socket.bind(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise Unavailable(f"KV_EVENTS={self.endpoint}: {address} cannot be bound: {error}") from error
        self.endpoint, self.replay = (
            str(socket.get_string(zmq.LAST_ENDPOINT)) for socket in (self._publish_socket, self._replay_socket)
        )
        self._thread.start()

    def stop(self) -> None:
        """What was said before is still sent, within a second."""
        if self._thread.is_alive():
            self._stopping = True
            self._thread.join(2.0)

    # --- what is said -------------------------------------------------------------

    def evicted(self, before: PathHash, start: int, raw: bytes) -> None:
        """KV of a run of tokens is neither in memory nor on disk any more.

        `before`: of all `start` tokens before it. `raw`: the tokens, int32.
        """
        self._put((KVEventPublisher._release, before, start, raw))

    def cleared(self) -> None:
        """Nothing is held any more."""
        self._put((KVEventPublisher._clear,))

    def announce(self, plain: TokenSequence, prompt: TokenSequence, peek: Peek) -> None:
        """A conversation's tokens: as routers make them of the client's messages, and as they were computed.

        `peek`: how much of the latter is held; asked later, and on another thread.
        """
        self._put((KVEventPublisher._announce, plain, prompt, peek))

    def _put(self, work: _Work) -> None:
        if len(self._waiting) == self._waiting.maxlen:
            with self._drops_lock:
                self._dropped += 1
        self._waiting.append(work)  # the oldest goes by itself

    def figures(self) -> dict[str, float]:
        """Totals and sizes for `/metrics`."""
        return {
            "kv_events_blocks": len(self._blocks),
            "kv_events_waiting": len(self._waiting),
            "kv_events_stored": self._stored,
            "kv_events_removed": self._removed,
            "kv_events_dropped": self._dropped,
        }

    # --- the thread ---------------------------------------------------------------

    def _publish_all(self) -> None:
        events = [["AllBlocksCleared"]]
        while True:
            stopping = self._stopping
            began = time.thread_time()
            try:
                self._send(events + self._next_events())
                for _ in range(MOST_QUESTIONS):
                    if self._replay_socket.poll(0):
                        self._send_again()
                events = []
            except Exception:  # the thread's edge: routers learn it from the next batch
                log.warning("KV events could not be published", exc_info=True)
                events = self._clear()
            if stopping:
                break
            rest = (time.thread_time() - began) * REST * 1000
            self._replay_socket.poll(max(TICK_MILLISECONDS, min(1000, round(rest))))
        self._close_sockets()

    def _next_events(self) -> list[Any]:
        """The events of what waits; a part of them, where that is much work."""
        events: list[Any] = []
        until = time.thread_time() + TICK_MILLISECONDS / 1000 / REST * 2
        while self._waiting and (self._stopping or time.thread_time() < until):
            method, *arguments = self._waiting.popleft()
            events += method(self, *arguments)
        if self._dropped > self._dropped_before:
            level = logging.DEBUG if self._dropped_before else logging.WARNING  # once; the rest is counted
            self._dropped_before = self._dropped
            log.log(level, "KV events came faster than they could be published: routers are told to forget all blocks")
            return self._clear()
        return events

    def _announce(self, plain: TokenSequence, prompt: TokenSequence, peek: Peek) -> list[Any]:
        tokens = as_tokens(prompt)
        new = self._blocks.announce(as_tokens(plain), tokens, peek(tokens, len(tokens)).length)
        if new is None:
            return []
        self._stored += len(new.names)
        return [["BlockStored", new.names, new.parent, new.tokens, BLOCK, None, MEDIUM, None]]

    def _release(self, before: PathHash, start: int, raw: bytes) -> list[Any]:
        gone = self._blocks.release(block_names(raw, before.chain(), start))
        self._removed += len(gone)
        return [["BlockRemoved", gone, MEDIUM]] if gone else []

    def _clear(self) -> list[Any]:
        self._blocks.clear()
        return [["AllBlocksCleared"]]

    def _send(self, events: list[Any]) -> None:
        if not events:
            return
        # A frame's bytes are in memory once, however many clients have not read them yet.
        batch = zmq.Frame(self._encoder.encode([time.time(), events, RANK]))
        self._buffer.append((self._sequence, batch))
        self._buffer_bytes += len(batch)
        while len(self._buffer) > REPLAYED or (self._buffer_bytes > REPLAYED_BYTES and len(self._buffer) > 1):
            self._buffer_bytes -= len(self._buffer.popleft()[1])
        self._publish_socket.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), batch), copy=False)
        self._sequence += 1

    def _send_again(self) -> None:
        """Answers [client, empty, first number] with each batch from that one on, and an end mark."""
        client, *rest = self._replay_socket.recv_multipart()
        first = int.from_bytes(rest[-1], "big") if rest else 0
        for number, batch in self._buffer:
            if number >= first:
                parts = (client, b"", self._topic, number.to_bytes(8, "big"), batch)
                self._replay_socket.send_multipart(parts, copy=False)
        self._replay_socket.send_multipart((client, b"", b"", END, b""))

    def _close_sockets(self) -> None:
        self._publish_socket.close()
        self._replay_socket.close()
