"""The models, as Ollama's clients read, fetch and delete them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator
from dataclasses import dataclass
from datetime import UTC, datetime

import start_llm
from start_llm.api.common import fields
from start_llm.api.http.routes import Feed, Reply, Request
from start_llm.api.ollama import shapes
from start_llm.api.ollama.chat import named
from start_llm.api.ollama.stream import LINES, line
from start_llm.core.errors import ClientGone, NotFound, NotSupported, Unavailable
from start_llm.core.service import ModelCard, Service
from start_llm.models.catalog import folder_of
from start_llm.models.checkpoint import parameters_on_disk, read_config
from start_llm.models.hub_search import quantisation
from start_llm.models.library import Library

SPOKEN = "0.13.0"
"""The version of Ollama whose API this is: clients ask for one that is new enough."""
FOR_EVER = "2318-01-01T00:00:00Z"
NOT_DONE = {
    "create": "models are not made here; put a folder into START_LLM_CACHE_DIR/models, and say what holds for a model "
    "in models/NAME.toml",
    "copy": "a model has no second name here; MODEL_MAP=name=model gives it one",
    "push": "nothing is sent to a hub; use `hf upload`",
}
"""Routes of Ollama that answer 501, and what to do in their place."""
LOOK_SECONDS = 0.25
_HUBS = ("hf.co/", "huggingface.co/")


class NameBody(fields.BodyModel):
    model: str | None = None
    name: str | None = None

    @property
    def asked(self) -> str:
        """Raises BadRequest."""
        name = named(self.model or self.name or "")
        if not name:
            raise fields.bad("model", "the name of a model", self.model)
        return next((name.removeprefix(hub) for hub in _HUBS if name.startswith(hub)), name)


class ShowBody(NameBody):
    verbose: bool | None = None


class PullBody(NameBody):
    """Without ``stream`` the answer is a stream."""

    stream: bool | None = None
    insecure: bool | None = None


@dataclass(frozen=True, slots=True)
class OllamaModels:
    """Handlers. Thread-safe as far as `service` is."""

    service: Service
    library: Library

    def version(self, inbound: Request) -> shapes.OllamaVersionShape:
        return {"version": SPOKEN, "start_llm": start_llm.__version__}

    def tags(self, inbound: Request) -> shapes.OllamaTagsShape:
        return {"models": [_listed(card) for card in self._cards()]}

    def running(self, inbound: Request) -> shapes.OllamaPsShape:
        return {"models": [_running(card) for card in self._cards() if card.state == "ready"]}

    def show(self, inbound: Request) -> shapes.OllamaShowShape:
        asked = fields.parse_body(ShowBody, inbound.body)[0].asked
        served = self.service.models.served_name(asked)
        card = next((card for card in self._cards() if card.id == served), None)
        if card is None:
            raise NotFound(f"model {asked[:80]!r} not found; /api/tags lists them.", param="model")
        family = card.family
        abilities: dict[shapes.OllamaAbility, bool] = {
            "completion": True,
            "vision": card.vision,
            "tools": card.tools,
            "thinking": card.reasoning,
        }
        return {
            "modelfile": f"FROM {card.id}",
            "parameters": "",
            "template": "",
            "modified_at": _moment(card),
            "details": _details(card, files=True),
            "model_info": {"general.architecture": family, f"{family}.context_length": card.context},
            "capabilities": [name for name, able in abilities.items() if able],
        }

    def pull(self, inbound: Request) -> Feed | shapes.OllamaPulledShape:
        """Fetches a model, or goes on with one that is being fetched. A client that leaves ends what it began."""
        body = fields.parse_body(PullBody, inbound.body)[0]
        now = self.library.pulls.state() or {}
        source = self.library.source(body.asked)
        begun = now.get("state") != "running" or now["name"] != source
        lines = self._progress(self.library.pulls.begin(source) if begun else source, begun=begun)
        if body.stream is not False:
            return Feed(map(line, lines), LINES)
        last: shapes.OllamaPulledShape = {}
        for told in lines:
            last = told
            if inbound.has_left():
                lines.close()
                raise ClientGone("The client went away while its model was fetched.")
        if "error" in last:
            raise Unavailable(last["error"])
        return last

    def _progress(self, source: str, *, begun: bool) -> Generator[shapes.OllamaPulledShape]:
        digest = f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"
        pulls = self.library.pulls
        try:
            line: shapes.OllamaPulledShape = {"status": "pulling manifest"}
            yield line
            while (now := pulls.state()) and now["name"] == source and now["state"] == "running":
                if size := now["bytes"]:
                    here = round(now["part"] * size)
                    line = {"status": f"pulling {source}", "digest": digest, "total": size, "completed": here}
                yield line  # in any case: that a client has gone shows when it is written to
                time.sleep(LOOK_SECONDS)
            begun = False
            if now and now["name"] == source and now["state"] == "done":
                yield {"status": "success"}
            else:
                yield {"error": now["detail"] if now else "The fetch was stopped."}
        finally:
            if begun:
                pulls.stop(source)

    def delete(self, inbound: Request) -> Reply:
        """Removes a model that came from a hub. Raises NotFound; Conflict: it must stay, and why."""
        self.library.remove(fields.parse_body(NameBody, inbound.body)[0].asked)
        return Reply(b"")

    def unsupported(self, inbound: Request) -> Reply:
        """Raises NotSupported."""
        name = inbound.path.rpartition("/")[2]
        raise NotSupported(f"/api/{name} is not supported: {NOT_DONE[name]}.")

    def _cards(self) -> list[ModelCard]:
        """Those that talk."""
        return [card for card in self.service.models.cards() if card.details.get("kind") != "audio"]


def _listed(card: ModelCard) -> shapes.OllamaModelShape:
    return {
        "name": card.id,
        "model": card.id,
        "modified_at": _moment(card),
        "size": card.weight_bytes,
        "digest": hashlib.sha256(f"{card.id} {card.created}".encode()).hexdigest(),
        "details": _details(card),
    }


def _running(card: ModelCard) -> shapes.OllamaRunningShape:
    """When it goes is not known: that depends on what is asked."""
    size, context = card.weight_bytes, card.context
    return {**_listed(card), "size_vram": size, "context_length": context, "expires_at": FOR_EVER}


def _details(card: ModelCard, *, files: bool = False) -> shapes.OllamaDetailsShape:
    """`files`: the model's files are looked at, for what only they say."""
    count, quantised = _by_files(card) if files else (0, "")
    return {
        "parent_model": card.details.get("base") or "",
        "format": "mlx",
        "family": card.family,
        "families": [card.family],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M" if count else "",
        "quantization_level": quantised,
    }


def _by_files(card: ModelCard) -> tuple[int, str]:
    """How many parameters it has, and how they are quantised; as far as that is known."""
    folder = folder_of(str(card.details.get("source", "")))
    try:
        return (0, "") if folder is None else (parameters_on_disk(folder), quantisation(read_config(folder)))
    except (OSError, ValueError):
        return 0, ""


def _moment(card: ModelCard) -> str:
    return datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
