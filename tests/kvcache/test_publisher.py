"""Which stored KV routers are told of, against a model of what is held; and the wire of vLLM's KV events: what a
subscriber reads, asks for again, and learns when something was dropped."""

from __future__ import annotations

import hashlib
import random
import socket
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from start_llm.core.errors import Unavailable
from start_llm.kvcache import publisher
from start_llm.kvcache.blocks import PathHash, Tokens, as_tokens
from start_llm.kvcache.events import BLOCK, NewBlocks, PublishedBlocks, block_names
from start_llm.kvcache.layers import LayerKit
from start_llm.kvcache.store import KVStore, StoreConfig
from start_llm.kvcache.types import RestorePlan
from tests.kinds import rounds
from tests.kvcache.replay import WAIT_SECONDS, all_events, asked_again
from tests.kvcache.tiny import known_cache
from tests.waiting import until

TOKENS = as_tokens(list(range(200)))


def held(tokens, limit) -> RestorePlan:
    return RestorePlan(len(tokens), len(tokens), len(tokens), "")


@pytest.fixture
def events() -> Iterator:
    made = publisher.KVEventPublisher("tcp://127.0.0.1:0", "kv@here@model")
    made.start()
    yield made
    made.stop()


def test_the_wire_is_that_of_vllm(events) -> None:
    names = block_names(TOKENS)
    stored = ["BlockStored", names, None, TOKENS[: 3 * BLOCK].tolist(), BLOCK, None, "GPU", None]
    removed, found = ["BlockRemoved", names[::-1], "GPU"], []
    with zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.subscribe(b"kv@")
        socket.connect(events.endpoint)
        # A subscriber misses what was sent before it was there, and a batch may end between the two.
        until = time.monotonic() + WAIT_SECONDS
        while not (stored in found and removed in found):
            assert time.monotonic() < until, found
            if not socket.poll(50):
                events.announce(TOKENS, TOKENS, held)
                events.evicted(PathHash(), 0, TOKENS.tobytes())
                continue
            topic, number, batch = socket.recv_multipart()
            assert topic == b"kv@here@model" and len(number) == 8
            seconds, told, rank = msgspec.msgpack.decode(batch)
            assert abs(seconds - time.time()) < WAIT_SECONDS and rank == 0
            found += told


def test_all_that_is_kept_is_sent_again(events) -> None:
    assert all_events(events.replay, 1)  # nothing is published any more: the buffer is this test's
    batch = msgspec.msgpack.encode(["x" * 5000])
    events._buffer.clear()
    events._buffer.extend((events._sequence + number, batch) for number in range(publisher.REPLAYED))
    assert len(asked_again(events.replay, 0)) == publisher.REPLAYED


def test_what_was_missed_is_sent_again_from_a_number_on(events) -> None:
    events.announce(TOKENS[:64], TOKENS[:64], held)
    assert [event[0] for event in all_events(events.replay, 2)] == ["AllBlocksCleared", "BlockStored"]
    events.announce(TOKENS, TOKENS, held)
    assert len(all_events(events.replay, 3)[2][1]) == 2  # only what is new
    batches = asked_again(events.replay, 0)
    numbers = [number for number, _ in batches]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert asked_again(events.replay, numbers[-1]) == batches[-1:]
    assert asked_again(events.replay, numbers[-1] + 1) == []
    assert numbers[0] > 1_700_000_000_000, "numbers go on behind those of an earlier process"


def test_what_is_sent_again_is_bounded_in_bytes(events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "REPLAYED_BYTES", 5000)
    for number in range(20):
        events.announce(TOKENS + number, TOKENS + number, held)
        until(lambda: not events.figures()["kv_events_waiting"])  # so that each is a batch of its own
    assert all_events(events.replay, 1), "the newest ones are there"
    batches = [batch for _, batch in events._buffer]
    assert 0 < sum(map(len, batches)) <= 5000 and len(batches) < 20


def test_a_client_that_asks_and_never_reads_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher.KVEventPublisher, "_publish_all", lambda self: None)
    made = publisher.KVEventPublisher("tcp://127.0.0.1:0")
    made.start()
    for _ in range(500):
        made._send([["x" * 40_000]])
    memory = psutil.Process().memory_info
    with zmq.Context.instance().socket(zmq.DEALER) as client:
        client.linger, client.rcvhwm = 0, 1
        client.connect(made.replay)
        before = memory().rss
        for _ in range(20):  # 20 MB each
            client.send_multipart([b"", bytes(8)])
            assert made._replay_socket.poll(WAIT_SECONDS * 1000)
            made._send_again()
        assert memory().rss - before < 100 << 20
    made._close_sockets()


def test_a_topic_of_megabytes_ends_its_connection(events) -> None:
    host, port = events.endpoint.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0")
    ready = b"\x05READY\x0bSocket-Type" + (3).to_bytes(4, "big") + b"SUB"
    with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS) as client:
        client.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        client.sendall(b"\x02" + (20 << 20).to_bytes(8, "big") + b"\x01")  # a message of so many bytes begins
        while client.recv(4096):
            pass


def test_what_is_dropped_is_counted_and_clears_all(events) -> None:
    small = publisher.KVEventPublisher("tcp://127.0.0.1:0", "kv@here@model", most_waiting=10)
    for index in range(25):
        small.announce(TOKENS + index, TOKENS + index, held)
    assert small.figures()["kv_events_dropped"] == 15
    small.start()
    try:
        assert all_events(small.replay, 2) == [["AllBlocksCleared"], ["AllBlocksCleared"]]
        assert small.figures()["kv_events_blocks"] == 0
        small.announce(TOKENS, TOKENS, held)
        assert all_events(small.replay, 3)[2][0] == "BlockStored"
    finally:
        small.stop()


def test_an_address_that_is_taken_is_named(events) -> None:
    second = publisher.KVEventPublisher(events.endpoint)
    with pytest.raises(Unavailable, match=f"KV_EVENTS={events.endpoint}"):
        second.start()


TOKEN_BYTES = 8  # of a known_cache


def run(length: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 500, length, dtype=np.int32)


def behind(tokens: Tokens, at: int) -> list[int]:
    """Names of the blocks that end behind this place."""
    return block_names(tokens[at:], hashlib.sha256(tokens[:at].tobytes()), at)


def announced(new: NewBlocks | None) -> NewBlocks:
    assert new is not None
    return new


def test_what_is_evicted_is_removed_last_block_first() -> None:
    blocks, tokens = PublishedBlocks(), run(400, 3)
    names = announced(blocks.announce(tokens, tokens, 400)).names
    assert blocks.release(behind(tokens, 200)) == names[3:][::-1]
    assert blocks.release(behind(tokens, 200)) == []
    assert len(blocks) == 3


def test_other_tokens_of_the_same_text_stand_and_fall_with_the_prompt() -> None:
    """A client leaves the reasoning out: 100 tokens alike, then 600 in the prompt where the client has 300."""
    blocks = PublishedBlocks()
    alike = run(100, 4)
    plain, prompt = np.concatenate([alike, run(300, 5)]), np.concatenate([alike, run(600, 6)])
    assert len(announced(blocks.announce(plain, prompt, 100)).names) == 1
    assert len(announced(blocks.announce(plain, prompt, len(prompt))).names) == 400 // BLOCK - 1
    gone = blocks.release(behind(prompt, 400))  # the later half of what differs
    assert gone == block_names(plain)[3:][::-1]


def test_a_block_stays_while_one_of_two_prompts_with_its_text_is_held() -> None:
    blocks = PublishedBlocks()
    plain, first, second = run(128, 7), run(200, 8), run(200, 9)
    assert len(announced(blocks.announce(plain, first, 200)).names) == 2
    assert blocks.announce(plain, second, 200) is None
    assert blocks.release(block_names(first)) == []
    assert sorted(blocks.release(block_names(second))) == sorted(block_names(plain))
    assert len(blocks) == 0


class Listener:
    """Keeps `PublishedBlocks` as the publisher does, without its thread."""

    def __init__(self) -> None:
        self.blocks, self.published = PublishedBlocks(), set[int]()

    def evicted(self, before: PathHash, start: int, raw: bytes) -> None:
        gone = self.blocks.release(block_names(raw, before.chain(), start))
        assert self.published.issuperset(gone)
        self.published.difference_update(gone)

    def cleared(self) -> None:
        self.blocks.clear()
        self.published.clear()

    def announce(self, tokens: Tokens, held: int) -> None:
        if (new := self.blocks.announce(tokens, tokens, held)) is not None:
            names = block_names(tokens)
            first, behind = names.index(new.names[0]), names.index(new.names[-1]) + 1
            assert new.names == names[first:behind] and new.tokens == tokens[first * BLOCK : behind * BLOCK].tolist()
            assert new.parent == (names[first - 1] if first else None)
            assert new.parent is None or new.parent in self.published
            assert self.published.isdisjoint(new.names)
            self.published.update(new.names)


@pytest.mark.parametrize("seed", range(rounds(6, 2)))
def test_what_is_published_is_what_the_store_would_restore(seed: int) -> None:
    """Random conversations with shared beginnings and forks in a store that holds a few of them."""
    chance, listener = random.Random(seed), Listener()
    kit = LayerKit(lambda: known_cache([]))
    store = KVStore(kit, StoreConfig(budget_bytes=2000 * TOKEN_BYTES), listener=listener)
    said = [tuple(chance.randrange(500) for _ in range(chance.randrange(64, 400))) for _ in range(3)]
    for _ in range(60):
        base = chance.choice(said)
        cut = chance.randrange(len(base) // 2, len(base) + 1)
        tokens = (*base[:cut], *(chance.randrange(500) for _ in range(chance.randrange(1, 300))))
        said.append(tokens)
        store.put(tokens, known_cache(tokens))
        listener.announce(as_tokens(tokens), store.peek(as_tokens(tokens), len(tokens)).length)
    assert store.stats()["evicted"] > 10
    held = {
        name
        for each in said
        for name in block_names(as_tokens(each))[: store.peek(as_tokens(each), len(each)).length // BLOCK]
    }
    assert listener.published == held
    store.clear()
    assert not listener.published
