"""What is done with a complete answer: the turn is recorded, then the client's next request is guessed.

An answer's end waits for the first (2 ms, also for long conversations). The rest has a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Queue

from start_llm.core.messages import Message
from start_llm.core.prompt import Prompt
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.prepared import Prepared

log = logging.getLogger(__name__)

Publish = Callable[[Sequence[int], Sequence[int]], None]
"""Takes a conversation's tokens: plain ones (see `plain`), and those that were computed."""


class Recorder:
    """`finish` and `flush` may be called from any thread."""

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
        self._jobs: Queue[Callable[[], None] | None] = Queue()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def finish(self, prepared: Prepared, answer: Message, tokens: tuple[int, ...]) -> None:
        """Returns when the turn is recorded: the next request finds it. `tokens` as for `Pipeline.record`."""
        self._try(partial(self._pipeline.record, prepared, answer, tokens))
        if self._anchor is not None:
            self._jobs.put(partial(self._guess, prepared, answer, tokens))
        if self._publish is not None:
            self._jobs.put(partial(self._tell_routers, prepared, answer, tokens))

    def flush(self) -> None:
        """Returns when what comes after the answers that were taken before is guessed and published."""
        self._jobs.join()

    def close(self) -> None:
        """Drops guesses, and ends the thread."""
        self._anchor = self._publish = None
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._try(job)
            self._jobs.task_done()

    def _try(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:  # a client has its answer, whether it can be remembered or not
            log.warning("an answer could not be recorded", exc_info=True)

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
