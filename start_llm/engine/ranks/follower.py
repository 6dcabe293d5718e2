"""A rank that is not the first: reads the log of rank 0."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn

from start_llm.core.errors import ExitCode
from start_llm.engine.ranks.channel import Channel
from start_llm.engine.ranks.group import RankGroup


class FollowerGroup(RankGroup):
    """Ends the process when it is out of step, or rank 0 gives no sign of life: a pass of the model may hang then.

    Args:
        silent_seconds: without a sign of life from rank 0 it is lost. When rank 0 has said that all end, the process is
            ended after so long: the pass that it is in may wait for another rank for ever.

    Attributes:
        sequence: of the entry that was read last.
    """

    def __init__(self, rank: int, channel: Channel, addresses: list[str], silent_seconds: float) -> None:
        super().__init__(rank, len(addresses))
        self.addresses = addresses
        self._channel, self._silent_seconds = channel, silent_seconds
        self._entries: SimpleQueue[list[Any]] = SimpleQueue()
        self._ended = threading.Event()  # the model thread is in no pass any more
        self.sequence = 1  # the first entry was read to make this
        channel.show_life(silent_seconds)
        threading.Thread(target=self._read, name="rank-log", daemon=True).start()

    def loaded(self) -> None:
        self._channel.limit = self._silent_seconds

    def confirm(self, digest: int) -> None:
        with suppress(OSError):  # rank 0 has gone: the other thread says it
            self._channel.send(["done", self.sequence, digest])

    def agree(self, value: Any) -> Any:
        """Waits for rank 0's value; its own does not count. An entry of another kind ends the process."""
        kind, *given = self.next()
        if kind != "value":
            self.fail(f"it needs a value of rank 0, and entry {self.sequence} is {kind}.")
        return given[0]

    def next(self) -> list[Any]:
        """Model thread: waits for the next entry, its kind and the rest. A gap in the numbers ends the process."""
        sequence, *entry = self._entries.get()
        if sequence != self.sequence + 1:
            self.fail(f"entry {sequence} follows {self.sequence}.")
        self.sequence = sequence
        if entry[0] == "stop":
            self._ended.set()
        return entry

    def fail(self, why: str) -> NoReturn:
        """Tells rank 0 why, and ends this process at once."""
        self._ended.set()
        with suppress(OSError):
            self._channel.send(["failed", why])
        self._leave(why)

    def _leave(self, why: str) -> NoReturn:
        print(f"rank {self.rank}: {why}", file=sys.stderr, flush=True)
        os._exit(ExitCode.WEDGED)

    def _read(self) -> None:
        """A thread of its own."""
        entry: list[Any] = [0, ""]
        while entry[1] != "stop":
            try:
                entry = self._channel.receive()
                if entry[1] == "lost":  # rank 0 has said why
                    os._exit(ExitCode.WEDGED)
            except TimeoutError:
                self._leave(f"rank 0 has given no sign of life for {self._channel.limit:g} s.")
            except (OSError, EOFError):
                self._leave("rank 0 has ended.")
            except Exception as error:  # noqa: BLE001 - the thread's edge: told, and this rank ends
                self.fail(f"what it has read from rank 0 is no entry: {type(error).__name__}: {error}.")
            self._entries.put(entry)
        if not self._ended.wait(self._silent_seconds):
            self._leave("rank 0 has ended, and a pass has not.")
