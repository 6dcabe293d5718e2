"""Work that cannot be interrupted and may take for ever, with an end for those who wait for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import wait
from itertools import chain

from start_llm.core.errors import BadRequest, Unavailable
from start_llm.models.background import on_thread

log = logging.getLogger(__name__)

_LOOKS = 10  # in the time that a call has; by the clock a process that was stopped would look like a slow call


class Patience:
    """Runs calls on threads of their own, at most `threads` at once. May be used from any thread.

    Who has waited for `seconds` gets an error and goes on. The thread stays behind, keeps its place until it has ended,
    and does not keep the process alive: so a few endless calls can stop others of their kind, and nothing else.
    """

    def __init__(self, name: str, *, threads: int, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._places = threading.BoundedSemaphore(threads)

    def run[**P, T](self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `call` returns, or raises, on a thread of its own. Raises BadRequest: it takes too long (its thread goes
        on). Raises Unavailable: no thread became free in time."""
        part, looks = self._seconds / _LOOKS, iter(range(_LOOKS))
        if not any(self._places.acquire(timeout=part) for _ in looks):
            raise Unavailable(f"No {self._name} could be made within {self._seconds:g} s: others are being made.")
        answer = on_thread(lambda: call(*args, **kwargs), self._name)
        answer.add_done_callback(lambda _: self._places.release())
        for _ in chain((0,), looks):
            wait([answer], part)
            if answer.done():
                return answer.result()
        log.warning("a %s takes longer than %g s; its request is given up", self._name, self._seconds)
        raise BadRequest(
            f"The schema or the tools could not be made into a {self._name} within {self._seconds:g} s. "
            "Use fewer or simpler properties, alternatives and tools.",
            code="limit_exceeded",
        )
