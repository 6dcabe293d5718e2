"""What goes past LiteLLM: routes that the server behind answers by itself, and requests on which LiteLLM fails.

LiteLLM counts with another tokenizer, lists the entries of its start, makes JSON of every transcript, and refuses
prompts of token ids.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import httpx
from fastapi import Depends, FastAPI, Request, Response
from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from start_llm.core.modelmap import MAIN_NAME
from start_llm.proxy.asgi import JSON, START, dialect_of, replay
from start_llm.proxy.config import abilities, name_behind, names_behind
from start_llm.proxy.outcome import RequestOutcome, current

COUNTS = ("messages/count_tokens", "responses/input_tokens")
FORWARDED = (*COUNTS, "completions", "embeddings", "rerank", "audio/transcriptions", "audio/speech")
"""LiteLLM leaves out or refuses much of what these may ask for, and nothing of them can be answered elsewhere."""
LIST_SECONDS = 120.0


async def _read_whole(request: Request) -> None:
    """LiteLLM's check reads a form as it comes. With the whole of it in memory first, it is still there afterwards."""
    await request.body()


class ServerRoutes:
    """Handlers, and what they know of the server."""

    def __init__(self, config: dict[str, Any]) -> None:
        entries = config["model_list"]
        parameters = entries[0]["litellm_params"]
        self._names = names_behind(config)
        self._entries = [entry for entry in entries if entry["model_name"] in self._names]
        # PROXY_MODEL_ID, which the server knows nothing of
        self._made_up = [name for name, behind in self._names.items() if behind == MAIN_NAME != name]
        self._base = parameters["api_base"].removesuffix("/v1")
        self._key = {"x-api-key": parameters["api_key"]}
        self._client = httpx.AsyncClient(timeout=LIST_SECONDS, trust_env=False)
        self._answer_seconds = float(parameters["timeout"])

    def add_to(self, app: FastAPI, key_check: Any) -> None:
        """Puts these routes before LiteLLM's own. `key_check`: LiteLLM's dependency that refuses a wrong key."""
        routes: list[tuple[str, Any, str]] = [(path, self.forward, "POST") for path in FORWARDED]
        routes += [("model/info", self.info, "GET"), ("models", self.models, "GET")]
        routes += [("models/{name:path}", self.model, "GET")]
        checks = [Depends(_read_whole), Depends(key_check)]
        for path, handler, method in routes:
            for prefix in ("", "/v1"):
                app.add_api_route(f"{prefix}/{path}", handler, methods=[method], dependencies=checks)
                app.router.routes.insert(0, app.router.routes.pop())

    async def forward(self, request: Request) -> Response:
        """The server's own answer, as it comes."""
        path = "/v1/" + request.url.path.removeprefix("/v1").strip("/")
        body, kind = await request.body(), request.headers.get("content-type", JSON)
        headers = self._key | {"content-type": kind}
        asked = self._client.build_request(
            "POST", self._base + path, content=self._renamed(body) if kind == JSON else body, headers=headers,
            timeout=self._answer_seconds,
        )  # fmt: skip
        asking = asyncio.create_task(self._client.send(asked, stream=True))
        leaving = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():  # nobody wants it any more, and the server learns that from its connection
                return Response(status_code=499)
            answer = asking.result()
        except httpx.HTTPError as error:
            return _response(_no_answer(error))
        finally:
            asking.cancel()
            leaving.cancel()
        kind = answer.headers.get("content-type")
        done = BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_raw(), answer.status_code, _headers(answer), kind, done)

    def _renamed(self, body: bytes) -> bytes:
        """`body` with the server's name of the model."""
        given = json.loads(body)
        model = given.get("model")
        known = isinstance(model, str) and model in self._names
        return json.dumps(given | {"model": self._names[model]}).encode() if known else body

    async def models(self, request: Request) -> Response:
        answer = await self._get("/v1/models")
        if answer.status_code != 200:
            return _response(answer)
        listed = answer.json()
        main = listed["data"][:1]
        listed["data"] = [card | {"id": name} for name in self._made_up for card in main] + listed["data"]
        return Response(json.dumps(listed), media_type=JSON)

    async def info(self, request: Request) -> Response:
        """LiteLLM's list of what its entries can do, for the models that the server has now."""
        answer = await self._get("/v1/models")
        if answer.status_code != 200:
            return _response(answer)
        cards = {card["id"]: card for card in answer.json()["data"]}
        cards[MAIN_NAME] = next(iter(cards.values()), {})
        known = [(entry["model_name"], name_behind(entry), entry["model_info"]) for entry in self._entries]
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
        return _response(await self._get(f"/v1/models/{quote(self._names.get(name, name), safe='')}"))

    async def _get(self, path: str) -> httpx.Response:
        try:
            return await self._client.get(self._base + path, headers=self._key)
        except httpx.HTTPError as error:
            return _no_answer(error)


class Direct:
    """ASGI middleware around LiteLLM, within `bodies.RequestBodies`. Each request has a `RequestOutcome`.

    LiteLLM reads much of a body on the way and ends with a status of 500 where it does not understand it. Such a
    request is put to the server, which answers it, or says in a sentence what is wrong, as it does at its own port.
    """

    def __init__(self, app: ASGIApp, *, server: ServerRoutes) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = RequestOutcome()
        if scope["type"] == "http":
            current.set(outcome)  # of the task that the server runs this request in
        if dialect_of(scope) is None:
            await self._app(scope, receive, send)
            return
        body, failed = (await receive())["body"], False

        async def unless_failed(message: Message) -> None:
            nonlocal failed
            if message["type"] == START:
                failed = message["status"] >= 500 and outcome.error is None
            if not failed:
                await send(message)

        await self._app(scope, replay(body, receive), unless_failed)
        if failed:
            response = await self._server.forward(Request(scope, replay(body, receive)))
            await response(scope, receive, send)


def _abilities_of(card: dict[str, Any]) -> dict[str, Any]:
    """What the server says of a model, in LiteLLM's words."""
    details = card.get("details", {})
    if "task" in details:
        return {"mode": f"audio_{details['task']}"}
    if details.get("kind") == "embedding":
        return {"mode": "embedding", "max_input_tokens": card.get("context_length")}
    if "capabilities" not in card:
        return {}
    able = {name: bool(card["capabilities"].get(name)) for name in ("reasoning", "tools", "vision")}
    return abilities(context=card["context_length"], **able)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _no_answer(error: httpx.HTTPError) -> httpx.Response:
    message = f"the server behind does not answer: {error or type(error).__name__}"
    return httpx.Response(502, json={"type": "error", "error": {"type": "api_error", "message": message}})


def _response(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, _headers(answer), answer.headers.get("content-type"))


def _headers(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("x-") or name == "retry-after"}
