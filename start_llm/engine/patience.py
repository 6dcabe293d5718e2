"""Work that cannot be interrupted and may take for ever, with an end for those who wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from start_llm.core.errors import BadRequest, Unavailable
from start_llm.models.background import on_thread

log = logging.getLogger(__name__)


class Patience:
    """Runs calls on threads of their own, at most `threads` at once. May be used from any thread.

    Who has waited for `seconds` gets an error and goes on. The thread stays behind, keeps its place until it has ended,
    and does not keep the process alive: so a few endless calls can stop others of their kind, and nothing else.
    """

    def __init__(self, name: str, *, threads: int, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._places = threading.BoundedSemaphore(threads)

    def run[**P, T](self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `call` returns; what it raises is raised here.

        Raises BadRequest: it takes too long. Raises Unavailable: no thread became free in time.
        """
        until = time.monotonic() + self._seconds
        if not self._places.acquire(timeout=self._seconds):
            raise Unavailable(f"No {self._name} could be made within {self._seconds:g} s: others are being made.")
        answer = on_thread(lambda: call(*args, **kwargs), self._name)
        answer.add_done_callback(lambda _: self._places.release())
        try:
            return answer.result(timeout=max(until - time.monotonic(), self._seconds / 10))
        except TimeoutError:
            if answer.done():
                raise
            log.warning("a %s takes longer than %g s; its request is given up", self._name, self._seconds)
            raise BadRequest(
                f"The schema or the tools could not be made into a {self._name} within {self._seconds:g} s. "
                "Use fewer or simpler properties, alternatives and tools.",
                code="limit_exceeded",
            ) from None
