"""What goes past LiteLLM: routes that the server behind answers by itself, and requests on which LiteLLM fails.

LiteLLM counts with another tokenizer, lists the entries of its start, makes JSON of every transcript, and refuses
prompts of token ids.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx
from fastapi import FastAPI, Request, Response
from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse

from start_llm.core.modelmap import MAIN_NAME
from start_llm.proxy import nodes
from start_llm.proxy.asgi import JSON, off_the_loop
from start_llm.proxy.config import abilities, name_behind, names_behind
from start_llm.proxy.elsewhere import cards as models_elsewhere
from start_llm.proxy.fleet import NodeFleet
from start_llm.proxy.outcome import RequestOutcome, current, error_in
from start_llm.proxy.routing import fields_of

LIST_SECONDS = 120.0


class ServerRoutes:
    """Handlers, and what they know of the servers."""

    def __init__(self, config: dict[str, Any], fleet: NodeFleet, elsewhere: Mapping[str, str]) -> None:
        entries = config["model_list"]
        self._fleet, self._elsewhere = fleet, elsewhere
        self._names = names_behind(config)
        self._entries = {entry["model_name"]: entry for entry in entries[::-1] if entry["model_name"] in self._names}
        # PROXY_MODEL_ID, which the server knows nothing of
        self._made_up = [name for name, behind in self._names.items() if behind == MAIN_NAME != name]
        self._answer_seconds = float(entries[0]["litellm_params"]["timeout"])

    def add_to(self, app: FastAPI) -> None:
        """Puts the lists of models before LiteLLM's own."""
        routes = (("model/info", self.info), ("models", self.models), ("models/{name:path}", self.model))
        for path, handler in routes:
            for prefix in ("", "/v1"):
                app.add_api_route(f"{prefix}/{path}", handler, methods=["GET"])
                app.router.routes.insert(0, app.router.routes.pop())

    async def forward(self, request: Request) -> Response:
        """The answer of the node that `balancer` has chosen, as it comes; the outcome says if it is an error.
        Called by `balancer`: for what LiteLLM must not see, and for what it has failed at.

        A node that gives no answer, an empty one, a page for people, or 500 without an error object counts as lost.
        """
        outcome = current.get() or RequestOutcome()
        body, kind = await request.body(), request.headers.get("content-type", JSON)
        if kind == JSON:
            body = await off_the_loop(len(body), self._with_server_name, body)
        try:
            answer = await self._ask(request, self._fleet.members[outcome.node].node, body, kind)
            if answer is None:  # nobody wants it any more, and the server learns that from its connection
                return Response(status_code=499)
            if not (answer.is_error or _says_nothing(answer)):
                return _streamed(answer, outcome)
            answer = await nodes.read_all(answer)
            outcome.failed, outcome.status, outcome.error = True, answer.status_code, error_in(nodes.json_of(answer))
            if answer.is_success or (answer.status_code == 500 and outcome.error is None):
                raise httpx.RemoteProtocolError("what it says is no answer")
        except httpx.HTTPError as error:
            outcome.failed = outcome.is_lost = True
            outcome.is_unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            answer = _no_answer(error)
        return _response(answer)

    async def _ask(self, request: Request, node: nodes.ServerNode, body: bytes, kind: str) -> httpx.Response | None:
        """A node's answer, to be read; ``None``: the client has left. Raises httpx.HTTPError."""
        path = "/v1/" + request.url.path.removeprefix("/v1").strip("/")
        headers = nodes.headers_for(node) | {b"content-type": kind.encode("latin-1", "replace")}
        asked = self._fleet.client.build_request(
            "POST", node.url + path, content=body, headers=headers, timeout=self._answer_seconds
        )
        asking = asyncio.create_task(self._fleet.client.send(asked, stream=True))
        leaving = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
            with nodes.only_http_errors():
                return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            leaving.cancel()

    def _with_server_name(self, body: bytes) -> bytes:
        """The body with the server's name of the model."""
        given = fields_of(body, is_json=True)
        name = self._names.get(str(given.get("model")))
        return body if name is None else json.dumps(given | {"model": name}).encode()

    async def models(self, request: Request) -> Response:
        """``/v1/models``: those of all nodes; of two with one name the one that is loaded, or else the first."""
        answers = await self._get_all("/v1/models")
        if not answers[0].is_success:
            return _response(answers[0])
        main, cards = nodes.cards_of(answers[0])[:1], _union(answers)
        data = [card | {"id": name} for name in self._made_up for card in main] + cards
        ends = {"data": data + models_elsewhere(self._elsewhere), "last_id": cards[-1]["id"] if cards else None}
        return Response(json.dumps(nodes.json_of(answers[0]) | ends), media_type=JSON)

    async def info(self, request: Request) -> Response:
        """LiteLLM's list of what its entries can do, for the models that the servers have now."""
        answers = await self._get_all("/v1/models")
        if not answers[0].is_success:
            return _response(answers[0])
        cards = {card["id"]: card for card in _union(answers)}
        cards[MAIN_NAME] = next(iter(cards.values()), {})
        known = [(name, name_behind(entry), entry["model_info"]) for name, entry in self._entries.items()]
        known = [(name, behind, info) for name, behind, info in known if behind in cards]
        known += [(name, name, {"id": name}) for name in sorted(cards.keys() - {name for name, _, _ in known})]
        wanted = request.query_params.get("litellm_model_id")
        data = [
            {"model_name": name, "litellm_params": {"model": behind}, "model_info": info | _abilities_of(cards[behind])}
            for name, behind, info in known
            if wanted in {None, info["id"]}
        ]
        return Response(json.dumps({"data": data}), media_type=JSON)

    async def model(self, name: str) -> Response:
        answers = await self._get_all(f"/v1/models/{quote(self._names.get(name, name), safe='')}")
        return _response(answers[0])

    async def _get_all(self, path: str) -> list[httpx.Response]:
        """What the nodes answer, at least one; successes first."""
        answers = await asyncio.gather(*(self._get(member, path) for member in self._fleet.offered()))
        return sorted(answers, key=lambda answer: (not answer.is_success, answer.status_code == 502))

    async def _get(self, node: nodes.ServerNode, path: str) -> httpx.Response:
        """Raises nothing: a node that does not answer, or not with JSON, gets a 502."""
        seconds = LIST_SECONDS if len(self._fleet.members) == 1 else nodes.LOOK_SECONDS
        try:
            answer = await nodes.ask(
                self._fleet.client, node.url + path, headers=nodes.headers_for(node), seconds=seconds
            )
        except httpx.HTTPError as error:
            return _no_answer(error)
        is_known = answer.status_code != 200 or bool(nodes.json_of(answer))
        return answer if is_known else _no_answer(httpx.RemoteProtocolError("what it says is no JSON object"))


def _union(answers: Sequence[httpx.Response]) -> list[dict[str, Any]]:
    """Cards of models by their order, each name once."""
    found: dict[str, dict[str, Any]] = {}
    for card in (card for answer in answers for card in nodes.cards_of(answer)):
        if card["id"] not in found or (nodes.loaded_of([card]) and not nodes.loaded_of([found[card["id"]]])):
            found[card["id"]] = card
    return list(found.values())


def _streamed(answer: httpx.Response, outcome: RequestOutcome) -> Response:
    """The node's body as it comes. If it breaks, the outcome says so, and what has come of one that is no stream is cut
    off."""
    kind = answer.headers.get("content-type", "")

    async def parts() -> AsyncIterator[bytes]:
        can_end = True
        try:
            with nodes.only_http_errors():
                async for part in answer.aiter_raw():
                    can_end = kind.startswith("text/event-stream")
                    yield part
        except httpx.HTTPError:
            outcome.failed = outcome.is_lost = True
            if not can_end:
                raise

    done = BackgroundTask(answer.aclose)
    return StreamingResponse(parts(), answer.status_code, _headers(answer), kind or None, done)


def _abilities_of(card: dict[str, Any]) -> dict[str, Any]:
    """What the server says of a model, in LiteLLM's words; nothing where a node of another version says too little."""
    details, able, context = (card.get(name) for name in ("details", "capabilities", "context_length"))
    if isinstance(details, dict) and "task" in details:
        return {"mode": f"audio_{details['task']}"}
    if isinstance(details, dict) and details.get("kind") == "embedding":
        return {"mode": "embedding", "max_input_tokens": context}
    if not isinstance(able, dict) or not isinstance(context, int):
        return {}
    return abilities(context=context, **{name: bool(able.get(name)) for name in ("reasoning", "tools", "vision")})


async def _disconnected(request: Request) -> None:
    """Returns when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _says_nothing(answer: httpx.Response) -> bool:
    """An empty body, or a page for people: no server of this kind answers so."""
    kind = answer.headers.get("content-type", "").lower()
    return answer.is_success and (answer.headers.get("content-length") == "0" or kind.startswith("text/html"))


def _no_answer(error: httpx.HTTPError) -> httpx.Response:
    """The 502 of a server that does not answer."""
    message = f"the server behind does not answer: {error or type(error).__name__}"
    return httpx.Response(502, json={"type": "error", "error": {"type": "api_error", "message": message}})


def _response(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, _headers(answer), answer.headers.get("content-type"))


def _headers(answer: httpx.Response) -> dict[str, str]:
    """The server's own headers, which a client gets; Starlette cannot write those that are no ASCII."""
    kept = {name: value for name, value in answer.headers.items() if name.startswith("x-") or name == "retry-after"}
    return {name: value for name, value in kept.items() if value.isascii()}
