"""Traces of requests, as a collector on this machine gets them."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from start_llm.core.errors import Internal
from start_llm.core.events import Failed, FirstToken, Started, Usage
from start_llm.core.messages import Message
from start_llm.core.report import CacheReport, Miss
from start_llm.core.request import ChatRequest
from start_llm.dashboard.observer import Outcome
from start_llm.dashboard.traces import CONTENT, Traces

SECRET = "the words of the user"
REPORT = CacheReport(prompt=100, reused=80, computed=20, seconds_queued=0.25, miss=Miss("diverged", 80))
GOOD = Outcome(200, 2.0, 0.5, Usage(100, 30, 80), REPORT)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Takes spans by HTTP, and keeps them."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-mac")
    yield received
    server.shutdown()
    thread.join()
    server.server_close()


def request(**more: Any) -> ChatRequest:
    message = Message("user", SECRET)
    return ChatRequest("chatcmpl-1", "chat", "tiny", (message,), session="s", received=time.monotonic() - 1, **more)


def good(traces: Traces, asked: ChatRequest) -> None:
    traces.started(asked)
    traces.event(asked, Started(REPORT))
    traces.event(asked, FirstToken())
    traces.ended(asked, GOOD)


def spans_of(received: list[Any]) -> dict[str, Any]:
    (path, sent), *others = received
    assert path == "/v1/traces" and not others
    (resource,) = sent.resource_spans
    service = {pair.key: pair.value.string_value for pair in resource.resource.attributes}["service.name"]
    assert service == "my-mac"
    return {span.name: span for scope in resource.scope_spans for span in scope.spans}


def attributes(span: Any) -> dict[str, Any]:
    return {pair.key: pair.value.string_value or pair.value.int_value for pair in span.attributes}


def test_a_collector_gets_the_request_and_its_parts(collector: list[Any]) -> None:
    traces = Traces({})
    good(traces, request())
    traces.close()
    spans = spans_of(collector)
    assert set(spans) == {"chat tiny", "plan", "wait", "prefill", "decode"}
    whole, plan, wait = spans["chat tiny"], spans["plan"], spans["wait"]
    parts = [plan, wait, spans["prefill"], spans["decode"]]
    assert all((part.trace_id, part.parent_span_id) == (whole.trace_id, whole.span_id) for part in parts)
    ends = [whole.start_time_unix_nano, *(part.end_time_unix_nano for part in parts)]
    assert [part.start_time_unix_nano for part in parts] == ends[:-1] and ends[-1] == whole.end_time_unix_nano
    assert 0.2 < (wait.end_time_unix_nano - wait.start_time_unix_nano) / 1e9 < 0.3
    found = attributes(whole)
    assert found["gen_ai.operation.name"] == "chat" and found["gen_ai.conversation.id"] == "s"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (100, 30)
    assert (found["start_llm.computed_tokens"], found["start_llm.miss"]) == (20, "diverged")
    assert attributes(spans["prefill"])["start_llm.restored_tokens"] == 80
    assert SECRET not in str(collector)


def test_texts_are_sent_if_they_are_asked_for(collector: list[Any]) -> None:
    traces = Traces({CONTENT: "true"})
    good(traces, request())
    traces.close()
    assert SECRET in attributes(spans_of(collector)["chat tiny"])["gen_ai.input.messages"]


def test_an_error_ends_the_span_with_its_status(collector: list[Any]) -> None:
    traces, asked = Traces({}), request()
    traces.started(asked)
    traces.event(asked, Failed(Internal("broken")))
    traces.ended(asked, Outcome(500, 1.0, error="broken"))
    traces.ended(asked, Outcome(500, 1.0, error="twice"))
    traces.close()
    spans = spans_of(collector)
    assert set(spans) == {"chat tiny"}
    assert attributes(spans["chat tiny"])["error.type"] == "500" and spans["chat tiny"].status.message == "broken"


def test_a_request_costs_little(collector: list[Any]) -> None:
    """Under 0.3 ms by the benchmark in docs/monitoring.md; here a bound that a busy machine keeps."""
    traces, asked = Traces({}), request()
    good(traces, asked)
    began = time.thread_time()
    for _ in range(200):
        good(traces, asked)
    seconds = (time.thread_time() - began) / 200
    traces.close()
    print(f"{seconds * 1000:.3f} ms a request")
    assert seconds < 0.003
