"""Rank 0: who may connect, and what is told of a rank that is lost."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Client, Listener
from queue import SimpleQueue
from typing import Any

import pytest

from start_llm.core.settings import Settings, setting_names
from start_llm.engine.ranks import channel, leader
from start_llm.engine.ranks.channel import Channel
from start_llm.engine.ranks.hosts import RankHost, shared_settings
from start_llm.engine.ranks.leader import LeaderGroup

KEY = b"k" * 32
HOSTS = [RankHost("here", "127.0.0.1"), RankHost("there", "127.0.0.1")]


@pytest.fixture
def lost() -> SimpleQueue[str]:
    return SimpleQueue()


@pytest.fixture
def group(lost: SimpleQueue[str]) -> LeaderGroup:
    return LeaderGroup(HOSTS, 60, lost.put)


def connected() -> tuple[Any, Any]:
    """The two ends of a connection."""
    with Listener(("127.0.0.1", 0)) as listener:
        return Client(listener.address), listener.accept()


@pytest.fixture
def other(group: LeaderGroup) -> Iterator[Channel]:
    """The other end of a channel that rank 0 watches."""
    client, server = connected()
    here, there = Channel(server, KEY, leads=True), Channel(client, KEY)
    watching = threading.Thread(target=group._watch, args=(1, here), daemon=True)
    watching.start()
    yield there
    there.close()
    watching.join(60)
    here.close()


def accepted(group: LeaderGroup, server: socket.socket) -> tuple[Channel, Any]:
    """The channel to rank 1, which connects now, and what it says first."""

    def connect() -> None:
        Channel(Client(server.getsockname(), authkey=KEY), KEY).send([{"rank": 1}])

    threading.Thread(target=connect, daemon=True).start()
    ((channel, hello),) = group._accept(server, KEY)
    return channel, hello


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"", b"\0\0\0\x04abcd", b"\0\0\xff\xff"])
def test_a_strangers_connection_does_not_hold_up_the_ranks(group: LeaderGroup, sent: bytes) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as stranger,
        socket.create_connection(server.getsockname()),  # says nothing
    ):
        stranger.sendall(sent)
        channel, hello = accepted(group, server)
        seen = stranger.recv(1000)
    assert hello == {"rank": 1}
    assert KEY not in seen and b"rank" not in seen
    channel.close()


def test_many_who_are_silent_keep_no_rank_out(group: LeaderGroup) -> None:
    with ExitStack() as held, socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        for _ in range(100):
            held.enter_context(socket.create_connection(server.getsockname()))
        channel, hello = accepted(group, server)
    assert hello == {"rank": 1}
    channel.close()


BEGIN = [1, "begin", [], "token", 10, {"model_path": "ours", "trust_remote_code": True}]
# What somebody in between does to two messages on their way.
RELAYS: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "rewrites a word": lambda sent: [sent[0].replace(b"ours", b"mine"), sent[1]],
    "leaves one out": lambda sent: sent[1:],
    "sends one again": lambda sent: [sent[0], sent[0]],
    "changes the order": lambda sent: sent[::-1],
    "makes one up": lambda sent: [bytes(32) + sent[0][32:]],
    "sends nothing of a message": lambda sent: [b""],
}


@pytest.mark.parametrize("relay", RELAYS)
def test_who_stands_between_two_ranks_changes_nothing(relay: str) -> None:
    (rank, to_rank), (from_leader, leads) = connected(), connected()
    leading = Channel(leads, KEY, leads=True)
    to_rank.send_bytes(from_leader.recv_bytes())
    follower = Channel(rank, KEY)
    for message in (BEGIN, [2, "value", 5]):
        leading.send(message)
    sent = [from_leader.recv_bytes() for _ in range(2)]
    for data in RELAYS[relay](sent):
        to_rank.send_bytes(data)
    with pytest.raises(ValueError, match="not what the other rank has sent"):
        assert follower.receive() == BEGIN  # of those that repeat, or come too late, the first one may be right
        follower.receive()
    leads.send_bytes(sent[0])  # back to who has sent it
    from_leader.send_bytes(sent[0])
    with pytest.raises(ValueError, match="not what the other rank has sent"):
        leading.receive()
    for connection in (rank, to_rank, from_leader, leads):
        connection.close()


def test_a_message_without_an_end_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MOST_BYTES", 1000)
    end, leads = connected()
    leading = Channel(leads, KEY, leads=True)
    end.recv_bytes()
    end.send_bytes(bytes(1001))
    with pytest.raises(OSError):  # before it was read
        leading.receive()
    end.close()


@pytest.mark.parametrize("line", [b"no JSON", b"{}", b"[]", b"\xff", b'["failed"]'])
def test_a_line_that_is_no_message_is_told(other: Channel, lost: SimpleQueue[str], line: bytes) -> None:
    other._send(line)
    assert lost.get(timeout=60).startswith("What rank 1 on there has sent is no message: ")


def test_a_rank_that_cannot_go_on_is_told_once(group: LeaderGroup, other: Channel, lost: SimpleQueue[str]) -> None:
    other.send(["done", 1, 7])
    other.send(["failed", "no room."])
    assert lost.get(timeout=60) == "Rank 1 on there cannot go on: no room."
    assert group._done[1].get(timeout=60) == [1, 7]
    other.close()
    assert lost.empty()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_rank_0_that_another_ranks_end_has_caused_is_told_as_that(
    group: LeaderGroup, other: Channel, lost: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: SimpleQueue[Any] = SimpleQueue()

    def leave(code: int) -> None:
        codes.put(code)
        raise SystemExit

    monkeypatch.setattr(leader, "END_SECONDS", 0)
    monkeypatch.setattr(leader, "OTHER_CAUSE_SECONDS", 60)
    monkeypatch.setattr(os, "_exit", leave)
    failing = threading.Thread(target=group.fail, args=("RuntimeError: [ring]",), daemon=True)
    failing.start()
    other.close()
    assert lost.get(timeout=60) == "Rank 1 on there has ended."
    assert codes.get(timeout=60) == 75 and lost.empty()
    failing.join(60)


def test_a_rank_that_confirms_something_else_is_lost(
    group: LeaderGroup, lost: SimpleQueue[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(leader, "END_SECONDS", 0)
    monkeypatch.setattr(leader, "OTHER_CAUSE_SECONDS", 0)
    monkeypatch.setattr(os, "_exit", leave)
    group.write("step")
    group._done[1].put([1, 7])
    group.confirm(7)
    group._done[1].put([1, 8])
    with pytest.raises(SystemExit, match="75"):
        group.confirm(7)
    assert lost.get(timeout=60) == "Rank 0 on here cannot go on: rank 1 has gone another way than rank 0 up to entry 1."


def test_no_key_goes_to_another_rank() -> None:
    keys = [name.lower() for name in setting_names() if name.endswith("_KEY")]
    assert len(keys) >= 3
    secrets = {name: f"a-secret-{number}" for number, name in enumerate(keys)}
    told = shared_settings(Settings.model_validate(secrets | {"max_kv_size": 512}))
    assert told["max_kv_size"] == 512 and "a-secret-" not in json.dumps(told)
