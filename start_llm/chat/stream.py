"""A request on its way through the model thread, and the events that come back.

    tokens --> detokenise --> parse --> Events --> dialect

Runs on HTTP threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import astuple, replace
from functools import partial, reduce
from queue import Empty, SimpleQueue
from typing import Any

from start_llm.chat.handle import Lease, ModelHandle
from start_llm.chat.work import RequestWork
from start_llm.core import events as ev
from start_llm.core.errors import BadRequest, Internal, StartLLMError, TimedOut
from start_llm.core.messages import Message
from start_llm.core.report import DRAFT_COUNTS, Background, CacheReport
from start_llm.core.request import ChatRequest
from start_llm.core.service import EventStream
from start_llm.engine.thread import EngineThread
from start_llm.files.lru import Lru
from start_llm.models.background import on_thread
from start_llm.parsing.choice import ChoiceParser, Ending

log = logging.getLogger(__name__)

_CUT_EMPTY = (
    "The answer took longer than GENERATION_WATCHDOG_SECONDS and was cut before there was any text or call of it. "
    "Allow more time, or less thinking."
)
_CUTS = {Ending.WATCHDOG: "watchdog", Ending.REPETITION: "repetition"}

_REPORTS, _BACKGROUNDS = 1000, 300  # kept; the oldest go first

_Queue = SimpleQueue[tuple[ChoiceParser, str, ev.EngineEvent] | None]
"""(choice, id of the work for it, event); ``None``: the stream was closed."""


class RecentReports:
    """What is known of recent requests, for those who ask about them later. Any thread."""

    def __init__(self) -> None:
        self._reports: Lru[str, CacheReport] = Lru(_REPORTS)
        self._backgrounds: Lru[str, Background] = Lru(_BACKGROUNDS)
        self.remember, self.report = self._reports.put, self._reports.get
        self.remember_background = self._backgrounds.put

    def background(self, request_id: str) -> Background:
        """An empty one, if it is not known."""
        return self._backgrounds.get(request_id) or Background()


def _is_lost(engine: EngineThread) -> bool:
    """The model thread says nothing any more."""
    return engine.status().state in {"wedged", "failed", "stopped"}


class ChatStream(EventStream):
    """One request on its way: its choices, and the queue that all their events come through.

    Implements `core.service.EventStream`. Iterated by one thread; `close` may come from another.
    `poll`: seconds between two signs of life.
    """

    def __init__(self, engine: EngineThread, reports: RecentReports, work: RequestWork, poll: float) -> None:
        self._engine = engine
        self._reports = reports
        self._work = work
        self._poll = poll
        self._request = work.request
        self._model = work.model
        self._prepared = work.prepared
        self._queue: _Queue = SimpleQueue()
        self._choices = [work.choice(work.request.first_choice + index) for index in range(work.request.n)]
        self._ready: deque[ev.Event] = deque()
        self._last_sent = time.monotonic()
        self._progress = ev.Progress(0, 0)
        self._over = False
        self._closed = threading.Event()
        # The choice that was admitted first, and the engine's report of it: the prompt's KV is that one's work.
        self._first: ChoiceParser | None = None
        self._planned = CacheReport(prompt=len(work.prepared.prompt.tokens), session=work.prepared.session)
        self._computed = 0
        self._seconds_prefill = 0.0
        self._answering = False
        self._answer: Message | None = None
        self._drafts: Counter[str] = Counter()
        self._carried = 0  # prompt tokens computed for works that were given up
        self._repeated = 0
        self._fresh: set[int] = set()  # see `Pipeline.sent`

    def submit(self) -> None:
        """Sends all choices to the model thread, or none. Raises QueueFull, Unavailable."""
        try:
            for choice in self._choices:
                self._run(choice)
        except StartLLMError:
            self._cancel()
            raise
        self._fresh = self._model.pipeline.sent(self._prepared)

    def _run(self, choice: ChoiceParser, said: Sequence[int] = ()) -> None:
        """Has the model thread go on behind the tokens that are said. Raises QueueFull, Unavailable."""
        queue, work_id = self._queue, choice.work_id
        self._engine.submit(self._work.of(choice, lambda event: queue.put((choice, work_id, event)), said))

    def __next__(self) -> ev.Event:
        while not self._closed.is_set():
            if self._ready:
                event = self._ready.popleft()
                if self._over and isinstance(event, ev.ChoiceDone | ev.Done):
                    self._record()  # who reads that the answer is complete may go on from it
                self._last_sent = time.monotonic()
                return event
            if self._over:
                break
            # Tokens that show nothing yet (a call that is read as a whole) are no sign of life to the client.
            left = self._last_sent + self._poll - time.monotonic()
            try:
                news = self._queue.get(timeout=max(left, 0.0))
            except Empty:
                self._watch()
                continue
            if news is not None and news[1] == news[0].work_id:
                self._handle(news[0], news[2])
            elif news is not None:
                self._given_up(news[2])
            if left <= 0 and not self._ready:
                self._ready.append(self._progress)
        raise StopIteration

    def close(self) -> None:
        """Ends the stream; the turn of a complete answer is recorded, other work is cancelled."""
        self._closed.set()
        self._queue.put(None)
        if not self._over:
            self._cancel()
        self._record()

    def _record(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            self._model.recorder.finish(self._prepared, answer, self._choices[0].tokens)

    def _watch(self) -> None:
        """Nothing happened for a while: a sign of life, or the end if the model thread gives none."""
        if _is_lost(self._engine):
            status = self._engine.status()
            self._fail(Internal(status.detail or f"The model thread is {status.state}."))
        else:
            self._ready.append(self._progress)

    def _cancel(self) -> None:
        for choice in self._choices:
            if not choice.over:
                self._engine.cancel(choice.work_id)

    def _handle(self, choice: ChoiceParser, event: ev.EngineEvent) -> None:
        if isinstance(event, ev.Started):
            self._admitted(choice, event.report)
        elif isinstance(event, ev.Progress):
            if choice is self._first:
                self._computed = event.computed
            self._progress = event
            self._ready.append(self._progress)
        elif isinstance(event, ev.Sampled):
            self._sampled(choice, event)
        elif isinstance(event, ev.EngineDone):
            self._choice_done(choice, event)
        elif isinstance(event, ev.Failed):
            self._count(choice, event.report)
            self._fail(event.error)

    def _admitted(self, choice: ChoiceParser, report: CacheReport) -> None:
        if self._first is None:
            self._first = choice
            report = replace(report, session=self._prepared.session)
            pipeline, prepared = self._model.pipeline, self._prepared
            self._planned = pipeline.explain(report, prepared)
            parted = report.miss if report.miss is not None and report.miss.stored else None
            if parted is not None:
                expected = pipeline.text_at(prepared, parted.token, parted.stored)
                parted = replace(pipeline.locate(prepared, parted), expected=expected)
            self._reports.remember_background(self._request.id, Background(prepared.notes, parted))
            self._ready.append(ev.Started(replace(self._report(), computed=self._planned.computed)))

    def _sampled(self, choice: ChoiceParser, event: ev.Sampled) -> None:
        ended = choice.ending is not None
        if not self._answering:
            self._answering = True
            self._computed = max(self._computed, self._planned.computed)
            self._ready.append(ev.FirstToken())
        thinks = choice.parser.in_reasoning
        self._ready.extend(choice.sampled(event.token, event.logprob))
        if choice.ending is not None and not ended:
            self._engine.cancel(choice.work_id)
        if choice.repeats and not ended:
            self._repeats(choice, thinks and choice.parser.in_reasoning)

    def _repeats(self, choice: ChoiceParser, thinks: bool) -> None:
        """It is ended, or, once, its reasoning is closed and the answer begins: behind two periods of what repeats."""
        period, tags = choice.repeats, self._model.think_tokens
        self._repeated, choice.repeats = period, 0
        log.warning("%s repeats %d tokens again and again: it is ended", choice.work_id, period)
        if not thinks or tags is None or self._work.constraint is not None or choice.is_anew:
            return
        self._carried = self._computed if choice is self._first else self._carried
        kept = (*choice.without_repetition(period), tags[1])
        choice.ending, choice.is_anew, choice.work_id = None, True, f"{choice.work_id}+"
        self._ready.extend(choice.sampled(tags[1], None))
        try:
            self._run(choice, kept)
        except StartLLMError as error:
            self._fail(error)
        if self._closed.is_set():  # while this was on its way: nobody else cancels it
            self._engine.cancel(choice.work_id)

    def _choice_done(self, choice: ChoiceParser, event: ev.EngineDone) -> None:
        events = choice.finish(event.reason, event.tokens)
        self._count(choice, event.report)
        if choice.ending is Ending.WATCHDOG and not choice.seen:
            self._fail(TimedOut(_CUT_EMPTY))
            return
        self._ready.extend(events)
        if all(c.over for c in self._choices):
            self._all_done()

    def _given_up(self, event: ev.EngineEvent) -> None:
        """Counts what the drafts of a work that was given up have cost: all that is wanted of it."""
        if isinstance(event, ev.EngineDone):
            self._drafts.update({name: getattr(event.report, name) for name in DRAFT_COUNTS})

    def _count(self, choice: ChoiceParser, report: CacheReport | None) -> None:
        """Adds the work that the model thread has done for a choice, by its last word on it."""
        choice.over = True
        if report is None:
            return
        self._drafts.update({name: getattr(report, name) for name in DRAFT_COUNTS})
        if choice is self._first:
            self._computed, self._seconds_prefill = self._carried + report.computed, report.seconds_prefill

    def _all_done(self) -> None:
        self._over = True
        report = self._report()
        usage = ev.Usage(
            prompt=len(self._prepared.prompt.tokens),
            completion=report.generated,
            cached=report.reused,
            reasoning=sum(c.reasoning for c in self._choices),
        )
        self._reports.remember(self._request.id, report)
        first = self._choices[0]
        if self._request.prompt is None and first.ending is not Ending.WATCHDOG:  # a turn that was cut is none
            self._answer = first.message()
        self._ready.append(ev.Done(usage, report))

    def _fail(self, error: StartLLMError) -> None:
        self._over = True
        self._cancel()
        self._reports.remember(self._request.id, self._report())
        self._ready.append(ev.Failed(error))

    def last_report(self, patience: float) -> CacheReport:
        """See `core.service.EventStream`. Called by the thread that iterated."""
        until = time.monotonic() + patience
        while not all(choice.over for choice in self._choices):
            try:
                news = self._queue.get(timeout=max(0.0, min(self._poll, until - time.monotonic())))
            except Empty:
                if time.monotonic() >= until or _is_lost(self._engine):
                    break
                continue
            if news is None:
                continue
            choice, work_id, event = news
            if work_id != choice.work_id:
                self._given_up(event)
            elif isinstance(event, ev.EngineDone | ev.Failed):
                self._count(choice, event.report)
            elif isinstance(event, ev.Started | ev.Progress):
                self._handle(choice, event)
        report = self._report()
        if not self._answering:
            self._model.pipeline.ended_early(self._prepared, self._fresh, report.reused + report.computed)
            report = replace(report, new=min(report.new, report.computed))
        self._reports.remember(self._request.id, report)
        return report

    def _report(self) -> CacheReport:
        """The request's report, as far as it is known: the only place that makes it."""
        choices = self._choices
        return replace(
            self._planned,
            computed=self._computed,
            generated=sum(choice.completion for choice in choices),
            **dict[str, Any](self._drafts),
            seconds_prefill=self._seconds_prefill,
            cut=next((word for ending, word in _CUTS.items() if any(c.ending is ending for c in choices)), ""),
            repeated=self._repeated,
        )


class PromptsStream(EventStream):
    """The streams of a request's prompts as one. Each is read by a thread of its own: stop strings are found where a
    stream is read, so that no prompt may wait for the end of another one. `close` may come from any thread."""

    def __init__(self, make: Callable[[ChatRequest], AnyStream], request: ChatRequest, reports: RecentReports) -> None:
        """`make` makes one prompt's stream. Raises StartLLMError; BadRequest names the prompt."""
        self._remember = partial(reports.remember, request.id)
        self._news: SimpleQueue[ev.Event | None] = SimpleQueue()
        self._events, self._streams = self._all(), list[AnyStream]()
        self._readers: list[Future[None]] = []
        try:
            for one in request.by_prompt():
                self._streams.append(make(one))
        except BadRequest as error:
            if error.param in {"prompt", "messages"}:  # others are of all prompts
                error.param = f"prompt[{len(self._streams)}]"
                error.message = f"{error.param}: {error.message}"
            raise

    def submit(self) -> None:
        """Sends all prompts to the model thread, or none. Raises QueueFull, Unavailable."""
        try:
            for stream in self._streams:
                stream.submit()
            self._readers += (on_thread(partial(self._read, each), "prompt") for each in self._streams)
        except BaseException:  # also where no thread can be started
            self.close()
            self.last_report(0.0)  # what was not computed does not count as sent
            raise

    def __next__(self) -> ev.Event:
        return next(self._events)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def last_report(self, patience: float) -> CacheReport:
        until = time.monotonic() + patience
        wait(self._readers, patience)
        reports = (stream.last_report(until - time.monotonic()) for stream in self._streams)
        self._remember(report := reduce(CacheReport.plus, reports))
        return report

    def _read(self, stream: AnyStream) -> None:
        try:
            for event in stream:
                self._news.put(event)
        except BaseException:
            self.close()  # nobody waits for the others any more
            raise
        finally:
            self._news.put(None)

    def _all(self) -> Iterator[ev.Event]:
        starts, ends = list[CacheReport](), list[ev.Done]()
        for _ in self._streams:
            while (event := self._news.get()) is not None:
                if isinstance(event, ev.Done):
                    ends.append(event)
                elif not isinstance(event, ev.Started):
                    yield event
                else:
                    starts.append(event.report)
                    if len(starts) == len(self._streams):
                        yield ev.Started(reduce(CacheReport.plus, starts))
        for reader in self._readers:
            reader.result()  # raises what broke it
        if len(ends) == len(self._streams):
            self._remember(report := reduce(CacheReport.plus, (end.report for end in ends)))
            yield ev.Done(ev.Usage(*map(sum, zip(*(astuple(end.usage) for end in ends), strict=True))), report)


AnyStream = ChatStream | PromptsStream


class WaitingStream(EventStream):
    """Implements `core.service.EventStream`: a request's stream and its hold on the model, which may not be there yet.

    Until the model is loaded it shows life; closing it gives the model free.
    """

    def __init__(self, lease: Lease[ModelHandle], begin: Callable[[], AnyStream], poll: float) -> None:
        self._lease = lease
        self._begin = begin
        self._poll = poll
        self._stream: AnyStream | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The model is there, or cannot be loaded. Raises StartLLMError; it is closed then."""
        try:
            stream = self._begin()
            stream.submit()
        except BaseException:
            self.close()
            raise
        with self._lock:
            self._stream = stream
            closed = self._over.is_set()
        if closed:
            stream.close()

    def __next__(self) -> ev.Event:
        while self._stream is None:
            if not (self._over.is_set() or self._lease.wait(self._poll)):
                return ev.Progress(0, 0)
            if self._over.is_set():
                raise StopIteration
            try:
                self.begin()
            except StartLLMError as error:
                return ev.Failed(error)
        return next(self._stream)

    def close(self) -> None:
        with self._lock:
            self._over.set()
            stream = self._stream
        if stream is not None:
            stream.close()
        self._lease.close()

    def last_report(self, patience: float) -> CacheReport | None:
        return None if self._stream is None else self._stream.last_report(patience)
