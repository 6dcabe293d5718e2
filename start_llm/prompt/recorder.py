"""What is done with an answer when its last byte is out: the turn is recorded, and the client's next request guessed.

One thread of its own, so that no client waits for it. Recording goes before guessing, whoever came first.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import PriorityQueue

from start_llm.core.messages import Message
from start_llm.core.prompt import Prompt
from start_llm.prompt.pipeline import Pipeline, Prepared

log = logging.getLogger(__name__)

_RECORD, _GUESS, _PUBLISH, _END = range(4)

Publish = Callable[[Sequence[int], Sequence[int]], None]
"""Takes a conversation's tokens: plain ones (see `plain`), and those that were computed."""


class Recorder:
    """Works through finished answers. `finish` may be called from any thread and returns at once."""

    def __init__(
        self,
        pipeline: Pipeline,
        anchor: Callable[[Prompt, str, str | None], None] | None = None,
        publish: Publish | None = None,
    ) -> None:
        """`anchor` takes a guess, its session and its owner, to prefill it in an idle gap; None: nothing is guessed.
        `publish`: tells routers what is held of a conversation."""
        self._pipeline = pipeline
        self._anchor, self._publish = anchor, publish
        self._jobs: PriorityQueue[tuple[int, int, Callable[[], None]]] = PriorityQueue()
        self._numbers = itertools.count()
        self.failures = 0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def finish(self, prepared: Prepared, answer: Message, tokens: tuple[int, ...]) -> None:
        """Takes an answer whose end was announced by `Pipeline.expect`; `tokens` as for `Pipeline.record`."""
        self._jobs.put((_RECORD, next(self._numbers), partial(self._record, prepared, answer, tokens)))

    def flush(self) -> None:
        """Returns when all answers that were taken before are recorded, and what comes next is guessed."""
        self._jobs.join()

    def close(self) -> None:
        """Records what is waiting, drops guesses, and ends the thread."""
        self._anchor = self._publish = None
        self._jobs.put((_END, next(self._numbers), lambda: None))
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get())[0] != _END:
            try:
                job[2]()
            except Exception:  # a thread's edge: one answer is not remembered
                self.failures += 1
                log.warning("an answer could not be recorded", exc_info=True)
            finally:
                self._jobs.task_done()

    def _record(self, prepared: Prepared, answer: Message, tokens: tuple[int, ...]) -> None:
        self._pipeline.record(prepared, answer, tokens)
        if self._anchor is not None:
            self._jobs.put((_GUESS, next(self._numbers), partial(self._guess, prepared, answer, tokens)))
        if self._publish is not None:
            self._jobs.put((_PUBLISH, next(self._numbers), partial(self._tell_routers, prepared, answer, tokens)))

    def _guess(self, prepared: Prepared, answer: Message, tokens: tuple[int, ...]) -> None:
        guess = self._pipeline.predict(prepared, answer, tokens) if self._anchor is not None else None
        anchor = self._anchor  # closed meanwhile: nobody takes the guess any more
        if guess is not None and anchor is not None:
            anchor(guess, prepared.session, prepared.request.owner)

    def _tell_routers(self, prepared: Prepared, answer: Message, tokens: tuple[int, ...]) -> None:
        publish = self._publish
        if publish is not None:
            for plain in self._pipeline.plain(prepared, answer, tokens):
                publish(plain, (*prepared.prompt.tokens, *tokens))
