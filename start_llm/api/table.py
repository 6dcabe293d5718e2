"""The routes of this server, and how a dialect's exchange is named after the model that is served."""

from __future__ import annotations

from dataclasses import dataclass, replace

from start_llm.api.dialect import Exchange, Inbound
from start_llm.api.openai_chat import read_chat
from start_llm.api.openai_completions import read_completion
from start_llm.api.routes import Route, Routes
from start_llm.api.status import Status
from start_llm.core.request import ChatRequest
from start_llm.core.service import Service
from start_llm.core.settings import Settings
from start_llm.dashboard.metrics import Metrics
from start_llm.dashboard.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class Dialects:
    """Handlers of the routes that ask the model."""

    settings: Settings
    service: Service

    def chat(self, inbound: Inbound) -> Exchange:
        exchange = read_chat(inbound, self.settings, self.service.token_text)
        return replace(exchange, request=self._named(exchange.request))

    def completions(self, inbound: Inbound) -> Exchange:
        exchange = read_completion(inbound, self.settings, self.service.token_text)
        return replace(exchange, request=self._named(exchange.request))

    def _named(self, request: ChatRequest) -> ChatRequest:
        """A request without a model's name gets the served one's."""
        if request.model:
            return request
        cards = self.service.models()
        return replace(request, model=cards[0].id if cards else "")


def build_routes(settings: Settings, service: Service, metrics: Metrics, request_log: RequestLog) -> Routes:
    status = Status(service, metrics, request_log)
    dialects = Dialects(settings, service)
    return Routes(
        [
            Route("/health", {"GET": status.health}),
            Route("/metrics", {"GET": status.metrics}),
            Route("/v1/models", {"GET": status.models}),
            Route("/v1/models/{}", {"GET": status.model}),
            Route("/v1/chat/completions", {"POST": dialects.chat}),
            Route("/v1/completions", {"POST": dialects.completions}),
            Route("/v1/cache/requests", {"GET": status.cache_requests}),
            Route("/v1/cache/requests/{}", {"GET": status.cache_request}),
        ]
    )
