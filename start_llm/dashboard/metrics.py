"""Prometheus metrics of requests, and the figures of other rooms under names that Prometheus' conventions ask for."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from start_llm import __version__
from start_llm.core.report import DRAFT_COUNTS
from start_llm.core.request import ChatRequest
from start_llm.core.service import Service
from start_llm.dashboard.observer import Observer, Outcome

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)

_KINDS = ("prompt", "reused", "computed", "new", "joined", "computed_idle", *DRAFT_COUNTS[1:])
_TABLES = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text("utf-8"))
GAUGES: dict[str, str] = _TABLES["gauges"]
COUNTERS: dict[str, str] = _TABLES["counters"]


class Metrics(Observer, Collector):
    """One registry per object, so that tests and servers do not share counts."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._prompted = self._reused = 0
        self._service: Service | None = None
        self._sources: list[Callable[[], Mapping[str, float]]] = []
        counter = partial(Counter, namespace="start_llm", registry=self.registry)
        gauge = partial(Gauge, namespace="start_llm", registry=self.registry)
        histogram = partial(Histogram, namespace="start_llm", registry=self.registry, buckets=SECONDS)
        kinds = f"{', '.join(_KINDS)}, generated"
        self.requests = counter("requests", "Requests by dialect and status.", ["dialect", "status"])
        self.tokens = counter("tokens", f"Tokens by what happened to them: {kinds}.", ["kind"])
        self.misses = counter("misses", "Explained misses by reason.", ["reason"])
        self.copied = counter("kv_copied_bytes", "KV bytes copied to restore.")
        self.errors = counter("unexpected_errors", "Unexpected errors by place.", ["where"])
        self.active = gauge("requests_active", "Requests being answered now.")
        self.running = gauge("engine_running", "Requests being computed.")
        self.queued = gauge("engine_queued", "Requests waiting for the engine.")
        gauge("build_info", "Always 1; its label is the version.", ["version"]).labels(__version__).set(1)
        self.first = histogram("first_token_seconds", "Arrival to first token.")
        self.total = histogram("request_seconds", "Arrival to end.")
        # The names that routers read (Gateway API inference extension, llm-d, Dynamo).
        vllm, labels = partial(Counter, registry=self.registry), ["model_name", "engine"]
        self.prefix_queries = vllm("vllm:prefix_cache_queries", "Prompt tokens that were looked up.", labels)
        self.prefix_hits = vllm("vllm:prefix_cache_hits", "Prompt tokens whose KV was stored.", labels)
        self.registry.register(self)

    def watch(self, service: Service) -> None:
        """Reads the engine's gauges from `service` at every scrape."""
        self._service = service
        self.running.set_function(lambda: service.health().running)
        self.queued.set_function(lambda: service.health().queued)

    def watch_figures(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """Shows ``figures()`` at every scrape: those of `GAUGES` as gauges, all others as counters."""
        self._sources.append(figures)

    def figures(self) -> dict[str, float]:
        """What `watch_figures` was given to watch, now."""
        return {name: value for source in self._sources for name, value in source().items()}

    def started(self, request: ChatRequest) -> None:
        self.active.inc()

    def ended(self, request: ChatRequest, outcome: Outcome) -> None:
        self.active.dec()
        self.requests.labels(request.dialect, str(outcome.status)).inc()
        self.total.observe(outcome.seconds)
        if outcome.seconds_first is not None:
            self.first.observe(outcome.seconds_first)
        report = outcome.report
        if report is None:
            return
        self._prompted += report.prompt
        self._reused += report.reused
        self.prefix_queries.labels(request.model, "0").inc(report.prompt)
        self.prefix_hits.labels(request.model, "0").inc(report.reused)
        for kind in _KINDS:
            self.tokens.labels(kind).inc(getattr(report, kind))
        self.tokens.labels("generated").inc(outcome.usage.completion if outcome.usage else report.generated)
        self.copied.inc(report.copied_bytes)
        if report.miss is not None:
            self.misses.labels(report.miss.reason).inc()

    def hit_rate(self) -> float:
        """Part of all prompt tokens so far whose KV was stored, 0 to 1."""
        return self._reused / self._prompted if self._prompted else 0.0

    def answered(self) -> int:
        """Requests since the start, whatever their end."""
        samples = (sample for metric in self.requests.collect() for sample in metric.samples)
        return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """The watched figures, and the server's load under vLLM's names; its model is the main one."""
        figures = self.figures()
        for name, value in figures.items():
            full_name = f"start_llm_{name}"
            if name in GAUGES:
                yield GaugeMetricFamily(full_name, GAUGES[name], value)
            else:
                yield CounterMetricFamily(full_name, COUNTERS.get(name, f"{name.replace('_', ' ')}."), value)
                yield GaugeMetricFamily(full_name, f"Deprecated: {full_name}_total.", value)
        if self._service is None:
            return
        health = self._service.health()
        names = [next((card.id for card in self._service.models.cards()), ""), "0"]
        values = (
            ("num_requests_running", "Requests being computed.", health.running),
            ("num_requests_waiting", "Requests waiting for the engine.", health.queued),
            ("kv_cache_usage_perc", "Part of the KV memory that is used, 0 to 1.", kv_usage(figures)),
        )
        for name, meaning, value in values:
            family = GaugeMetricFamily(f"vllm:{name}", meaning, labels=["model_name", "engine"])
            family.add_metric(names, value)
            yield family


def kv_usage(figures: Mapping[str, float]) -> float:
    """Part of the memory for stored KV that is used, 0 to 1."""
    budget = figures.get("kv_budget_bytes", 0)
    return min(1.0, figures.get("kv_bytes", 0) / budget) if budget else 0.0
