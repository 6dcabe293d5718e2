"""What the server behind answers by itself: token counts, which models there are, and everything of sounds.

Runs in LiteLLM's process, with its libraries only; `child.py` loads it by path.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import runpy
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from fastapi import Depends, FastAPI, Request, Response

# LiteLLM counts by itself for entries of this kind, with another tokenizer, or not at all.
COUNTED_BEHIND = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")
# LiteLLM lists its entries, which are those of its start.
LISTED_BEHIND = ("/v1/models", "/models")
TOLD_BEHIND = ("/v1/model/info", "/model/info")
# LiteLLM makes JSON of every transcript, and knows the audio models of its start only. And no voice can go elsewhere.
HEARD_BEHIND = ("/v1/audio/transcriptions", "/v1/audio/speech", "/audio/transcriptions", "/audio/speech")
COUNT_SECONDS = 120.0
DEFAULT = "default"
ANY = "*"
ABILITIES = Path(__file__).with_name("abilities.py")


def count_behind(app: FastAPI, config: dict[str, Any], key_check: Any) -> None:
    """Has the server answer these requests; and has LiteLLM leave requests to models that it does not know as they are.

    Args:
        app: LiteLLM's application; the routes come before its own.
        config: LiteLLM's configuration.
        key_check: LiteLLM's dependency that refuses a wrong key.
    """
    behind = Behind(config)
    _leave_alone(behind.prefix, behind.able(reasoning=True, tools=True, vision=True))
    for path in COUNTED_BEHIND:
        _first(app, path, behind.count, "POST", key_check)
    for path in HEARD_BEHIND:
        _first(app, path, behind.sound, "POST", _whole, key_check)
    for path in TOLD_BEHIND:
        _first(app, path, behind.info, "GET", key_check)
    for path in LISTED_BEHIND:
        _first(app, path, behind.models, "GET", key_check)
        _first(app, path + "/{name:path}", behind.model, "GET", key_check)


def _first(app: FastAPI, path: str, handler: Any, method: str, *checks: Any) -> None:
    app.add_api_route(path, handler, methods=[method], dependencies=[Depends(check) for check in checks])
    app.router.routes.insert(0, app.router.routes.pop())


async def _whole(request: Request) -> None:
    """LiteLLM's check reads a form as it comes. With the whole of it in memory first, it is still there afterwards."""
    await request.body()


def names_behind(config: dict[str, Any]) -> dict[str, str]:
    """The server's names of models, by LiteLLM's."""
    named = {entry["model_name"]: _behind(entry) for entry in config["model_list"]}
    return {name: behind for name, behind in named.items() if ANY not in name}


def _behind(entry: dict[str, Any]) -> str:
    """The name that the server is asked for."""
    return str(entry["litellm_params"]["model"].partition("/")[2])


def _leave_alone(prefix: str, able: dict[str, Any]) -> None:
    """LiteLLM leaves `thinking` and the like out of messages to models that it knows nothing of, and goes by what
    Anthropic's models can do where a name is like theirs. What a name behind `prefix` can do is the server's to judge.
    """
    known = importlib.import_module("litellm.litellm_core_utils.fallback_generalizations")
    rules = known.get_fallback_generalization_rules()
    told = {name: value for name, value in able.items() if not name.startswith("max_")}
    rule = {"name": "start_llm", "pattern": f"^[a-z_]+/{re.escape(prefix)}", "model_info": told}
    known.set_fallback_generalizations([*rules, rule])  # the last one that fits has the last word


class Behind:
    """Handlers, and what they know of the server.

    Attributes:
        prefix: stands before names that have no entry of their own.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        entries = config["model_list"]
        parameters = entries[0]["litellm_params"]
        self._entries = [
            entry
            for entry in entries
            if entry["model_name"] != ANY and entry["litellm_params"].get("api_base") == parameters["api_base"]
        ]
        self._abilities = runpy.run_path(str(ABILITIES))["abilities"]
        self.prefix = next(_behind(entry) for entry in entries if entry["model_name"] == ANY).removesuffix(ANY)
        self._named = names_behind(config)
        # PROXY_MODEL_ID, which the server knows nothing of
        self._made_up = [name for name, behind in self._named.items() if behind == DEFAULT != name]
        self._base = parameters["api_base"].removesuffix("/v1")
        self._headers = {"content-type": "application/json", "x-api-key": parameters["api_key"]}
        self._client = httpx.AsyncClient(timeout=COUNT_SECONDS, trust_env=False)
        self._patience = float(parameters["timeout"])

    async def count(self, request: Request) -> Response:
        """The count of the prompt that the server would make."""
        body = await request.body()
        try:
            given = json.loads(body)
            body = json.dumps(given | {"model": self._named.get(given["model"], given["model"])}).encode()
        except (ValueError, KeyError, TypeError):
            pass  # the server says what is wrong with it
        return _told(await self._ask("POST", request.url.path, body))

    async def sound(self, request: Request) -> Response:
        """The server's own answer to a recording, or to a text that is to be spoken."""
        path = "/v1/" + request.url.path.removeprefix("/v1").strip("/")
        headers = self._headers | {"content-type": request.headers.get("content-type", "")}
        asked = asyncio.create_task(self._ask("POST", path, await request.body(), headers, self._patience))
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():  # nobody wants it any more, and the server is told so by its connection
                return Response(status_code=499)
            return _told(asked.result())
        finally:
            asked.cancel()
            gone.cancel()

    async def models(self, request: Request) -> Response:
        answer = await self._ask("GET", "/v1/models")
        if not isinstance(answer, httpx.Response) or answer.status_code != 200:
            return _told(answer)
        listed = answer.json()
        main = listed["data"][:1]
        listed["data"] = [card | {"id": name} for name in self._made_up for card in main] + listed["data"]
        return Response(json.dumps(listed), media_type="application/json")

    async def info(self, request: Request) -> Response:
        """LiteLLM's list of what its entries can do, for the models that the server has now."""
        answer = await self._ask("GET", "/v1/models")
        if not isinstance(answer, httpx.Response) or answer.status_code != 200:
            return _told(answer)
        cards = {card["id"]: card for card in answer.json()["data"]}
        cards[DEFAULT] = next(iter(cards.values()), {})
        told = []
        for entry in self._entries:
            behind, info = _behind(entry), entry["model_info"]
            if behind in cards or info.get("mode") != "chat":
                told.append(_entry(entry["model_name"], behind, info | self._known(cards.get(behind, {}))))
        new = cards.keys() - {entry["model_name"] for entry in told}
        told += [_entry(name, name, {"id": name} | self._known(cards[name])) for name in sorted(new)]
        wanted = request.query_params.get("litellm_model_id")
        data = [entry for entry in told if wanted in {None, entry["model_info"]["id"]}]
        return Response(json.dumps({"data": data}), media_type="application/json")

    def able(self, *, context: int = 0, **able: bool) -> dict[str, Any]:
        """What LiteLLM is told of a model."""
        return dict(self._abilities(context=context, **able))

    def _known(self, card: dict[str, Any]) -> dict[str, Any]:
        """What the server says of a model, in LiteLLM's words."""
        details = card.get("details", {})
        if "task" in details:
            return {"mode": f"audio_{details['task']}"}
        if "capabilities" not in card or details.get("kind") == "embedding":
            return {}
        able = {name: bool(card["capabilities"].get(name)) for name in ("reasoning", "tools", "vision")}
        return self.able(context=card["context_length"], **able)

    async def model(self, name: str) -> Response:
        return _told(await self._ask("GET", f"/v1/models/{quote(self._named.get(name, name), safe='')}"))

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        seconds: float = COUNT_SECONDS,
    ) -> httpx.Response | httpx.HTTPError:
        given, url = self._headers if headers is None else headers, self._base + path
        try:
            return await self._client.request(method, url, content=body, headers=given, timeout=seconds)
        except httpx.HTTPError as error:
            return error


def _entry(name: str, behind: str, info: dict[str, Any]) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": behind}, "model_info": info}


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _told(answer: httpx.Response | httpx.HTTPError) -> Response:
    if isinstance(answer, httpx.HTTPError):
        message = f"the server behind does not answer: {answer or type(answer).__name__}"
        problem = {"type": "error", "error": {"type": "api_error", "message": message}}
        return Response(json.dumps(problem), 502, media_type="application/json")
    headers = {name: value for name, value in answer.headers.items() if name.startswith("x-") or name == "retry-after"}
    return Response(answer.content, answer.status_code, headers, media_type=answer.headers.get("content-type"))
