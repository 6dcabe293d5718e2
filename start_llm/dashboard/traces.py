"""OpenTelemetry traces of requests, by the standard environment variables (``OTEL_...``). Needs the extra `otel`.

A request is a span with the attributes of the GenAI conventions. Below it stand `plan` (the request is read, the prompt
is made), `wait` (for the engine), `prefill` (restoring included) and `decode` (reading the answer included). The times
are those that HTTP threads see; nothing is added to the work of the model thread. Texts are left out, unless
``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true`` asks for them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context

from start_llm import __version__
from start_llm.core.events import Event, FirstToken, Started
from start_llm.core.request import ChatRequest
from start_llm.dashboard.observer import Observer, Outcome

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
MOST_OPEN = 10_000  # requests
_FLUSH_MILLISECONDS = 2000
_NANO = 1_000_000_000

Value = str | int | float


@dataclass(slots=True)
class _Times:
    """Of one request, in seconds of `time.time`."""

    began: float
    planned: float | None = None  # the prompt is ready, and goes to the engine
    admitted: float | None = None
    first: float | None = None  # the first token


class Traces(Observer):
    """Makes the spans of a request at its end. Thread-safe; sends them on a thread of its own."""

    def __init__(self, environment: Mapping[str, str], exporter: SpanExporter | None = None) -> None:
        """`exporter`: where spans go; ``None``: to the collector that the environment names."""
        resource = Resource.create({"service.name": "start_llm", "service.version": __version__})
        self._provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("start_llm", __version__)
        self._with_texts = environment.get(CONTENT, "").lower() == "true"
        self._open: dict[str, _Times] = {}
        self._lock = threading.Lock()

    def started(self, request: ChatRequest) -> None:
        ago = time.monotonic() - request.received if request.received else 0.0
        with self._lock:
            if len(self._open) < MOST_OPEN:
                self._open[request.id] = _Times(time.time() - ago)

    def event(self, request: ChatRequest, event: Event) -> None:
        if not isinstance(event, Started | FirstToken) or (times := self._open.get(request.id)) is None:
            return
        if isinstance(event, FirstToken):
            times.first = times.first or time.time()
        elif times.admitted is None:
            times.admitted = time.time()
            times.planned = max(times.began, times.admitted - event.report.seconds_queued)

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        with self._lock:
            times = self._open.pop(request.id, None)
        if times is None:
            return
        end = time.time()
        operation = "text_completion" if request.dialect == "completions" else "chat"
        span = self._tracer.start_span(
            f"{operation} {request.model}",
            kind=SpanKind.SERVER,
            attributes=_attributes(request, outcome, operation) | self._texts(request),
            start_time=_nanoseconds(times.began),
        )
        if outcome.status >= 400:
            span.set_attribute("error.type", str(outcome.status))
            span.set_status(StatusCode.ERROR, outcome.error)
        report = outcome.report
        prefill: dict[str, Value] = {}
        if report is not None:
            prefill = {"start_llm.restored_tokens": report.reused, "start_llm.copied_bytes": report.copied_bytes}
        self._part(span, "plan", times.began, times.planned)
        self._part(span, "wait", times.planned, times.admitted)
        self._part(span, "prefill", times.admitted, times.first or (end if times.admitted else None), prefill)
        self._part(span, "decode", times.first, end if times.first else None)
        span.end(_nanoseconds(end))

    def _part(
        self, span: Span, name: str, begin: float | None, end: float | None, about: Mapping[str, Value] | None = None
    ) -> None:
        """A span below `span`; none where the request did not come so far."""
        if begin is not None and end is not None:
            context = set_span_in_context(span)
            part = self._tracer.start_span(name, context, attributes=dict(about or {}), start_time=_nanoseconds(begin))
            part.end(_nanoseconds(max(begin, end)))

    def _texts(self, request: ChatRequest) -> dict[str, Value]:
        if not self._with_texts:
            return {}
        if isinstance(request.prompt, str):
            messages = [{"role": "user", "parts": [{"type": "text", "content": request.prompt}]}]
        else:
            messages = [
                {"role": each.role, "parts": [{"type": "text", "content": each.content}]} for each in request.messages
            ]
        return {"gen_ai.input.messages": json.dumps(messages)}

    def close(self) -> None:
        """Sends what is waiting, for two seconds at most."""
        self._provider.force_flush(_FLUSH_MILLISECONDS)
        self._provider.shutdown()


def _attributes(request: ChatRequest, outcome: Outcome, operation: str) -> dict[str, Value]:
    """What the conventions have a name for, and the counts of reuse."""
    found: dict[str, Value | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "start_llm",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": request.id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.conversation.id": request.session,
        "http.response.status_code": outcome.status,
    }
    if outcome.usage is not None:
        found["gen_ai.usage.input_tokens"] = outcome.usage.prompt
        found["gen_ai.usage.output_tokens"] = outcome.usage.completion
        found["gen_ai.usage.cache_read.input_tokens"] = outcome.usage.cached
    if outcome.report is not None:
        found["start_llm.computed_tokens"] = outcome.report.computed
        found["start_llm.miss"] = outcome.report.miss.reason if outcome.report.miss is not None else None
    return {name: value for name, value in found.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANO)
