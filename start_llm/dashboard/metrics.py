"""Prometheus metrics of requests, and the figures of other rooms under names that Prometheus' conventions ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

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
GAUGES = {
    "http_waiting": "Connections that no worker has.",
    "kv_segments": "Segments with KV in memory.",
    "kv_tokens": "Tokens of these segments.",
    "kv_leaves": "Conversation ends among them.",
    "kv_bytes": "KV in memory, checkpoints included, without what running requests have taken over.",
    "kv_held_bytes": "The same with it. Its spare room counts, but not that of a batch. No states of running requests.",
    "kv_used_bytes": "What stored tokens take of that.",
    "kv_budget_bytes": "KV that may be in memory.",
    "kv_arrays": "Arrays that this KV is in. A device has room for so many, however small they are.",
    "kv_checkpoints": "Restore points of layers that cannot be cut.",
    "kv_checkpoint_bytes": "KV of these restore points.",
    "kv_sessions": "Conversations that the KV store knows.",
    "kv_disk_files": "KV files on disk.",
    "kv_disk_bytes": "KV on disk.",
    "kv_disk_budget_bytes": "KV that may be on disk.",
    "kv_disk_waiting_bytes": "KV that waits to be written.",
    "kv_disk_waiting_segments": "Segments that wait to be written.",
    "kv_disk_waiting_large": "Large segments that wait to be written when nobody asks.",
    "kv_disk_paused": "1 while the disk cannot be used.",
    "kv_events_blocks": "Blocks of 64 tokens that routers are told of.",
    "kv_events_waiting": "Changes of stored KV that are not published yet.",
    "prompt_records": "Answers that are remembered.",
    "models_loaded": "Models in memory.",
    "models_weight_bytes": "Weights in memory; what models share counts once.",
    "models_memory_bytes": "Memory that weights and KV may take together; 0: nobody knows.",
    "kv_running_bytes": "KV of running requests.",
    "memory_pressure": "How short of memory the machine is: 0 not, 1 short, 2 critically.",
    "proxy_up": "1 while the LiteLLM process lives.",
}
COUNTERS = {
    "http_dropped": "Connections that were closed to make room for others.",
    "http_accept_pauses": "Times that no connection could be accepted.",
    "http_front_errors": "Connections that ended by an unexpected error.",
    "tokens_prefilled": "Prompt tokens computed.",
    "tokens_prefilled_idle": "Prompt tokens computed in idle gaps.",
    "tokens_decoded": "Tokens generated.",
    "tokens_drafted": "Tokens proposed by drafts.",
    "tokens_accepted": "Proposed tokens that were right.",
    "tokens_copied": "Those of them that were copied from the conversation's text.",
    "tokens_headed": "Those of them that a head or a small model proposed.",
    "tokens_forced": "Those of them that a grammar left no choice about.",
    "decode_forwards": "Passes of the model that generated tokens.",
    "hybrid_trim_miss": "Lookups that found no restore point at the end of what is stored.",
    "failed_steps": "Steps of the model that failed.",
    "requests_paused": "Requests that gave their memory to others for a while.",
    "kv_evicted": "Segments evicted from memory.",
    "kv_errors": "Errors of the KV store; such requests compute everything.",
    "kv_disk_evicted_files": "KV files deleted to make room.",
    "kv_disk_written_files": "KV files written.",
    "kv_disk_written_bytes": "KV written to disk.",
    "kv_disk_read_files": "KV files read.",
    "kv_disk_read_bytes": "KV read from disk.",
    "kv_disk_damaged": "KV files that were damaged.",
    "kv_disk_failed_writes": "KV files that could not be written.",
    "kv_disk_pauses": "Times that the disk could not be used.",
    "kv_events_stored": "Blocks published as stored.",
    "kv_events_removed": "Blocks published as removed.",
    "kv_events_dropped": "Changes of stored KV that came faster than they could be published.",
    "vlm_retreat": "Lookups that ended inside an image; 0 is expected.",
    "prompt_healed_turns": "Answers that came back without their reasoning.",
    "prompt_notes": "Requests that an update note was added to.",
    "prompt_shown_as_sent": "Requests with a history that go on from no answer of this server.",
    "prompt_guesses_right": "Idle prefills that were used.",
    "prompt_guesses_wrong": "Idle prefills that were not.",
    "embedded_texts": "Texts embedded.",
    "embedded_tokens": "Tokens of these texts.",
    "transcribed_seconds": "Seconds of recordings transcribed.",
    "spoken_seconds": "Seconds of speech made.",
    "proxy_restarts": "Times that the LiteLLM process was started again.",
    "fallbacks": "Requests sent to FALLBACK_MODEL.",
    "fallbacks_failed": "Requests that were not answered there either.",
}


class Metrics(Observer):
    """One registry per object, so that tests and servers do not share counts."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._prompted = self._reused = 0
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

    def watch(self, service: Service) -> None:
        """Reads the engine's gauges from `service` at every scrape."""
        self.running.set_function(lambda: service.health().running)
        self.queued.set_function(lambda: service.health().queued)
        self.registry.register(_VLLMGauges(service, self.figures))

    def watch_figures(self, figures: Callable[[], Mapping[str, float]]) -> None:
        """Shows ``figures()`` at every scrape: those of `GAUGES` as gauges, all others as counters."""
        self._sources.append(figures)
        self.registry.register(_Figures(figures))

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


class _Figures(Collector):
    def __init__(self, figures: Callable[[], Mapping[str, float]]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        for name, value in self._figures().items():
            full_name = f"start_llm_{name}"
            if name in GAUGES:
                yield GaugeMetricFamily(full_name, GAUGES[name], value)
            else:
                yield CounterMetricFamily(full_name, COUNTERS.get(name, f"{name.replace('_', ' ')}."), value)
                yield GaugeMetricFamily(full_name, f"Deprecated: {full_name}_total.", value)


class _VLLMGauges(Collector):
    """The server's load under vLLM's names; its model is the main one."""

    def __init__(self, service: Service, figures: Callable[[], Mapping[str, float]]) -> None:
        self._service, self._figures = service, figures

    def collect(self) -> Iterator[Metric]:
        health, figures = self._service.health(), self._figures()
        names = [next((card.id for card in self._service.models()), ""), "0"]
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
