"""Builds and wires every object; start and stop order.

Start: HTTP edge (answers /health and 503) -> model thread loads -> prompt side is
built from the loaded model -> proxy. Stop: proxy, HTTP edge, model thread, disk.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Self

from rich.console import Console

from start_llm.api.server import ApiServer, make_server
from start_llm.building import GIB, Built, ModelBuilder
from start_llm.chat import ChatService, Served
from start_llm.core.errors import NotSupported, StartLLMError, Unavailable
from start_llm.core.exitcodes import ExitCode
from start_llm.core.prompt import Prompt
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from start_llm.core.work import Constraint
from start_llm.dashboard.activity import Activity
from start_llm.dashboard.audit import AUDIT_FILE, Audit
from start_llm.dashboard.dump import Dumps
from start_llm.dashboard.jsonlines import json_line
from start_llm.dashboard.metrics import Metrics
from start_llm.dashboard.redact import Redactor
from start_llm.dashboard.request_log import RequestLog
from start_llm.dashboard.terminal import make_console, terminal
from start_llm.encoders import EncoderService
from start_llm.engine.patience import Patience
from start_llm.engine.runtime import TextRuntime, end_streams
from start_llm.engine.sampling import check_logit_bias, check_prompt_tokens
from start_llm.engine.thread import EngineThread
from start_llm.host.activation import is_held
from start_llm.host.home import command
from start_llm.models.device import inspect_device
from start_llm.models.loader import LoadedModel, accelerator
from start_llm.models.recommended import recommended_model
from start_llm.parsing.registry import RAW_STRINGS, ExternalFormat, OutputStyle, output_style
from start_llm.parsing.structured import is_free, make_constraint, model_text
from start_llm.progress import ProgressBars
from start_llm.prompt.clients import Clients
from start_llm.prompt.drafts import Views
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.ports import TemplateError
from start_llm.prompt.recorder import Recorder
from start_llm.prompt.turndb import TurnDB
from start_llm.proxy.config import KEY_NAME
from start_llm.proxy.keeper import ProxyKeeper
from start_llm.proxy.launcher import LiteLLMProxy, ProxyError

log = logging.getLogger(__name__)

GRAMMAR_THREADS = 2
GRAMMAR_SECONDS = 4.0
LOADING_STOP_SECONDS = 1.5
HOPELESS_STOP_SECONDS = 4.0
STOP_SECONDS = 60.0


class App:
    """One server with one model. `start` returns when requests are answered, or raises StartLLMError."""

    def __init__(self, settings: Settings, *, say: Callable[[str], None] | None = None) -> None:
        self.settings = settings
        console = make_console(stderr=settings.log_json)
        self._shows_key = say is None and console.is_terminal and not settings.log_json
        self._say = say or _speaker(console, as_json=settings.log_json)
        tell = self._say if settings.log_json else None
        self._progress: Callable[[str, float], None] = ProgressBars(console, tell) if say is None else _quiet
        self._builder = ModelBuilder(settings, self._say, self._progress)
        self._clients = Clients.load(settings.cache_rules_file)
        self._built: Built | None = None
        self.engine = EngineThread(
            self._load,
            max_queue=settings.max_queue,
            max_concurrency=settings.max_concurrency,
            watchdog=settings.generation_watchdog_seconds,
            on_lost=self._lost,
            at_end=end_streams,
        )
        dumps = _dumps(settings)
        self.service = ChatService(settings, self.engine, None if dumps is None else dumps.prompt)
        self.encoders = EncoderService(settings, self.engine)
        self.activity, metrics = Activity(), Metrics()
        self._audit = Audit(settings.cache_dir / AUDIT_FILE, settings.audit_days) if settings.audit_days else None
        log_root = settings.log_root if settings.enable_request_logging else None
        self._requests = RequestLog(log_root, settings.log_max_bytes, counters=metrics.figures)
        lines = terminal(settings, console) if say is None else None
        self._waits = is_held(os.environ)  # connections wait in a socket of the system until they can be answered
        self._server: ApiServer = make_server(
            settings,
            self.service,
            metrics=metrics,
            request_log=self._requests,
            observers=[each for each in (self.activity, lines, self._audit, dumps) if each is not None],
            encoders=self.encoders,
        )
        self._server.metrics.watch_figures(lambda: self.engine.status().figures)
        self._server.metrics.watch_figures(self.encoders.figures)
        self._proxy: LiteLLMProxy | None = None
        self._keeper: ProxyKeeper | None = None
        self._pipeline: Pipeline | None = None
        self._recorder: Recorder | None = None
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
        return self.server_url

    @property
    def server_url(self) -> str:
        return self._server.url

    @property
    def port(self) -> int:
        """Where the server listens; known before `start`."""
        return self._server.port

    @property
    def proxy_url(self) -> str | None:
        return self._proxy.url if self._proxy is not None else None

    @property
    def proxy(self) -> LiteLLMProxy | None:
        return self._proxy

    def start(self) -> None:
        """Raises StartLLMError if the model cannot be loaded or a port is taken."""
        if not self._waits:
            self._server.start()
        self._say(f"server    {self.server_url}  (loading the model)")
        self.engine.start()
        self.engine.wait_loaded()
        status = self.engine.status()
        if self._built is None or status.state == "failed":
            self.stop()
            raise Unavailable(status.detail or "The model could not be loaded.")
        try:
            self._serve(self._built)
        except StartLLMError:
            self.stop()
            raise
        if self._waits:
            self._server.start()
        self._welcome(self._built)
        if self.settings.proxy == "on":
            self._start_proxy(self._built.loaded)

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
        if isinstance(self._progress, ProgressBars):
            self._progress.close()
        if self._keeper is not None:
            self._keeper.stop()
        if self._proxy is not None:
            self._proxy.stop()
        idle = self._server.stop(graceful_seconds=2.0 if self._answers() else 0.0)
        ended = self.engine.stop() and idle
        if self._recorder is not None:
            self._recorder.close()
        if self._pipeline is not None:
            self._pipeline.close()
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
        if code == ExitCode.WEDGED and self.settings.watchdog_exit == "off":
            return
        self._ends.put(code)
        self._say(f"engine    {why} The server ends with exit code {code:d}.")

    def recommend(self) -> None:
        """With no MODEL_PATH on a Mac: says which model would do real work here."""
        device = inspect_device(accelerator)
        best = recommended_model(device.memory) if device.apple_silicon else None
        if best is not None:
            self._say(f"This is the small embedded model. For {device}: {command()} serve {best.short} ({best.note}).")

    def on_model_thread(self, function: Callable[[Any, Any], Any], timeout: float = 600.0) -> Any:
        """``function(model, mlx-lm's tokenizer)`` on the model thread; for benchmarks."""
        built = self._built
        if built is None:
            raise Unavailable("The model is not loaded.")
        return self.engine.call(lambda _: function(built.loaded.model, built.loaded.wrapper), timeout)

    def _load(self) -> TextRuntime:
        """On the model thread."""
        runtime, self._built = self._builder.build(reserved=self.encoders.prepare(self._progress))
        return runtime

    # --- wiring ---------------------------------------------------------------

    def _serve(self, built: Built) -> None:
        loaded = built.loaded
        template, tokenizer = HFTemplate(loaded.tokenizer), HFTokenizer(loaded.tokenizer, eos_ids=loaded.eos)
        turns = self._turns(loaded)
        try:
            self._pipeline = Pipeline(
                template,
                tokenizer,
                settings=self.settings,
                clients=self._clients,
                store=turns,
                context=self._context(loaded),
                eyes=loaded.eyes,
                traits=loaded.capabilities.traits,
            )
        except TemplateError as error:
            raise NotSupported(f"The chat template of {loaded.source} cannot be used: {error}") from error
        pipeline = self._pipeline
        self._recorder = Recorder(pipeline, self._anchor if self.settings.reanchor == "on" else None)
        self._server.metrics.watch_figures(
            lambda: {f"prompt_{name}": value for name, value in pipeline.counters().items()}
        )
        style, vocab = _style(loaded), len(loaded.tokenizer)
        self.service.serve(
            Served(
                name=loaded.name,
                source=loaded.source,
                created=int(time.time()),
                context=self._context(loaded),
                pipeline=pipeline,
                recorder=self._recorder,
                style=style,
                detokenizer=lambda: loaded.wrapper.detokenizer,
                token_text=lambda token: str(loaded.tokenizer.decode([token])),
                check=lambda request: _check(request, vocab),
                constraint=_constraints(self.settings, built, style),
                eyes=loaded.eyes,
                think_tokens=_think_tokens(loaded, style),
                views=Views(tokenizer.encode, escaped=style.tools.id not in RAW_STRINGS),
            )
        )

    def _anchor(self, guess: Prompt, session: str) -> None:
        self.engine.anchor(guess, session)

    def _turns(self, loaded: LoadedModel) -> TurnDB | None:
        """The conversation tree lives and dies with the KV on disk."""
        folder = self.settings.disk_dir
        return TurnDB(folder / f"turns-{loaded.fingerprint[:16]}.sqlite3") if folder is not None else None

    def _context(self, loaded: LoadedModel) -> int:
        return min(self.settings.max_kv_size, loaded.capabilities.context)

    def _start_proxy(self, loaded: LoadedModel) -> None:
        """The server does its work without the proxy, so what goes wrong here is said and no more."""
        model_id = self.settings.proxy_model_id or loaded.name
        proxy = LiteLLMProxy(
            self.settings,
            server_url=self.server_url,
            model_id=model_id,
            card=self.service.models()[0],
            log_path=self.settings.log_root / "proxy.log",
            encoders=self.encoders.cards(),
        )
        try:
            proxy.start()
        except ProxyError as error:
            self._say(f"proxy     off: {error}")
            return
        # `stop` may come at any time from here on: a keeper that was stopped before its start does nothing.
        self._keeper = ProxyKeeper(proxy, self._say)
        self._proxy = proxy
        self._server.metrics.watch_figures(self._keeper.figures)
        key = proxy.master_key if self._shows_key else f"{KEY_NAME} in .env or the environment"
        self._say(f"proxy     {proxy.url}  (key {key})")
        self._keeper.start(announced=proxy.wait_ready(self.settings.proxy_startup_wait_seconds))

    def _welcome(self, built: Built) -> None:
        """What somebody needs to know in the first minute."""
        memory = f"{built.cache_bytes / GIB:.1f} GiB in memory"
        self._say(f"model     {built.loaded.name}  (context {self._context(built.loaded):,} tokens)")
        self._say(f"KV cache  {memory}, {built.disk or 'nothing on disk'}")
        for card in self.encoders.cards():
            self._say(f"embed     {card.id}  (texts up to {card.context:,} tokens)")
        if self.encoders.problem:
            self._say(f"embed     off: {self.encoders.problem}")
        self._say(f"ready     OpenAI {self.server_url}/v1   Anthropic {self.server_url}")
        self._requests.begin(built.loaded.name)
        self._say(f"agents    {command()} launch claude|codex|opencode|openclaw|pi|qwen|cline|aider")


def _check(request: ChatRequest, vocab: int) -> None:
    """Token ids that come from the client itself."""
    check_logit_bias(request.sampling, vocab)
    check_prompt_tokens(request.prompt, vocab)


def _style(loaded: LoadedModel) -> OutputStyle:
    parser, capabilities = loaded.tool_parser, loaded.capabilities
    return output_style(
        tool_parser=capabilities.tool_parser,
        reasoning_parser=capabilities.reasoning_parser,
        external=None if parser is None else ExternalFormat(parser.start, parser.end, parser.parse),
        reasoning_tags=capabilities.think_tags,
    )


def _think_tokens(loaded: LoadedModel, style: OutputStyle) -> tuple[int, int] | None:
    vocab = loaded.tokenizer.get_vocab()
    opens, closes = vocab.get(style.reasoning.start), vocab.get(style.reasoning.end)
    return None if opens is None or closes is None else (opens, closes)


def _constraints(
    settings: Settings, built: Built, style: OutputStyle
) -> Callable[[ChatRequest, bool], Constraint | None]:
    grammars, patience = built.grammars, Patience("grammar", threads=GRAMMAR_THREADS, seconds=GRAMMAR_SECONDS)
    model = model_text(style.tools.id, style.reasoning, built.loaded.tokenizer)

    def constraint(request: ChatRequest, in_reasoning: bool) -> Constraint | None:
        thinks = settings.default_thinking if request.thinking is None else request.thinking
        made = make_constraint(request, model, in_reasoning=in_reasoning, may_reason=thinks)
        if made is None:
            return None
        if grammars is None:
            raise NotSupported("Structured output is not supported for this model's tokenizer.")
        return grammars.prepare(made)

    def bounded(request: ChatRequest, in_reasoning: bool) -> Constraint | None:
        return None if is_free(request) else patience.run(constraint, request, in_reasoning)

    return bounded


def _dumps(settings: Settings) -> Dumps | None:
    if not settings.dump_requests:
        return None
    redactor = Redactor([settings.api_key, settings.litellm_master_key])
    return Dumps(settings.log_root, settings.log_max_bytes, redactor)


def _speaker(console: Console, *, as_json: bool) -> Callable[[str], None]:
    """Writes a line for people, or the same as JSON."""

    def say(line: str) -> None:
        text = json_line(" ".join(line.split())) if as_json else line
        console.print(text, markup=False)

    return say


def _quiet(step: str, part: float) -> None:
    """No progress: the caller gave its own `say`."""
