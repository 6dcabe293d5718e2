"""What the page fetches beside its feed: stored KV, models, the server's settings and log, a request's note.

All but the note is about everybody's requests or the machine: it is for who may see everything, and of all web pages
for the server's own. What the page asks the server to do (fetch a model) is a POST.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from start_llm.api.http import sse
from start_llm.api.http.access import RequestOwners
from start_llm.api.http.routes import Reply, Request
from start_llm.api.ops.pulling import Pulls
from start_llm.core.errors import BadRequest, Forbidden, NotFound, Unavailable
from start_llm.core.jsontext import parse_json
from start_llm.core.service import Service
from start_llm.core.settings import Settings, meaning
from start_llm.dashboard.audit import AUDIT_FILE, Wanted, entries
from start_llm.dashboard.daily import SLOT_SECONDS, SLOTS, Daily
from start_llm.dashboard.process_log import LogTail, tail_of
from start_llm.dashboard.redact import Redactor
from start_llm.files.database import FileUnavailable
from start_llm.models.catalog import StoredModel, stored_models
from start_llm.models.recommended import RECOMMENDED, SHORT_NAMES

log = logging.getLogger(__name__)

MOST_EARLIER = 20_000  # requests of the day before the start
SECRETS = ("api_key", "litellm_master_key", "fallback_api_key")
_NO_STORE = {"Cache-Control": "no-store"}
_SECRET_NAMES = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def redactor(settings: Settings) -> Redactor:
    """Hides the keys of this server, and whatever the environment calls a key."""
    environment = [value for name, value in os.environ.items() if any(word in name.upper() for word in _SECRET_NAMES)]
    return Redactor([*(getattr(settings, name) for name in SECRETS), *environment])


class Panels:
    """Handlers of the page's own routes. Thread-safe."""

    def __init__(
        self, settings: Settings, service: Service, owners: RequestOwners, changed: Callable[[], None]
    ) -> None:
        self._settings, self._service, self._owners = settings, service, owners
        self._redact = redactor(settings).text
        self.pulls = Pulls(changed)
        self.daily = Daily()
        self.log = LogTail(self._redact)

    def sees_all(self, inbound: Request) -> bool:
        """With API_KEY everybody who was let in has it, so there is nothing to hide from one another.

        Of the web pages of this machine it is the server's own alone: another one may ask the model, but the log, the
        settings and everybody's requests are none of its business.
        """
        return self._is_own_page(inbound) and (inbound.visitor.sees_all or self._settings.api_key is not None)

    def begin(self) -> None:
        """Listens to the log, and reads what was asked on the day before the start."""
        self.log.attach()
        if self._settings.audit_days:
            since = time.time() - SLOTS * SLOT_SECONDS
            try:
                self.daily.begin_with(entries(self._settings.cache_dir / AUDIT_FILE, Wanted(since), MOST_EARLIER))
            except FileUnavailable as error:
                log.warning("reuse by client begins with this start: %s", error)

    def close(self) -> None:
        """The log is not listened to any more, and a running fetch ends."""
        self.log.detach()
        self.pulls.stop()

    # --- reading ------------------------------------------------------------------

    def stored(self, inbound: Request) -> Reply:
        self.check_sees_all(inbound)
        try:
            tree = self._service.stored()
        except TimeoutError as error:
            raise Unavailable(f"Stored KV cannot be shown now: {error}.") from None
        return _reply(tree.as_dict())

    def models(self, inbound: Request) -> Reply:
        """What is on this disk, and what could be fetched."""
        self.check_sees_all(inbound)
        found = [_model(model) for model in stored_models(self._settings.cache_dir, self._settings.model_path)]
        here = {model["name"] for model in found}
        known = [
            {"short": model.short, "name": model.repository, "bytes": model.weights, "note": model.note}
            for model in RECOMMENDED
            if model.repository not in here
        ]
        sources = [card.details.get("source") for card in self._service.models() if card.state == "ready"]
        return _reply({"models": found, "known": known, "served": [str(source) for source in sources if source]})

    def settings(self, inbound: Request) -> Reply:
        self.check_sees_all(inbound)
        rows = [
            {
                "name": name.upper(),
                "value": self._shown(name),
                "set": name in self._settings.model_fields_set,
                "about": meaning(name),
            }
            for name in Settings.model_fields
        ]
        return _reply({"settings": rows, "proxy_log": tail_of(self._settings.log_root / "proxy.log", self._redact)})

    def _shown(self, name: str) -> str:
        value = getattr(self._settings, name)
        if value is None:
            return ""
        return "set, not shown" if name in SECRETS else self._redact(str(value))

    def background(self, inbound: Request) -> Reply:
        """The update note that a request's model has read and where it left what is stored, for who made it.

        The words that are stored there may be another client's: they are for who may see everything.
        """
        request_id, everything = inbound.params[0], self.sees_all(inbound)
        if not (everything or self._owners.may_see(inbound.visitor, request_id)):
            raise NotFound(f"There is no request {request_id[:80]!r} of this key.")
        return _reply(self._service.background(request_id).as_dict(everything=everything))

    # --- acting -------------------------------------------------------------------

    def pull(self, inbound: Request) -> Reply:
        """Begins to fetch a model: ``{"name": "owner/name"}``; the feed tells how it goes."""
        self.check_sees_all(inbound)
        body = parse_json(inbound.body)
        name = body.get("name") if isinstance(body, dict) else None
        if not isinstance(name, str):
            raise BadRequest("name is missing; give a repository (owner/name) or a short name.", param="name")
        self.pulls.begin(name)
        return _reply({"pull": self.pulls.state()}, 202)

    def stop_pull(self, inbound: Request) -> Reply:
        self.check_sees_all(inbound)
        self.pulls.stop()
        return _reply({"pull": self.pulls.state()})

    # --- who may ------------------------------------------------------------------

    def check_sees_all(self, inbound: Request) -> None:
        """Raises Forbidden for who may not see everything, and for other web pages."""
        if not self._is_own_page(inbound):
            origin = inbound.headers["Origin"]
            raise Forbidden(f"Origin {origin[:80]!r} may not do this; only the server's own page may.", param="Origin")
        if not self.sees_all(inbound):
            raise Forbidden(
                "This is shown to who may see everything: with API_KEY whoever has it, without it a client of this "
                "machine that sends no key."
            )

    def _is_own_page(self, inbound: Request) -> bool:
        """No web page asks, or the server's own."""
        origin = inbound.headers.get("Origin")
        return origin is None or urlsplit(origin).netloc == inbound.headers.get("Host")


def _reply(body: Any, status: int = 200) -> Reply:
    return Reply(sse.dumps(body), status, headers=_NO_STORE)


def _model(model: StoredModel) -> dict[str, Any]:
    short = next((short for short, repository in SHORT_NAMES.items() if repository == model.name), "")
    return {
        "name": model.name,
        "short": short,
        "bytes": model.size,
        "context": model.context,
        "can": list(model.can),
        "problem": model.problem,
    }
