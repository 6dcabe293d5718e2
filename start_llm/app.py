"""Builds and wires every object; start and stop order.

Start: HTTP edge (answers /health and 503) -> model thread loads -> prompt side is
built from the loaded model -> proxy. Stop: proxy, HTTP edge, model thread, disk.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Self

from rich.console import Console

from start_llm.api.server import ApiServer
from start_llm.audio.service import AudioService
from start_llm.chat.service import ChatService
from start_llm.clients import CLIENTS
from start_llm.core.errors import ExitCode, StartLLMError, Unavailable
from start_llm.core.extras import check_installed
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings
from start_llm.core.sizes import as_size
from start_llm.dashboard.audit import AUDIT_FILE, Audit
from start_llm.dashboard.metrics import Metrics
from start_llm.dashboard.observer import Activity
from start_llm.dashboard.process_log import json_line, redactor
from start_llm.dashboard.progress import ProgressLines
from start_llm.dashboard.request_log import Dumps, RequestLog
from start_llm.dashboard.tables import words_only
from start_llm.dashboard.terminal import LiveRows, terminal
from start_llm.embeddings.service import EncoderService
from start_llm.engine.assembly import ModelBuilder
from start_llm.engine.ranks.hosts import RankHost, one_model_only, rank_hosts, shared_settings
from start_llm.engine.ranks.interface import Ranks
from start_llm.engine.runtime import end_streams
from start_llm.engine.thread import EngineThread
from start_llm.host.hints import hint
from start_llm.host.home import command, home
from start_llm.host.pressure import MemoryWatch, Pressure
from start_llm.modelpool.loader import Loader
from start_llm.modelpool.pool import Pool
from start_llm.modelpool.registry import ModelRegistry
from start_llm.modelpool.resolve import NameResolver
from start_llm.models.background import Progress
from start_llm.models.catalog import folder_of
from start_llm.models.device import inspect_device
from start_llm.models.loader import accelerator
from start_llm.models.recommended import recommended_model
from start_llm.prompt.clients import Clients
from start_llm.proxy.config import KEY_NAME, usable
from start_llm.proxy.elsewhere import names_elsewhere
from start_llm.proxy.keeper import ProxyKeeper
from start_llm.proxy.launcher import LiteLLMProxy, ProxyError

if TYPE_CHECKING:
    from start_llm.kvcache.publisher import KVEventPublisher

log = logging.getLogger(__name__)
# In a program that has set up no logging nothing is printed; Python would print warnings.
logging.getLogger("start_llm").addHandler(logging.NullHandler())

LOADING_STOP_SECONDS = 1.5
LOST_SECONDS = 1.5  # for answers in progress to be told that a host is lost
HOPELESS_STOP_SECONDS = 4.0
LOADER_STOP_SECONDS = 10.0
STOP_SECONDS = 60.0


class App:
    """One server: a model that it is started with, and others that come when they are asked for.

    `start` returns when requests are answered, or raises StartLLMError.

    Args:
        console: what goes on is shown there, each request too; without it nothing is printed.
        say: is told what goes on in lines, without requests, where there is no console.
    """

    def __init__(
        self, settings: Settings, *, console: Console | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        hosts = rank_hosts(settings)
        if hosts:
            settings = one_model_only(settings)
        self.settings = settings
        drawn_on = None if settings.log_json else console
        self._shows_key = drawn_on is not None and drawn_on.is_terminal
        self._say = say or (lambda line: None) if console is None else _speaker(settings, console)
        rows = self._rows = LiveRows(drawn_on)
        self._progress: Progress = (lambda step, part: None) if console is None else ProgressLines(self._say, rows)
        clients = Clients.load(settings.cache_rules_file)
        registry = ModelRegistry(settings, NameResolver(settings))
        self._ranks = _leader(hosts, self._rank_lost) if hosts else Ranks()
        self._rank_is_lost = False
        self._builder = ModelBuilder(settings, registry.reclaim, self._say, self._progress, self._ranks)
        self.engine = EngineThread(
            max_queue=settings.max_queue,
            max_concurrency=settings.max_concurrency,
            watchdog=settings.generation_watchdog_seconds,
            on_lost=self._lost,
            at_end=end_streams,
        )
        self._events = _kv_events(settings)
        loader = Loader(registry, self.engine, self._builder, clients, self._say, self._events)
        self.pool = Pool(registry, self.engine, self._builder, loader)
        dumps = Dumps(settings.log_root, redactor(settings)) if settings.dump_requests else None
        self.service = ChatService(settings, self.engine, self.pool, None if dumps is None else dumps.prompt)
        self.encoders = EncoderService(settings, self.pool.open_encoder, self.engine)
        self.audio = AudioService(settings, self.pool, self.engine)
        self.activity, metrics = Activity(), Metrics()
        self._audit = Audit(settings.cache_dir / AUDIT_FILE, settings.audit_days) if settings.audit_days else None
        log_root = settings.log_root if settings.enable_request_logging else None
        self._requests = RequestLog(log_root, counters=metrics.figures)
        lines = None if console is None else terminal(settings, console, rows)
        self._server = ApiServer(
            settings,
            self.service,
            metrics=metrics,
            request_log=self._requests,
            observers=[each for each in (self.activity, lines, self._audit, dumps) if each is not None],
            encoders=self.encoders,
            audio=self.audio,
        )
        self._watch_figures(metrics)
        self._memory_watch = MemoryWatch(self._press)
        self.proxy: LiteLLMProxy | None = None
        self._keeper: ProxyKeeper | None = None
        self._ends: SimpleQueue[ExitCode] = SimpleQueue()

    def __enter__(self) -> Self:
        """Starts; see `start`."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where clients connect, without ``/v1``."""
        return self._server.url

    server_url = url

    @property
    def port(self) -> int:
        """Where the server listens; known before `start`."""
        return self._server.port

    @property
    def proxy_url(self) -> str | None:
        return self.proxy.url if self.proxy is not None else None

    def start(self) -> None:
        """Raises StartLLMError if the model cannot be loaded or a port is taken."""
        self._server.start()
        self._say(f"server    {self.server_url}  (loading the model)")
        self.engine.start()
        try:
            if self._events is not None:
                self._events.start()
            self.audio.prepare(self._progress)
            self._builder.begin(reserved=self.encoders.prepare(self._progress))
            self._ranks.start(shared_settings(self.settings))  # last, for the other ranks wait from then on
            card = self.pool.start_loading()
        except Exception as error:  # also what a library says of the files that the settings name
            if not isinstance(error, StartLLMError):
                log.warning("the server cannot start", exc_info=True)
            why = error.message if isinstance(error, StartLLMError) else f"{type(error).__name__}: {error}"
            detail = self.engine.status().detail
            self.stop()
            raise Unavailable(detail or why) from error
        if self._ranks.alone:  # all ranks must keep the same KV
            self._memory_watch.start()
        self._welcome(card)
        settings = usable(self.settings, self._say)
        if settings.proxy == "on":
            self._start_proxy(card, settings)

    def wait(self) -> ExitCode:
        """Blocks until the server is stopped or cannot go on."""
        return self._ends.get()

    def end(self) -> None:
        """Has `wait` return, as if somebody had asked for the end. May be called on any thread."""
        self._ends.put(ExitCode.ENDED)

    def stop(self) -> bool:
        """May be called twice. Running requests end with an error of their dialect.

        Returns:
            False: the model thread or a worker has not ended. The process must be left with `os._exit`: a thread that
            is inside a library when the interpreter goes away can end it with an abort.
        """
        self._rows.close()
        self._memory_watch.stop()
        self._ranks.leave()
        if self._keeper is not None:
            self._keeper.stop()
        if self.proxy is not None:
            self.proxy.stop()
        # Requests of a model thread that died, or a rank that is lost, have been told so, but their workers may not
        # have said it yet.
        died = self.engine.status().state == "failed" or self._rank_is_lost
        idle = self._server.stop(graceful_seconds=2.0 if self._answers() else 1.0 if died else 0.0)
        ended = self.engine.stop() and idle
        self._ranks.stop()
        self.pool.stop(LOADER_STOP_SECONDS if ended else 0.5)
        if self._events is not None:
            self._events.stop()
        if self._audit is not None:
            self._audit.close()
        self._ends.put(ExitCode.ENDED)
        return ended

    def stop_seconds(self) -> float:
        """What `stop` may take before it is clear that it hangs."""
        if self.engine.status().state == "loading":
            return LOADING_STOP_SECONDS
        return STOP_SECONDS if self._answers() else HOPELESS_STOP_SECONDS

    def _answers(self) -> bool:
        return self.engine.status().state in {"ready", "busy"}

    def _lost(self, code: ExitCode, why: str) -> None:
        """The model will not answer any more. A supervisor can start a process again, but not a thread."""
        self._ends.put(code)
        self._say(f"engine    {why} The server ends with exit code {code:d}.")

    def _rank_lost(self, why: str) -> None:
        """What all hosts compute together cannot go on. A model thread that waits for one of them never moves again."""
        self._say(f"hosts     {why} The server ends with exit code {ExitCode.WEDGED:d}.")
        late = threading.Timer(LOST_SECONDS, os._exit, (ExitCode.WEDGED,))
        late.daemon = True
        late.start()
        self._rank_is_lost = True
        self.engine.lose(why)
        self._ends.put(ExitCode.WEDGED)

    def _press(self, level: Pressure, changed: bool) -> None:
        """While the machine is short of memory. `changed`: it has just become so, or has just ended."""
        self.engine.press(level)
        self.pool.press(level)
        if changed:
            self._say(f"memory    {self.engine.status().detail or 'The machine has enough again.'}")

    def recommend(self) -> None:
        """With no MODEL_PATH on a Mac: says which model would do real work here."""
        device = inspect_device(accelerator)
        best = recommended_model(device.memory) if device.apple_silicon else None
        if best is not None:
            self._say(
                f"This is the small embedded model. For {device}: `{command()} serve {best.short}` ({best.note})."
            )

    # --- wiring ---------------------------------------------------------------

    def _watch_figures(self, metrics: Metrics) -> None:
        metrics.watch_figures(lambda: self.engine.status().figures)
        for part in (self.pool, self.encoders, self.audio, self._events):
            if part is not None:
                metrics.watch_figures(part.figures)

    def _start_proxy(self, main: ModelCard, settings: Settings) -> None:
        """The server does its work without the proxy, so what goes wrong here is said and no more."""
        model_id, log_path = self.settings.proxy_model_id or main.id, self.settings.log_root / "proxy.log"
        proxy = LiteLLMProxy(settings, server_url=self.server_url, model_id=model_id, card=main, log_path=log_path)
        proxy.elsewhere = names_elsewhere(settings.models_by_name, folder_of)
        for name, model in proxy.elsewhere.items():
            self._say(f"elsewhere {name} means {model} at the proxy: such a request leaves this machine, whole")
        try:
            proxy.start()
        except ProxyError as error:
            self._say(f"proxy     off: {error}")
            return
        # `stop` may come at any time from here on: a keeper that was stopped before its start does nothing.
        self._keeper = ProxyKeeper(proxy, self._say)
        self.proxy = proxy
        self._server.metrics.watch_figures(self._keeper.figures)
        key = proxy.master_key if self._shows_key else f"{KEY_NAME} in {home() / '.env'} or the environment"
        is_ready = proxy.wait_ready(self.settings.proxy_startup_wait_seconds)
        self._say(f"proxy     {proxy.url}  ({'' if is_ready else 'starting; '}key {key})")
        self._keeper.start(announced=is_ready)

    def _welcome(self, card: ModelCard) -> None:
        """What somebody needs to know in the first minute."""
        self._say(f"model     {card.id}  (context {card.context:,} tokens)")
        self._say(f"KV cache  {as_size(self._builder.shared.most_stored)} in memory, {self._builder.stored_where}")
        for encoder in self.encoders.cards():
            self._say(f"embed     {encoder.id}  (texts up to {encoder.context:,} tokens)")
        if self.encoders.problem:
            self._say(f"embed     off: {self.encoders.problem}")
        for problem in self.audio.problems:
            self._say(f"audio     off: {problem}")
        self._say(f"ready     OpenAI {self.server_url}/v1   Anthropic {self.server_url}")
        if self._events is not None:
            self._say(f"events    {self._events.endpoint}  (missed ones: {self._events.replay})")
        self._requests.begin(card.id)
        self._say(f"page      {self.server_url}")
        able = [name for name, agent in CLIENTS.items() if agent.first_prompt < card.context]
        if able:
            first, *others = able
            self._say(f"agents    {hint(f'launch {first}', self.port)}    (or {', '.join(others) or 'no other'})")
        if left := [name for name in CLIENTS if name not in able]:
            self._say(f"          a first prompt of {', '.join(left)} is longer than this model's context")


def _leader(hosts: list[RankHost], on_lost: Callable[[str], None]) -> Ranks:
    from start_llm.engine.ranks.leader import RANK_SECONDS, LeaderGroup  # noqa: PLC0415 - few need it, and what it imports

    return LeaderGroup(hosts, RANK_SECONDS, on_lost)


def _kv_events(settings: Settings) -> KVEventPublisher | None:
    """Raises NotSupported: the extra is not installed."""
    if settings.kv_events is None:
        return None
    check_installed("zmq")
    from start_llm.kvcache.publisher import KVEventPublisher  # noqa: PLC0415 - its libraries are an extra

    model = settings.served_model_name or (settings.model_path or "default").rstrip("/").rsplit("/", 1)[-1]
    return KVEventPublisher(settings.kv_events, f"kv@{socket.gethostname()}@{model}")  # as llm-d wants it


def _speaker(settings: Settings, console: Console) -> Callable[[str], None]:
    """What prints a line of what goes on."""

    def speak(line: str) -> None:
        text = json_line(" ".join(line.split())) if settings.log_json else words_only(line)
        console.print(text, markup=False, soft_wrap=True)  # a command stays one line

    return speak
