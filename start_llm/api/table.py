"""The routes of this server, and how a dialect's exchange is named after the model that is served."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from start_llm.api.anthropic.messages import MessagesExchange, read_messages
from start_llm.api.anthropic.shapes import CountedTokensShape
from start_llm.api.common.dialect import Exchange
from start_llm.api.common.fields import word
from start_llm.api.common.request import agent_of
from start_llm.api.http import sse
from start_llm.api.http.access import RequestOwners
from start_llm.api.http.answers import CACHE_HEADER
from start_llm.api.http.routes import Reply, Request, Route, Routes
from start_llm.api.media.audio import AudioRoutes
from start_llm.api.media.embeddings import Encodings
from start_llm.api.ollama.chat import read_chat as read_ollama_chat
from start_llm.api.ollama.chat import read_generate
from start_llm.api.ollama.models import NOT_DONE, OllamaModels
from start_llm.api.ollama.shapes import OllamaChatShape, OllamaGenerateShape
from start_llm.api.openai.chat import read_chat, read_completion
from start_llm.api.openai.responses import StoredResponses, read_responses
from start_llm.api.openai.responses_store import ResponsesStore
from start_llm.api.openai.responses_stream import ResponsesExchange
from start_llm.api.openai.shapes import InputTokensShape
from start_llm.api.ops.page import Page
from start_llm.api.ops.status import Status
from start_llm.core.jsontext import parse_json
from start_llm.core.modelmap import MAIN_NAME
from start_llm.core.request import Dialect, is_side_request, names_tools
from start_llm.core.service import Service
from start_llm.core.settings import Settings

CHAT_FIELDS = frozenset(
    {
        *("functions", "function_call", "response_format", "max_completion_tokens", "n", "logprobs", "top_logprobs"),
        *("stop", "stream_options", "parallel_tool_calls"),
    }
)
MESSAGES_FIELDS = frozenset({"system", "stop_sequences", "output_config", "output_format"})
CHAT_PARTS = frozenset({"function", "developer", "tool", "tool_calls"})
"""Keys and types of tools, roles and keys of messages."""
BLOCKS = frozenset({"tool_use", "tool_result", "redacted_thinking", "document", "search_result"})

HTML = "text/html; charset=utf-8"
FILE, PAGE = "openapi.json", "docs.html"  # the API for programs and for people; `scripts/openapi_docs.py` makes both
_FOLDER = resources.files("start_llm.api")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True, slots=True)
class Dialects:
    """Handlers of the routes that ask the model."""

    settings: Settings
    service: Service
    store: ResponsesStore
    owners: RequestOwners

    def responses(self, inbound: Request) -> Exchange:
        return self._begin(self._response(inbound), inbound)

    def chat(self, inbound: Request) -> Exchange:
        return self._begin(read_chat(inbound, self.settings, self.service), inbound)

    def completions(self, inbound: Request) -> Exchange:
        return self._begin(read_completion(inbound, self.settings, self.service), inbound)

    def messages(self, inbound: Request) -> Exchange:
        return self._begin(read_messages(inbound, self.settings, self.service), inbound).edited()

    def ollama_chat(self, inbound: Request) -> Exchange | OllamaChatShape:
        return self._begin(read_ollama_chat(inbound, self.settings, self.service), inbound)

    def ollama_generate(self, inbound: Request) -> Exchange | OllamaGenerateShape:
        return self._begin(read_generate(inbound, self.settings, self.service), inbound)

    def _begin[E: Exchange | OllamaChatShape | OllamaGenerateShape](self, exchange: E, inbound: Request) -> E:
        """The exchange as it is going to run: whose it is stays known."""
        if not isinstance(exchange, Exchange):
            return exchange
        self.owners.remember(exchange.request.id, inbound.visitor, exchange.request.owner)
        return self._served(exchange, inbound)

    def _response(self, inbound: Request) -> ResponsesExchange:
        return read_responses(inbound, self.settings, self.service, self.store.of(inbound.visitor.scope))

    def count_tokens(self, inbound: Request) -> CountedTokensShape:
        exchange = self._served(read_messages(inbound, self.settings, self.service), inbound)
        body: CountedTokensShape = {"input_tokens": exchange.edited().tokens()}
        if exchange.edits:
            body["context_management"] = {"original_input_tokens": exchange.tokens()}
        return body

    def count_response_tokens(self, inbound: Request) -> InputTokensShape:
        count = self.service.count_tokens(self._served(self._response(inbound), inbound).request)
        return {"object": "response.input_tokens", "input_tokens": count}

    def explain(self, inbound: Request) -> Reply:
        """What a request of any dialect would reuse and compute; nothing is run."""
        exchange = self._served(self._any(inbound), inbound)
        exchange = exchange.edited() if isinstance(exchange, MessagesExchange) else exchange
        report = self.service.explain(exchange.request)
        now = self.service.health()
        body = report.as_dict() | {"running": now.running, "queued": now.queued}
        return Reply(sse.dumps(body), headers={CACHE_HEADER: report.header()})

    def _any(self, inbound: Request) -> Exchange:
        """Reads a body of whichever dialect it is in."""
        usual: Dialect = "messages" if "anthropic-version" in inbound.headers else "chat"
        dialect = dialect_of(parse_json(inbound.body), usual)
        if dialect == "responses":
            return self._response(inbound)
        readers = {"messages": read_messages, "completions": read_completion}
        return readers.get(dialect, read_chat)(inbound, self.settings, self.service)

    def _served[E: Exchange](self, exchange: E, inbound: Request) -> E:
        """The answer's ``model`` is the name of what answers, whatever the client called it."""
        request = exchange.request
        name = self.service.models.served_name(request.model)
        side = self.settings.models_by_name.side
        if side is not None and is_side_request(request) and not names_tools(parse_json(inbound.body)):
            name = self.service.models.served_name(side) if name == self.service.models.served_name(MAIN_NAME) else name
        request = replace(request, model=name, client=agent_of(request.messages, inbound.headers))
        return replace(exchange, request=request)


def dialect_of(data: Any, usual: Dialect = "chat") -> Dialect:
    """Known by what only one dialect has: a field of the body, a tool's schema, a role, a block of a message.

    A body that could be either of the two dialects with messages is `usual`.
    """
    if not isinstance(data, dict):
        return usual
    if "messages" not in data and ("input" in data or "prompt" in data):
        return "responses" if "input" in data else "completions"
    messages = _dicts(data.get("messages"))
    blocks = {word(block.get("type")) for message in messages for block in _dicts(message.get("content"))}
    keys = _words(_dicts(data.get("tools")), "type")
    if "function" in keys:
        return "chat"
    if "input_schema" in keys or BLOCKS & blocks:
        return "messages"
    if CHAT_PARTS & _words(messages, "role"):
        return "chat"
    if MESSAGES_FIELDS & data.keys():
        return "messages"
    return "chat" if CHAT_FIELDS & data.keys() else usual


def _words(items: list[dict[str, Any]], kind: str) -> set[str | None]:
    """The keys of all, and what each says that it is."""
    return {key for item in items for key in (*item, word(item.get(kind)))}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _page_routes(page: Page) -> list[Route]:
    return [
        Route("/", {"GET": page.file}, lane="quick"),
        Route("/page/feed", {"GET": page.feed}, lane="feed"),
        Route("/page/stored", {"GET": page.stored}, private=True),
        Route("/page/models", {"GET": page.models}, private=True),
        Route("/page/models/pull", {"POST": page.pull}, private=True),
        Route("/page/models/stop", {"POST": page.stop_pull}, private=True),
        Route("/page/models/search", {"GET": page.search}, private=True),
        Route("/page/models/change", {"POST": page.change_model}, private=True),
        Route("/page/models/remove", {"POST": page.remove}, private=True),
        Route("/page/settings", {"GET": page.settings, "POST": page.change_setting}, private=True),
        Route("/page/agents", {"GET": page.agents}, private=True),
        Route("/page/nodes", {"GET": page.nodes}, private=True),
        Route("/page/requests/{}", {"GET": page.background}, lane="quick"),
        Route("/page/requests/{}/cancel", {"POST": page.cancel}, lane="quick", private=True),
        Route("/page/{}", {"GET": page.file}, lane="quick"),
    ]


def build_routes(
    dialects: Dialects, stored: StoredResponses, page: Page, status: Status, encodings: Encodings, sounds: AudioRoutes
) -> Routes:
    ollama = OllamaModels(dialects.service, page.library)
    return Routes(
        [
            *_page_routes(page),
            Route("/health", {"GET": status.health}, lane="quick"),
            Route("/metrics", {"GET": status.metrics}, lane="quick"),
            Route("/v1/loads", {"GET": status.loads}, lane="quick"),
            Route("/v1/models", {"GET": status.models}, lane="quick"),
            Route("/api/v0/models", {"GET": status.studio_models}, lane="quick"),
            Route("/api/v0/models/{*}", {"GET": status.studio_model}, lane="quick"),
            Route("/api/v0/chat/completions", {"POST": dialects.chat}),
            Route("/props", {"GET": status.props}, lane="quick"),
            Route("/slots", {"GET": status.slots}, lane="quick"),
            Route("/v1/models/load", {"POST": status.load}, private=True),
            Route("/v1/models/unload", {"POST": status.unload}, private=True),
            Route("/v1/models/pin", {"POST": status.pin}, private=True),
            Route("/v1/models/{*}", {"GET": status.model}, lane="quick"),
            Route("/v1/chat/completions", {"POST": dialects.chat}),
            Route("/v1/completions", {"POST": dialects.completions}),
            Route("/v1/messages", {"POST": dialects.messages}),
            Route("/v1/messages/count_tokens", {"POST": dialects.count_tokens}),
            Route("/v1/responses", {"POST": dialects.responses}),
            Route("/v1/responses/input_tokens", {"POST": dialects.count_response_tokens}),
            Route("/v1/responses/{}", {"GET": stored.get, "DELETE": stored.delete}),
            Route("/v1/responses/{}/input_items", {"GET": stored.input_items}),
            Route("/api/chat", {"POST": dialects.ollama_chat}),
            Route("/api/generate", {"POST": dialects.ollama_generate}),
            Route("/api/embed", {"POST": encodings.ollama_embed}),
            Route("/api/show", {"POST": ollama.show}),
            Route("/api/pull", {"POST": ollama.pull}, lane="feed", private=True),
            Route("/api/delete", {"DELETE": ollama.delete}, private=True),
            *(Route(f"/api/{name}", {"POST": ollama.unsupported}) for name in NOT_DONE),
            Route("/api/tags", {"GET": ollama.tags}, lane="quick"),
            Route("/api/ps", {"GET": ollama.running}, lane="quick"),
            Route("/api/version", {"GET": ollama.version}, lane="quick"),
            Route("/v1/embeddings", {"POST": encodings.embeddings}),
            Route("/v1/audio/speech", {"POST": sounds.speech}),
            Route("/v1/audio/transcriptions", {"POST": sounds.transcriptions}, form=True),
            Route("/v1/cache/explain", {"POST": dialects.explain}),
            Route("/v1/cache/requests", {"GET": status.cache_requests}),
            Route("/v1/cache/requests/{}", {"GET": status.cache_request}),
            Route("/openapi.json", {"GET": lambda _: Reply((_FOLDER / FILE).read_bytes())}),
            Route("/docs", {"GET": lambda _: Reply((_FOLDER / PAGE).read_bytes(), 200, HTML, _PAGE_HEADERS)}),
        ]
    )
