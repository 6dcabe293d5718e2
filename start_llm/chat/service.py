"""One request, top to bottom. The page to read first.

    ChatRequest --prepare--> Prompt --submit--> model thread
    model thread --tokens--> detokenise --> parse --> Events --> dialect   (chatstream)

Runs on HTTP threads. What it knows of a model is a `ModelHandle`, held by a `Lease` until the request is over; while a
model is being loaded, its requests wait with signs of life.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import reduce

from start_llm.chat.handle import ModelHandle, Models, loaded
from start_llm.chat.search import SearchingStream
from start_llm.chat.stream import AnyStream, ChatStream, PromptsStream, RecentReports, WaitingStream
from start_llm.chat.work import RequestWork
from start_llm.core.errors import ContextLengthExceeded
from start_llm.core.report import Background, CacheReport, StoredTree
from start_llm.core.request import ChatRequest, ToolChoice, with_known_effort
from start_llm.core.service import EventStream, Health
from start_llm.core.settings import Settings
from start_llm.engine.thread import EngineThread
from start_llm.images.reader import ImageReader as ImageReader
from start_llm.prompt.guard import CUT
from start_llm.prompt.prepared import Prepared

log = logging.getLogger(__name__)

_WATCH_SECONDS = 5.0
_PING_SHARE = 0.8  # the edge swallows pings that come too soon after each other


class ChatService:
    """Implements `core.service.Service`."""

    def __init__(
        self,
        settings: Settings,
        engine: EngineThread,
        models: Models,
        on_prompt: Callable[[str, str], None] | None = None,
    ) -> None:
        """`on_prompt`: is told each request's id, and the text that the model is going to read."""
        self._settings = settings
        self._engine = engine
        self.models = models
        self._on_prompt = on_prompt
        self._reports = RecentReports()
        self._images = ImageReader(settings)

    def chat(self, request: ChatRequest) -> EventStream:
        if request.search is not None:
            return SearchingStream(self._chat, request, request.search, self._reports.remember)
        return self._chat(request)

    def _chat(self, request: ChatRequest) -> EventStream:
        lease = self.models.open(request.model)
        poll = min(_WATCH_SECONDS, self._settings.sse_ping_seconds) * _PING_SHARE
        stream = WaitingStream(lease, lambda: self._begin(lease.handle, request, poll), poll)
        if lease.wait(0.0):
            stream.begin()
        return stream

    def _begin(self, model: ModelHandle, request: ChatRequest, poll: float) -> AnyStream:
        """Everything that is done for a request whose model is there."""
        if request.more_prompts:
            return PromptsStream(lambda one: self._begin(model, one, poll), request, self._reports)
        model.check(request)
        request = replace(request, sampling=request.sampling.with_defaults(model.sampling))
        # 1. messages -> tokens
        request, prepared = self._prepare(model, request)
        prompt = prepared.prompt
        if self._on_prompt is not None:
            self._on_prompt(request.id, _text(request, prepared))
        # 2. does it fit?
        left = model.context - len(prompt.tokens)
        asked = request.max_tokens or self._settings.default_max_tokens or left
        if left < 1:
            raise ContextLengthExceeded(prompt=len(prompt.tokens), asked=1, limit=model.context)
        # 3. off to the model thread, as soon as it is told to `submit`
        constraint = model.constraint(request, prepared.rendering.in_reasoning)
        work = RequestWork(request, model, prepared, constraint, min(asked, left))
        # 4. tokens come back as events
        return ChatStream(self._engine, self._reports, work, poll)

    def _prepare(self, model: ModelHandle, request: ChatRequest) -> tuple[ChatRequest, Prepared]:
        """The request with its images read, and its prompt."""
        if model.eyes is None:
            messages, pictures = self._images.as_text(request.messages), request.pictures
        else:
            messages, pictures = self._images.shown(request.messages, model.eyes.problem)
        request = with_known_effort(replace(request, messages=messages, pictures=pictures), model.efforts)
        thinking = model.thinks if request.thinking is None else request.thinking
        prepared = model.pipeline.prepare(request, thinking=thinking)
        if prepared.no_calls:
            request = replace(request, tool_choice=ToolChoice("none"))
        return request, prepared

    # --- the rest of Service ----------------------------------------------------

    def count_tokens(self, request: ChatRequest) -> int:
        with loaded(self.models.open(request.model), request.model) as model:
            return len(self._prepare(model, request)[1].prompt.tokens)

    def explain(self, request: ChatRequest) -> CacheReport:
        with loaded(self.models.open(request.model), request.model) as model:
            prompts = [self._prepare(model, one)[1] for one in request.by_prompt()]
            plans = (model.pipeline.explain(self._engine.plan(each.prompt, model.model), each) for each in prompts)
            return reduce(CacheReport.plus, plans)

    def cache_report(self, request_id: str) -> CacheReport | None:
        return self._reports.report(request_id)

    def background(self, request_id: str) -> Background:
        return self._reports.background(request_id)

    def stored(self) -> StoredTree:
        return self._engine.stored()

    def health(self) -> Health:
        status, main = self._engine.status(), self.models.main
        ok = status.state in {"ready", "busy"} and main is not None
        state = "loading" if status.state in {"ready", "busy"} and main is None else status.state
        since = (
            None if status.since is None else datetime.fromtimestamp(status.since, UTC).isoformat(timespec="seconds")
        )
        able = {} if main is None else main.capabilities
        return Health(ok, state, status.running, status.queued, status.detail, since, able)


def _text(request: ChatRequest, prepared: Prepared) -> str:
    """What the model reads, as text."""
    if not prepared.raw:
        return prepared.rendering.text.replace(CUT, "")
    return request.prompt if isinstance(request.prompt, str) else str(list(prepared.prompt.tokens))
