"""Sends a request and says what is wrong with the answer, if anything is. Limits are in the server's own seconds."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass

from tests.fuzz.requests import Request
from tests.fuzz.world import World

ALLOWED = {501, 503, 507}
MOST_SECONDS = 5.0
"""That a request may compute, and that it may wait for anything but a processor."""
GIVEN_UP_SECONDS = 120.0
"""That a grammar may go on computing after its request was given up: so many schemas as are allowed cost less."""
TRIES = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a request: by the clock, and on processors (all threads of this process)."""

    wall: float
    computed: float

    def too_much(self, most: float) -> bool:
        """Beside busy neighbours what is computed takes longer by the clock, and that says nothing of the server."""
        if self.wall < most:
            return False
        return self.computed > most or self.wall - self.computed * _stretch() > most


def _stretch() -> float:
    """How much longer a computation takes now than it would alone."""
    began, until = time.monotonic(), time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    return max(1.0, (time.monotonic() - began) / 0.1)


def check(served: World, request: Request, most_seconds: float = MOST_SECONDS) -> int:
    """One request; its status. Raises AssertionError for everything that a client must never see."""
    served.say(request.said)
    for _ in range(TRIES):
        let_end()
        began, computed = time.monotonic(), time.process_time()
        status, sent = served.ask(request)
        cost = Cost(time.monotonic() - began, time.process_time() - computed)
        if not cost.too_much(most_seconds):
            break
    else:  # each time, and alone: it was no neighbour's doing
        raise AssertionError(f"over {most_seconds:.0f} s: {cost}")
    assert status and (status < 500 or status in ALLOWED), (status, sent)
    assert not served.noise.found, served.noise.found
    if status == 200 and request.path.startswith(("/v1/", "/api/")) and "audio" not in request.path and sent:
        for value in values(sent):
            json.loads(value, parse_constant=_no_constant)
    return status


def let_end() -> None:
    """Waits for grammars of earlier requests that were given up: what they compute is not the next request's."""
    for thread in threading.enumerate():
        if thread.name == "grammar":
            computed = time.process_time()
            while thread.is_alive():
                thread.join(0.1)
                assert time.process_time() - computed < GIVEN_UP_SECONDS, "a grammar that was given up has no end"


def values(sent: bytes) -> list[bytes]:
    """The JSON texts of an answer, streamed or not."""
    if not sent.startswith((b"data:", b"event:", b":")):
        return sent.splitlines()  # one, or Ollama's stream of them
    lines = [line.removeprefix(b"data: ") for line in sent.split(b"\n") if line.startswith(b"data: ")]
    return [line for line in lines if line != b"[DONE]"]


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")
