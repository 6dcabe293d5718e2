"""Rank 0: starts the other ranks, writes the log that they follow, and notices when one of them is lost.

The log goes one way. An entry is what the model thread does next (see `lockstep`) or a value that all agree on. The
other ranks send signs of life, and one sentence when they end. Collective operations of MLX carry no commands.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from typing import Any, NoReturn

from start_llm.core.errors import ExitCode, Unavailable
from start_llm.engine.ranks.channel import START_SECONDS, Channel
from start_llm.engine.ranks.group import RankGroup
from start_llm.engine.ranks.hosts import RankHost, host_command, versions
from start_llm.engine.ranks.lockstep import LeaderScheduler
from start_llm.host.home import python_path
from start_llm.host.ports import free_port

log = logging.getLogger(__name__)

RANK_SECONDS = 10.0
"""A rank that gives no sign of life for so long is lost."""
END_SECONDS = 5.0  # until a rank that was told to end is killed
LOST_END_SECONDS = 0.5  # the same, where one is lost
HELLO_SECONDS = 10  # that one who connects may be silent before it has shown that it knows the key
ACCEPT_SECONDS = 0.02  # between two looks whether all have connected, or one has ended
MOST_CALLERS = 64  # who have connected, and have not shown it yet
OTHER_CAUSE_SECONDS = 0.3  # a pass often fails because another rank has gone, which is noticed on another thread


class LeaderGroup(RankGroup):
    """
    Args:
        hosts: of all ranks; the first one is this machine.
        silent_seconds: a rank without a sign of life for so long is lost.
        on_lost: is told in a sentence, once, on any thread, that a rank is lost. Nothing can go on then, and it ends
            the process soon.
    """

    def __init__(self, hosts: Sequence[RankHost], silent_seconds: float, on_lost: Callable[[str], None]) -> None:
        super().__init__(0, len(hosts))
        self._hosts, self._silent_seconds, self._on_lost = list(hosts), silent_seconds, on_lost
        self._channels: list[Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sequence = 0
        self._ending = threading.Lock()  # held from the end on, whoever began it
        self._ended = threading.Event()  # the same, to wait for
        self._is_lost = False
        self._done: list[SimpleQueue[list[Any]]] = [SimpleQueue() for _ in hosts]  # what each rank has confirmed

    # --- start and end; not the model thread --------------------------------------

    def start(self, about: dict[str, Any]) -> None:
        """Starts the other ranks with `about`, and waits for all. Raises Unavailable: one ended, or differs."""
        key, here = secrets.token_bytes(32), self._hosts[0].address
        self.token = secrets.token_hex(16)
        with socket.create_server((here, 0), backlog=MOST_CALLERS) as server:
            leader = f"{here}:{server.getsockname()[1]}"
            for rank, host in enumerate(self._hosts[1:], 1):
                self._processes.append(_start(rank, host, leader, key))
            connected = self._accept(server, key)
        others = sorted(connected, key=lambda pair: int(pair[1]["rank"]))
        for _, hello in others:
            if hello["versions"] != versions():
                raise Unavailable(f"Rank {hello['rank']} has {hello['versions']}, rank 0 has {versions()}.")
        self._channels = [channel for channel, _ in others]
        self.least_usable = min(int(hello["usable"]) for _, hello in others)
        ports = [free_port(here), *(int(hello["port"]) for _, hello in others)]
        self.addresses = [f"{host.address}:{port}" for host, port in zip(self._hosts, ports, strict=True)]
        self.write("begin", self.addresses, self.token, self._silent_seconds, about)
        for rank, channel in enumerate(self._channels, 1):
            channel.show_life(self._silent_seconds)
            threading.Thread(target=self._watch, args=(rank, channel), name=f"rank-{rank}", daemon=True).start()

    def _accept(self, server: socket.socket, key: bytes) -> list[tuple[Channel, dict[str, Any]]]:
        """Channels with what each rank said of itself. Raises Unavailable."""
        found: dict[int, tuple[Channel, dict[str, Any]]] = {}
        until = time.monotonic() + START_SECONDS
        callers: list[socket.socket] = []

        def welcome(caller: socket.socket) -> None:  # a thread for each: one that is silent holds nobody up
            try:
                try:
                    channel = _authenticated(caller, key)
                finally:
                    with suppress(ValueError):
                        callers.remove(caller)
                hello = channel.receive()[0]
                found[int(hello["rank"])] = (channel, hello)
            except (AuthenticationError, EOFError, OSError, ValueError, LookupError, TypeError):
                log.info("somebody who is no rank has connected", exc_info=True)

        server.settimeout(ACCEPT_SECONDS)
        while len(found) < self.size - 1:
            with suppress(OSError):  # nobody calls
                caller, _ = server.accept()
                callers.append(caller)
                threading.Thread(target=welcome, args=(caller,), name="rank-caller", daemon=True).start()
                if len(callers) > MOST_CALLERS:  # who is silent for longest goes: the next one may be a rank
                    callers.pop(0).shutdown(socket.SHUT_RDWR)
            ended = [rank for rank, process in enumerate(self._processes, 1) if process.poll() is not None]
            if ended or time.monotonic() > until:
                self._kill()
                which = ended or sorted({*range(1, self.size)} - {*found})
                names = ", ".join(f"rank {rank} on {self._hosts[rank].name}" for rank in which)
                raise Unavailable(f"{names}: {'ended' if ended else 'did not connect'} before the start.")
        return list(found.values())

    def leave(self) -> None:
        self._ending.acquire(blocking=False)
        self._ended.set()

    def stop(self) -> None:
        """Tells the other ranks to end; kills those that have not after `END_SECONDS`. May be called twice."""
        self.leave()
        with suppress(OSError):
            self.write("stop")
        until = time.monotonic() + (LOST_END_SECONDS if self._is_lost else END_SECONDS)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _watch(self, rank: int, channel: Channel) -> None:
        """A thread for each other rank."""
        host = self._hosts[rank].name
        try:
            while (message := channel.receive())[0] == "done":
                self._done[rank].put(message[1:])
            why = f"Rank {rank} on {host} cannot go on: {message[1]}"
        except TimeoutError:
            why = f"Rank {rank} on {host} has given no sign of life for {channel.limit:g} s."
            for process in self._processes[rank - 1 : rank]:  # it does not end by itself
                process.kill()
        except (OSError, EOFError):
            why = f"Rank {rank} on {host} has ended."
        except Exception as error:  # noqa: BLE001 - the thread's edge: told, and all ends
            why = f"What rank {rank} on {host} has sent is no message: {type(error).__name__}: {error}."
        self._lose(why)

    def _lose(self, why: str) -> None:
        """Once, on any thread: tells `on_lost`, then the other ranks."""
        if self._ending.acquire(blocking=False):
            self._is_lost = True
            self._ended.set()
            self._on_lost(why)  # first: it ends this process even if a frozen rank takes no entry
            self.write("lost")

    def fail(self, why: str) -> NoReturn:
        """Ends all: by `on_lost`, unless it was told of another cause, and by itself after `END_SECONDS`."""
        if not self._ended.wait(OTHER_CAUSE_SECONDS):
            self._lose(f"Rank 0 on {self._hosts[0].name} cannot go on: {why}")
        time.sleep(END_SECONDS)
        os._exit(ExitCode.WEDGED)

    # --- model thread -----------------------------------------------------------

    def scheduler(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        return partial(LeaderScheduler, ranks=self)

    def loaded(self) -> None:
        for channel in self._channels:
            channel.limit = self._silent_seconds

    def agree(self, value: Any) -> Any:
        self.write("value", value)
        return value

    def confirm(self, digest: int) -> None:
        """The wait ends with the process if a rank is lost meanwhile."""
        for rank, done in enumerate(self._done[1:], 1):
            sequence, theirs = done.get()
            if (sequence, theirs) != (self._sequence, digest):
                self.fail(f"rank {rank} has gone another way than rank 0 up to entry {self._sequence}.")

    def write(self, kind: str, *given: Any) -> None:
        """Adds an entry. A rank that has gone is told of by its own thread."""
        self._sequence += 1
        for channel in self._channels:
            with suppress(OSError):
                channel.send([self._sequence, kind, *given])


def _authenticated(caller: socket.socket, key: bytes) -> Channel:
    """Raises AuthenticationError, EOFError or OSError: the other end does not know the key, or is silent."""
    caller.setblocking(True)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HELLO_SECONDS, 0))
    connection = Connection(os.dup(caller.fileno()))
    deliver_challenge(connection, key)
    answer_challenge(connection, key)
    channel = Channel(connection, key, leads=True)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    caller.close()
    return channel


def _start(rank: int, host: RankHost, leader: str, key: bytes) -> subprocess.Popen[bytes]:
    """A rank's process, here or by ssh. It reads the key from its standard input. `leader`: ``address:port``."""
    command = host_command(host, "rank", "--rank", str(rank), "--leader", leader, "--address", host.address)
    environment = os.environ | {"PYTHONPATH": python_path()}
    # In a group of its own: Ctrl-C is for rank 0, which tells the others.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, env=environment, process_group=0)
    assert process.stdin is not None
    with suppress(OSError):  # it has ended: `_accept` says so
        process.stdin.write(key.hex().encode() + b"\n")
        process.stdin.flush()
    return process
