"""Routes that the server behind answers by itself: token counts, which models there are, and everything of sounds.

LiteLLM counts with another tokenizer, lists the entries of its start, and makes JSON of every transcript.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import httpx
from fastapi import Depends, FastAPI, Request, Response

from start_llm.core.modelmap import MAIN_NAME
from start_llm.proxy.config import ANY_NAME, abilities, name_behind, names_behind

COUNTS = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")
LISTS = ("/v1/models", "/models")
INFOS = ("/v1/model/info", "/model/info")
SOUNDS = ("/v1/audio/transcriptions", "/v1/audio/speech", "/audio/transcriptions", "/audio/speech")
"""LiteLLM knows the audio models of its start only. And no voice can go elsewhere."""
COUNT_SECONDS = 120.0
JSON = "application/json"


def add_routes(app: FastAPI, config: dict[str, Any], key_check: Any) -> None:
    """Puts these routes before LiteLLM's own.

    Args:
        app: LiteLLM's application.
        config: LiteLLM's configuration.
        key_check: LiteLLM's dependency that refuses a wrong key.
    """
    server = ServerRoutes(config)
    routes: list[tuple[str, Any, str]] = [(path, server.count, "POST") for path in COUNTS]
    routes += [(path, server.sound, "POST") for path in SOUNDS]
    routes += [(path, server.info, "GET") for path in INFOS]
    routes += [(path, server.models, "GET") for path in LISTS]
    routes += [(f"{path}/{{name:path}}", server.model, "GET") for path in LISTS]
    for path, handler, method in routes:
        app.add_api_route(path, handler, methods=[method], dependencies=[Depends(_read_whole), Depends(key_check)])
        app.router.routes.insert(0, app.router.routes.pop())


async def _read_whole(request: Request) -> None:
    """LiteLLM's check reads a form as it comes. With the whole of it in memory first, it is still there afterwards."""
    await request.body()


class ServerRoutes:
    """Handlers, and what they know of the server."""

    def __init__(self, config: dict[str, Any]) -> None:
        entries = config["model_list"]
        parameters = entries[0]["litellm_params"]
        self._entries = [
            entry
            for entry in entries
            if entry["model_name"] != ANY_NAME and entry["litellm_params"].get("api_base") == parameters["api_base"]
        ]
        self._names = names_behind(config)
        # PROXY_MODEL_ID, which the server knows nothing of
        self._made_up = [name for name, behind in self._names.items() if behind == MAIN_NAME != name]
        self._base = parameters["api_base"].removesuffix("/v1")
        self._key = {"x-api-key": parameters["api_key"]}
        self._client = httpx.AsyncClient(timeout=COUNT_SECONDS, trust_env=False)
        self._sound_seconds = float(parameters["timeout"])

    async def count(self, request: Request) -> Response:
        """The count of the prompt that the server would make."""
        body = await request.json()
        if isinstance(body.get("model"), str):
            body["model"] = self._names.get(body["model"], body["model"])
        return _response(await self._ask("POST", request.url.path, json.dumps(body).encode()))

    async def sound(self, request: Request) -> Response:
        """The server's own answer to a recording, or to a text that is to be spoken."""
        path = "/v1/" + request.url.path.removeprefix("/v1").strip("/")
        kind = request.headers.get("content-type", "")
        asking = asyncio.create_task(self._ask("POST", path, await request.body(), kind, self._sound_seconds))
        leaving = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():  # nobody wants it any more, and the server learns that from its connection
                return Response(status_code=499)
            return _response(asking.result())
        finally:
            asking.cancel()
            leaving.cancel()

    async def models(self, request: Request) -> Response:
        answer = await self._ask("GET", "/v1/models")
        if not isinstance(answer, httpx.Response) or answer.status_code != 200:
            return _response(answer)
        listed = answer.json()
        main = listed["data"][:1]
        listed["data"] = [card | {"id": name} for name in self._made_up for card in main] + listed["data"]
        return Response(json.dumps(listed), media_type=JSON)

    async def info(self, request: Request) -> Response:
        """LiteLLM's list of what its entries can do, for the models that the server has now."""
        answer = await self._ask("GET", "/v1/models")
        if not isinstance(answer, httpx.Response) or answer.status_code != 200:
            return _response(answer)
        cards = {card["id"]: card for card in answer.json()["data"]}
        cards[MAIN_NAME] = next(iter(cards.values()), {})
        infos = []
        for entry in self._entries:
            behind, info = name_behind(entry), entry["model_info"]
            if behind in cards or info.get("mode") != "chat":
                infos.append(_info(entry["model_name"], behind, info | _abilities_of(cards.get(behind, {}))))
        new = cards.keys() - {entry["model_name"] for entry in infos}
        infos += [_info(name, name, {"id": name} | _abilities_of(cards[name])) for name in sorted(new)]
        wanted = request.query_params.get("litellm_model_id")
        data = [entry for entry in infos if wanted in {None, entry["model_info"]["id"]}]
        return Response(json.dumps({"data": data}), media_type=JSON)

    async def model(self, name: str) -> Response:
        return _response(await self._ask("GET", f"/v1/models/{quote(self._names.get(name, name), safe='')}"))

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        kind: str = JSON,
        seconds: float = COUNT_SECONDS,
    ) -> httpx.Response | httpx.HTTPError:
        headers = self._key | {"content-type": kind}
        try:
            return await self._client.request(method, self._base + path, content=body, headers=headers, timeout=seconds)
        except httpx.HTTPError as error:
            return error


def _abilities_of(card: dict[str, Any]) -> dict[str, Any]:
    """What the server says of a model, in LiteLLM's words."""
    details = card.get("details", {})
    if "task" in details:
        return {"mode": f"audio_{details['task']}"}
    if "capabilities" not in card or details.get("kind") == "embedding":
        return {}
    able = {name: bool(card["capabilities"].get(name)) for name in ("reasoning", "tools", "vision")}
    return abilities(context=card["context_length"], **able)


def _info(name: str, behind: str, info: dict[str, Any]) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": behind}, "model_info": info}


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _response(answer: httpx.Response | httpx.HTTPError) -> Response:
    if isinstance(answer, httpx.HTTPError):
        message = f"the server behind does not answer: {answer or type(answer).__name__}"
        problem = {"type": "error", "error": {"type": "api_error", "message": message}}
        return Response(json.dumps(problem), 502, media_type=JSON)
    headers = {name: value for name, value in answer.headers.items() if name.startswith("x-") or name == "retry-after"}
    return Response(answer.content, answer.status_code, headers, media_type=answer.headers.get("content-type"))
