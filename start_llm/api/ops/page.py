"""The page at `/`: a shell without any data, with its style in it, its scripts, the feed that fills it, its panels.

The shell is one answer, and the browser paints it before it asks for a script. It may be read by everybody, so that a
browser can ask its user for the key. The feed has the rules of the API: host, origin and key are checked, and a visitor
sees the requests of its own key only.

The panels are what the page fetches beside its feed: stored KV, models, settings and log, a request's note. All but the
note is for who may see everything (`Visitor.sees_all`). What the page asks the server to do is a POST.
"""

from __future__ import annotations

import hashlib
import logging
import shlex
import shutil
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from start_llm import __version__
from start_llm.api.http import sse
from start_llm.api.http.access import Visitor
from start_llm.api.http.routes import Feed, Reply, Request
from start_llm.api.ops.status import Status
from start_llm.clients import CLIENTS
from start_llm.core.errors import BadRequest, NotFound, NotSupported, Unavailable
from start_llm.core.jsontext import parse_object
from start_llm.core.settings import SECRETS, Settings, meaning
from start_llm.dashboard.audit import AUDIT_FILE, Wanted, entries
from start_llm.dashboard.board import Board
from start_llm.dashboard.history import DAY, History
from start_llm.dashboard.metrics import Metrics
from start_llm.dashboard.process_log import LINE_CHARS, LogTail, redactor
from start_llm.files.database import FileUnavailable
from start_llm.files.logs import last_lines
from start_llm.host.hints import hint
from start_llm.host.home import command
from start_llm.models.catalog import EMBEDDED_NAME, StoredModel, is_embedded, stored_models
from start_llm.models.checkpoint import is_path
from start_llm.models.device import NO_GPU, likely_accelerator, machine_memory
from start_llm.models.hub_search import needed_for, search_hub
from start_llm.models.library import Library, Pulls
from start_llm.models.overrides import EDITED, FOLDER, Overrides, read_overrides
from start_llm.models.pull import PullError
from start_llm.models.recommended import KV_TOKENS, RECOMMENDED, SHORT_NAMES, full_name
from start_llm.models.servers import check_unused
from start_llm.proxy.nodes import ServerNode, look_at, nodes_of

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
"""Least time between two messages of a feed."""
CHART_SECONDS = 60.0
"""Most time between two looks at the charts, which move on while nothing happens."""
PULSE_SECONDS = 2.0
"""Most time between two: a browser that has gone is noticed by what cannot be sent."""

_FOLDER = resources.files("start_llm.dashboard") / "page"
_SCRIPTS = {
    item.name: item for place in (_FOLDER, _FOLDER / "vendor") for item in place.iterdir() if item.name.endswith(".js")
}
_STYLE = (_FOLDER / "page.css").read_text("utf-8")
_STYLE_HASH = b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
OPEN_PATHS = frozenset({"/", *(f"/page/{name}" for name in _SCRIPTS)})

_SAFE = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'self'; style-src 'sha256-{_STYLE_HASH}'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

FIRST_COMMANDS = (  # what one does, the command, and whether it is one for a server
    ("Ask the model in a terminal", "chat", True),
    ("Start a coding agent in the folder of your project", "launch pi", True),
    ("Find a larger model for this machine", "recommend", False),
)
OURS = logging.getLogger("start_llm")
LOG_LEVELS = ("debug", "info", "warning", "error")
MOST_WORDS = 200  # characters of a search
MOST_EARLIER = 20_000  # requests of the day before the start


class Page:
    """Handlers. Thread-safe as far as `status` and `board` are.

    Args:
        cancel: ends the running request of an id; False: there is none.
        own_url: of this server, among the nodes and in what the page says one can type.
    """

    def __init__(
        self,
        settings: Settings,
        status: Status,
        board: Board,
        cancel: Callable[[str], bool],
        own_url: str,
    ) -> None:
        self._settings = settings
        self._board = board
        self._cancel = cancel
        self._own_url = own_url
        self._status = status
        self._service = status.service
        self._metrics = status.counts
        self._owners = status.owners
        self._redact = redactor(settings).text
        port = urlsplit(own_url).port or settings.mlx_port
        self.pulls = Pulls(board.nudge)
        used = {settings.embedding_model: "EMBEDDING_MODEL", settings.draft_model: "DRAFT_MODEL"}
        needed = partial(check_unused, settings=settings, own_port=port)
        self.library = Library(status.service, self.pulls, {full_name(name): why for name, why in used.items()}, needed)
        self.history = History(partial(_memory_used, status.counts))
        self.log = LogTail(self._redact)
        templates = Environment(
            loader=PackageLoader("start_llm.dashboard", "page"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        shell = templates.get_template("page.html.jinja").render(
            version=__version__,
            agents=tuple(CLIENTS.values()),
            first_commands=FIRST_COMMANDS,
            typed=lambda words, of_server=True: hint(words, port if of_server else None),
            needs_key=settings.api_key is not None,
            style=Markup(_STYLE),
        )
        self._files = {"/": (shell.encode(), "text/html; charset=utf-8")}
        for name, script in _SCRIPTS.items():
            self._files[f"/page/{name}"] = (script.read_bytes(), "text/javascript; charset=utf-8")

    def begin(self) -> None:
        """Listens to the log, and reads what was asked on the day before the start."""
        logging.getLogger().addHandler(self.log)
        if self._settings.audit_days:
            since = time.time() - DAY[0] * DAY[1]
            try:
                earlier = entries(self._settings.cache_dir / AUDIT_FILE, Wanted(since), MOST_EARLIER)
            except FileUnavailable as error:
                log.warning("the page's charts begin with this start: %s", error)
            else:
                self.history.begin_with(earlier)

    def close(self) -> None:
        """The log is not listened to any more, and a running fetch ends."""
        logging.getLogger().removeHandler(self.log)
        self.pulls.stop()

    def file(self, inbound: Request) -> Reply:
        """The shell or a script. Raises NotFound."""
        found = self._files.get(inbound.path)
        if found is None:
            raise NotFound(f"There is nothing at {inbound.path[:200]}.")
        body, kind = found
        return Reply(body, content_type=kind, headers=_SAFE)

    def feed(self, inbound: Request) -> Feed:
        """Raises Forbidden where this visitor may see nothing."""
        visitor = inbound.visitor
        visitor.check_sees_own()
        return Feed(self._messages(visitor))

    def _messages(self, visitor: Visitor) -> Iterator[bytes]:
        """Ends when its reader goes, which the edge notices by a message that cannot be sent."""
        after, lines_after, drawn = -1, 0, -CHART_SECONDS
        while True:
            sight = self._board.sight(max(after, 0), lambda request_id: self._owners.may_see(visitor, request_id))
            message: dict[str, Any] = {"now": sight.now, "ended": sight.ended, "server": self._server()}
            message["all"] = visitor.sees_all
            if visitor.sees_all:
                message["log"], lines_after = self.log.after(lines_after)
                message["pull"] = self.pulls.state()
                if sight.last != after or time.monotonic() - drawn > CHART_SECONDS:
                    drawn = time.monotonic()
                    message["daily"], message["history"] = self.history.day(), self.history.as_dict()
            after = sight.last
            yield sse.data(message)
            time.sleep(TICK_SECONDS)
            self._board.wait(sight.version, PULSE_SECONDS - TICK_SECONDS)

    def _server(self) -> dict[str, Any]:
        fields = ("id", "context", "state", "pinned", "problem")
        models = [
            {name: getattr(card, name) for name in fields}
            | {"bytes": card.weight_bytes, "loading": card.details.get("loading"), **card.capabilities}
            for card in self._service.models.cards()
            if card.state != "stored"
        ]
        return {"health": asdict(self._service.health()), "models": models, "figures": self._metrics.figures()}

    # --- panels ---

    def stored(self, inbound: Request) -> dict[str, Any]:
        try:
            tree = self._service.stored()
        except TimeoutError as error:
            raise Unavailable(f"Stored KV cannot be shown now: {error}.") from None
        return tree.as_dict()

    def models(self, inbound: Request) -> dict[str, Any]:
        """What is on this disk, and what could be fetched."""
        sources = {str(card.details.get("source")) for card in self._service.models.cards() if card.state == "ready"}
        found: dict[str, dict[str, Any]] = {}
        for model in stored_models(self._settings.cache_dir, self._settings.model_path):
            row = _model(model)
            row["loaded"] = row["name"] in sources
            key = row["name"] if row["name"] == EMBEDDED_NAME else str(model.folder.resolve())
            if key not in found or row["loaded"]:  # a folder may be listed by two names
                found[key] = row
        here = {model["name"] for model in found.values()}
        memory = int(self._metrics.figures().get("models_memory_bytes", 0))
        known = [
            {"short": model.short, "name": model.repository, "bytes": model.weights, "note": model.note}
            | {"needs": model.needs(KV_TOKENS), "fits": model.fits(machine_memory(), memory)}
            for model in RECOMMENDED
            if model.repository not in here
        ]
        warning = NO_GPU if likely_accelerator().backend == "cpu" else ""
        return {"models": list(found.values()), "known": known, "memory": memory, "warning": warning}

    def search(self, inbound: Request) -> dict[str, Any]:
        """Models on the hub whose names hold ``?words=``. Raises BadRequest; Unavailable: no hub is in reach."""
        words = parse_qs(inbound.query).get("words", [""])[0].strip()[:MOST_WORDS]
        if not words:
            raise BadRequest("words is missing; give a part of a model's name.", param="words")
        memory = int(self._metrics.figures().get("models_memory_bytes", 0))
        try:
            return {"models": [asdict(model) | {"fits": model.fits(memory)} for model in search_hub(words)]}
        except PullError as error:
            raise Unavailable(str(error)) from error

    def change_model(self, inbound: Request) -> dict[str, Any]:
        """``{"name": "owner/name", "changes": {"context": 32768, "ttl": null}}``: see `Library.change`."""
        body = parse_object(inbound.body)
        name, changes = body.get("name"), body.get("changes")
        if not isinstance(name, str) or not isinstance(changes, dict):
            raise BadRequest("give the name of a model, and changes: an object of keys and values.", param="changes")
        return {"own": self.library.change(name, changes)}

    def remove(self, inbound: Request) -> dict[str, Any]:
        """``{"name": "owner/name"}``: see `Library.remove`."""
        name, size = self.library.remove(_named(inbound))
        return {"name": name, "bytes": size}

    def agents(self, inbound: Request) -> dict[str, Any]:
        """Which coding agents are installed on this machine."""
        return {"installed": [name for name in CLIENTS if shutil.which(name) is not None]}

    def nodes(self, inbound: Request) -> dict[str, Any]:
        """How the servers of NODES are, this one among them (`proxy.nodes.look_at`); none without NODES."""
        nodes = nodes_of(self._settings, self._own_url) if self._settings.nodes else []
        return {"nodes": look_at(nodes, self._status.node(ServerNode(self._own_url).name))}

    def settings(self, inbound: Request) -> dict[str, Any]:
        rows = [
            {
                "name": name.upper(),
                "value": self._redact(_shown(self._settings, name)),
                "set": name in self._settings.model_fields_set,
                "about": meaning(name),
                "choices": LOG_LEVELS if name == "log_level" else [],
            }
            for name in Settings.model_fields
        ]
        lines = last_lines(self._settings.log_root / "proxy.log", 100).splitlines()
        return {"settings": rows, "proxy_log": [self._redact(line)[:LINE_CHARS] for line in lines]}

    def change_setting(self, inbound: Request) -> dict[str, Any]:
        """``{"name": "LOG_LEVEL", "value": "debug"}``, until the server ends; no other setting. Raises BadRequest."""
        body = parse_object(inbound.body)
        name, value = body.get("name"), body.get("value")
        if name != "LOG_LEVEL":
            raise BadRequest(f"name={name!r:.80}: only LOG_LEVEL can change while the server runs.", param="name")
        if value not in LOG_LEVELS:
            raise BadRequest(f"value={value!r:.80}: give one of {', '.join(LOG_LEVELS)}.", param="value")
        OURS.setLevel(value.upper())
        return {"name": name, "value": value}

    def background(self, inbound: Request) -> dict[str, Any]:
        """The update note that a request's model has read and where it left what is stored, for who made it.

        The note's words are for the user who made it. The words that are stored there may be another client's: they
        are for who may read everything.
        """
        request_id, visitor = inbound.params[0], inbound.visitor
        if not self._owners.may_see(visitor, request_id):
            raise NotFound(f"There is no request {request_id[:80]!r} of this key.")
        known = self._service.background(request_id)
        return known.as_dict(words=self._owners.may_read(visitor, request_id), others_words=visitor.reads_all)

    def cancel(self, inbound: Request) -> dict[str, Any]:
        """Ends a running request, whoever made it; its client is told. Raises NotFound."""
        request_id = inbound.params[0]
        if not self._cancel(request_id):
            raise NotFound(f"The request {request_id[:80]!r} is not running.")
        return {"id": request_id, "cancelled": True}

    def pull(self, inbound: Request) -> Reply:
        """Begins to fetch a model: ``{"name": "owner/name"}``; the feed tells how it goes."""
        self.pulls.begin(_named(inbound))
        return Reply(sse.dumps({"pull": self.pulls.state()}), 202)

    def stop_pull(self, inbound: Request) -> dict[str, Any]:
        self.pulls.stop()
        return {"pull": self.pulls.state()}


def _memory_used(counts: Metrics) -> float:
    """Bytes of weights and KV."""
    figures = counts.figures()
    return sum(figures.get(name, 0.0) for name in ("models_weight_bytes", "kv_bytes", "kv_running_bytes"))


def _shown(settings: Settings, name: str) -> str:
    """A setting's value; not that of a key."""
    value = logging.getLevelName(OURS.getEffectiveLevel()).lower() if name == "log_level" else getattr(settings, name)
    if value is None:
        return ""
    return "set, not shown" if name in SECRETS else str(value)


def _named(inbound: Request) -> str:
    name = parse_object(inbound.body).get("name")
    if not isinstance(name, str):
        raise BadRequest("name is missing; give a repository (owner/name) or a short name.", param="name")
    return name


def _model(model: StoredModel) -> dict[str, Any]:
    short = next((short for short, repository in SHORT_NAMES.items() if repository == model.name), "")
    shown = {name: getattr(model, name) for name in ("name", "context", "can", "problem")}
    shown["command"] = f"{command()} serve {shlex.quote(short or model.name)}"
    if is_path(model.name) and is_embedded(model.name):  # however its weights are stored here
        shown |= {"name": EMBEDDED_NAME, "command": f"{command()} serve"}
    try:
        own = read_overrides(FOLDER, shown["name"])
    except NotSupported as error:
        shown["problem"], own = shown["problem"] or error.message, Overrides()
    values = {key: own.values.get(key) for key in EDITED}
    removable = not is_path(model.name)
    shown["set_command"] = f"{command()} models set {shlex.quote(short or shown['name'])} ttl=600"
    return shown | {"short": short, "bytes": model.size, "needs": needed_for(model), "own": values, "hub": removable}
