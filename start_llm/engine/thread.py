"""The model thread: the only one that touches MLX arrays. Commands go in by queue, events come out by sinks.

It serves all models that are loaded. It begins without any; each comes by `load` and goes by `unload`, in
steps, between the steps of those that work. Here is what other threads may ask of it, and how it begins and ends;
`loop` is what it does meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from start_llm.core.errors import ExitCode, Internal, TimedOut, Unavailable
from start_llm.core.prompt import Prompt
from start_llm.core.report import CacheReport, StoredTree
from start_llm.core.request import Sampling
from start_llm.core.work import EngineStatus, Submit
from start_llm.engine.loop import SHUTTING_DOWN, Command, Loop
from start_llm.engine.runtime import TextRuntime
from start_llm.engine.schedule.prefill import planned
from start_llm.engine.schedule.scheduler import Scheduler
from start_llm.engine.watchdog import InflightRequests, Watchdog
from start_llm.host.pressure import Pressure

log = logging.getLogger(__name__)

UNWATCHED_SECONDS = 600.0  # without a watchdog: when the status calls the model wedged
WEDGED_RETRY_SECONDS = 30.0
CLOSE_SECONDS = 40.0  # what writing the last KV to disk may take at the end
LONG_PROMPT = 4096  # new tokens: a prompt with more is refused while memory is critically short
SHORT_RETRY_SECONDS = 10.0
_SHORT = {
    Pressure.WARNING: "Other programs need this machine's memory: stored KV is kept on disk only.",
    Pressure.CRITICAL: "Other programs need nearly all of this machine's memory: long new prompts are refused.",
}


class EngineThread:
    """The model thread as other threads see it: any of them may call its methods.

    `model` is one of those that are loaded; empty: the first. The state is ``loading`` until the first model is loaded.
    If that one cannot be loaded the state becomes ``failed``, and so it does when the thread dies. Nothing that a
    request does may hang for ever: where the model does not move for `watchdog` seconds, every request that is open
    fails, and new ones are refused, until it moves again.

    Args:
        at_end: the last call on the model thread, when all models are closed.
        watchdog: seconds; 0: requests wait however long it takes, and only the status says that the model is wedged.
        on_lost: called once, from any thread, when the engine will not come back: the thread has died, or has not
            moved for twice the watchdog's time.
    """

    def __init__(
        self,
        *,
        max_queue: int,
        max_concurrency: int,
        watchdog: float = 600.0,
        on_lost: Callable[[ExitCode, str], None] = lambda code, why: None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._at_end = at_end
        self._watchdog_seconds = watchdog
        self._on_lost = on_lost
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._requests = InflightRequests(max_queue + max_concurrency)
        unwatched = watchdog or UNWATCHED_SECONDS
        self._loop = Loop(self._commands, min(1.0, unwatched / 4))
        self._stopping = False
        self._lost = ""
        self._thread = threading.Thread(target=self._main, name="model", daemon=True)
        beat, thread_id = lambda: self._loop.status.beat, lambda: self._thread.ident or 0
        self._watchdog = Watchdog(unwatched, beat, thread_id, wedged=self._wedged, hopeless=self._hopeless)
        self._idle_prefills = 0
        self._pressure = Pressure.NORMAL

    # --- any thread -----------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: Submit) -> None:
        """Hands the work over and returns; what fails later goes to its sink. Raises QueueFull, Unavailable."""
        status = self.status()
        if self._stopping:
            raise Unavailable(SHUTTING_DOWN)
        if self._lost or status.state in {"loading", "failed", "stopped"}:
            raise Unavailable(status.detail or f"The model is {status.state}.")
        _refuse_wedged(status, self._watchdog_seconds)
        if self._pressure is Pressure.CRITICAL and len(work.prompt.tokens) > LONG_PROMPT:
            new = len(work.prompt.tokens) - self.plan(work.prompt, work.model).reused
            if new > LONG_PROMPT:
                raise Unavailable(
                    f"{_SHORT[Pressure.CRITICAL]} This one has {new:,} tokens that are not stored; {LONG_PROMPT:,} are "
                    "taken now. Close another program, or try again.",
                    retry_after=SHORT_RETRY_SECONDS,
                )
        self._commands.put(partial(self._loop.submit, self._requests.add(work)))

    def press(self, level: Pressure) -> None:
        """How short of memory the machine is; to be said again while it is short: memory is given back in steps."""
        self._pressure = level
        self._commands.put(partial(self._loop.press, level))

    def cancel(self, work_id: str) -> None:
        """Ends the work within one token or one prefill chunk; unknown ids are ignored."""
        self._commands.put(partial(self._loop.cancel, work_id))

    def plan(self, prompt: Prompt, model: str = "") -> CacheReport:
        """How much of `prompt` would be reused now. Does not wait for the model; raises Unavailable, TimeoutError."""
        return planned(self._loop.scheduler(model).store, prompt.tokens)

    def stored(self, model: str = "") -> StoredTree:
        """All that is stored now. Does not wait for the model; raises Unavailable, TimeoutError."""
        return self._loop.scheduler(model).store.unguarded.snapshot()

    def call(self, function: Callable[[Scheduler], Any], timeout: float = 10.0, model: str = "") -> Any:
        """Runs `function` on the model thread and returns what it returns; for probes and benchmarks."""
        answer: SimpleQueue[Any] = SimpleQueue()
        self._commands.put(partial(self._loop.call, function, model, answer.put))
        try:
            return _returned(answer.get(timeout=timeout))
        except Empty:
            raise Unavailable("The model thread is busy; try again.") from None

    def load(self, model: str, steps: Generator[float, None, TextRuntime]) -> TextRuntime:
        """Runs `steps` on the model thread, between the steps of the models that work, and adds what they return.

        Returns it when that is done. Raises what the steps raise, Unavailable if the thread ends before. The first
        model has all the time that it needs: the thread is watched from then on.
        """
        runtime: TextRuntime = self.guest(self._loop.adding(model, steps))
        self._watchdog.start()
        return runtime

    def unload(self, model: str) -> None:
        """Ends the model's requests, brings its KV to disk and frees it, between the steps of others; as `load`."""
        self.guest(self._loop.removing(model))

    def chore(self, steps: Generator[float, None, Any]) -> Any:
        """Runs `steps` on the model thread, between the steps of the models that work.

        Returns what they return, when that is done. Raises what they raise, Unavailable if the thread ends before
        or hangs already, TimedOut if it has not moved for the watchdog's time.
        """
        _refuse_wedged(self.status(), self._watchdog_seconds)
        return self.guest(steps, limit=self._watchdog_seconds)

    def guest(self, steps: Generator[float, None, Any], limit: float = 0.0) -> Any:
        """As `load`, for what is no model of the loop. `limit`: not 0: a thread that hangs is not waited for."""
        if self._loop.status.state in {"failed", "stopped"}:
            raise Unavailable(self._loop.status.detail or SHUTTING_DOWN)
        answer: SimpleQueue[Any] = SimpleQueue()
        self._commands.put(partial(self._loop.chores.add, steps, answer.put))
        while True:
            try:
                return _returned(answer.get(timeout=1.0))
            except Empty:
                if not self._thread.is_alive():
                    raise Unavailable(self._loop.status.detail or SHUTTING_DOWN) from None
                if limit and self.status().state == "wedged":
                    raise TimedOut(_hangs(limit)) from None

    def prefill_idle(self, prompt: Prompt, session: str | None, owner: str | None = None, *, model: str = "") -> None:
        """Computes `prompt` when there is nothing else to do; dropped as soon as there is."""
        self._idle_prefills += 1
        name, nobody = f"idle-{self._idle_prefills}", lambda event: None
        work = Submit(name, prompt, Sampling(), max_tokens=1, sink=nobody, session=session, owner=owner, model=model)
        self._commands.put(partial(self._loop.prefill_idle, work))

    def watched(self) -> float:
        """See `Watchdog`, which runs from the first model's loading on."""
        return self._watchdog.watched

    def status(self) -> EngineStatus:
        """The loop's, with what it cannot know: being lost or wedged, and how many requests run and wait now."""
        status, since = self._loop.status, self._watchdog.since
        if self._lost:
            return replace(status, state="wedged", detail=self._lost)
        if status.state in {"ready", "busy"}:  # now, not before the step that the model is in
            there = len(self._requests)  # without those whose final event is out
            running = min(self._loop.models.running, there)
            status = replace(status, running=running, queued=there - running, detail=_SHORT.get(self._pressure, ""))
        if since is None or status.state not in {"ready", "busy"}:
            return status
        return replace(status, state="wedged", detail=_not_moving(since), since=since)

    def stop(self, patience: float = 10.0) -> bool:
        """Ends running work with 503 and waits for the thread's end. False: it has not come to one.

        A thread that is wedged or still loading is not waited for, one that is in a step as long as it has moved
        in the last `patience` seconds.
        """
        self._stopping = True
        self._commands.put(None)
        closing = time.monotonic() + CLOSE_SECONDS
        while self._thread.is_alive():
            status, now = self.status(), time.monotonic()
            limit = {"loading": 0.0, "wedged": 0.0, "stopped": closing}.get(status.state, status.beat + patience)
            if now >= limit:
                break
            self._thread.join(min(0.1, limit - now))
        gone = not self._thread.is_alive()
        self._watchdog.stop()
        self._requests.fail(Unavailable(SHUTTING_DOWN))
        return gone

    def lose(self, why: str) -> None:
        """The model thread will not go on: all requests fail with this sentence, new ones are refused. Any thread."""
        self._lost = why
        self._requests.fail(Unavailable(why))

    # --- watchdog's thread --------------------------------------------------------

    def _wedged(self) -> None:
        """At each look while the thread does not move: open requests fail with TimedOut, and are cancelled."""
        if self._watchdog_seconds and self._loop.status.state in {"ready", "busy"}:
            for work_id in self._requests.fail(TimedOut(_hangs(self._watchdog_seconds))):
                self.cancel(work_id)

    def _hopeless(self) -> None:
        if self._watchdog_seconds and self._loop.status.state in {"ready", "busy"} and not self._stopping:
            self._on_lost(ExitCode.WEDGED, _not_moving(self._watchdog.since or time.time()))

    # --- model thread -----------------------------------------------------------

    def _main(self) -> None:
        """The thread, until `stop`. What the loop raises fails all requests and goes to `on_lost`. Frees all models."""
        try:
            self._loop.run()
        except BaseException as error:
            log.critical("the model thread died", exc_info=True)
            why = f"The model thread died ({type(error).__name__}: {error})."
            self._loop.set("failed", detail=why)
            self._requests.fail(Internal(why))
            self._on_lost(ExitCode.ENGINE_DIED, why)
        finally:
            self._loop.close()
            self._at_end()


def _refuse_wedged(status: EngineStatus, watchdog: float) -> None:
    """What waits for a thread that hangs would be too late, and take memory until then."""
    if status.state == "wedged" and watchdog:
        raise Unavailable(status.detail, retry_after=min(watchdog, WEDGED_RETRY_SECONDS))


def _returned(result: Any) -> Any:
    """What a call on the model thread returned; what it raised is raised."""
    if isinstance(result, BaseException):
        raise result
    return result


def _hangs(limit: float) -> str:
    return f"The model has not moved for {limit:g} s (GENERATION_WATCHDOG_SECONDS); the request was given up."


def _not_moving(since: float) -> str:
    when = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"The model thread has not moved for {time.time() - since:.0f} s (since {when})."
