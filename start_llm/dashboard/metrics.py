"""Prometheus metrics of requests. Other rooms may register collectors of their own in `registry`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from start_llm.core.events import Event
from start_llm.core.request import ChatRequest
from start_llm.core.service import Service
from start_llm.dashboard.observer import Outcome

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class Metrics:
    """An `Observer`. One registry per object, so that tests and servers do not share counts."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._sources: list[Callable[[], Mapping[str, float]]] = []
        self.requests = Counter(
            "start_llm_requests", "Requests by dialect and status.", ["dialect", "status"], registry=self.registry
        )
        self.tokens = Counter(
            "start_llm_tokens",
            "Tokens by what happened to them: prompt, reused, computed, new, joined, computed_idle, generated, "
            "drafted, accepted.",
            ["kind"],
            registry=self.registry,
        )
        self.misses = Counter("start_llm_misses", "Explained misses by reason.", ["reason"], registry=self.registry)
        self.copied = Counter("start_llm_kv_copied_bytes", "KV bytes copied to restore.", registry=self.registry)
        self.errors = Counter(
            "start_llm_unexpected_errors", "Unexpected errors by place.", ["where"], registry=self.registry
        )
        self.active = Gauge("start_llm_requests_active", "Requests being answered now.", registry=self.registry)
        self.running = Gauge("start_llm_engine_running", "Requests being computed.", registry=self.registry)
        self.queued = Gauge("start_llm_engine_queued", "Requests waiting for the engine.", registry=self.registry)
        self.first = Histogram(
            "start_llm_first_token_seconds", "Arrival to first token.", buckets=SECONDS, registry=self.registry
        )
        self.total = Histogram("start_llm_request_seconds", "Arrival to end.", buckets=SECONDS, registry=self.registry)

    def watch(self, service: Service) -> None:
        """Reads the engine's gauges from `service` at every scrape."""
        self.running.set_function(lambda: service.health().running)
        self.queued.set_function(lambda: service.health().queued)

    def watch_figures(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """Shows ``figures()`` as gauges ``start_llm_NAME`` at every scrape."""
        self._sources.append(figures)
        self.registry.register(_Figures(figures))

    def figures(self) -> dict[str, float]:
        """What `watch_figures` was given to watch, now."""
        return {name: value for source in self._sources for name, value in source().items()}

    def started(self, request: ChatRequest) -> None:
        self.active.inc()

    def event(self, request: ChatRequest, event: Event) -> None:
        """Nothing is counted per event."""

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        self.active.dec()
        self.requests.labels(request.dialect, str(outcome.status)).inc()
        self.total.observe(outcome.seconds)
        if outcome.seconds_first is not None:
            self.first.observe(outcome.seconds_first)
        report = outcome.report
        if report is None:
            return
        for kind in ("prompt", "reused", "computed", "new", "joined", "computed_idle", "drafted", "accepted"):
            self.tokens.labels(kind).inc(getattr(report, kind))
        self.tokens.labels("generated").inc(outcome.usage.completion if outcome.usage else report.generated)
        self.copied.inc(report.copied_bytes)
        if report.miss is not None:
            self.misses.labels(report.miss.reason).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Figures(Collector):
    def __init__(self, figures: Callable[[], Mapping[str, float]]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        for name, value in self._figures().items():
            yield GaugeMetricFamily(f"start_llm_{name}", name.replace("_", " "), value)
