"""What the server behind answers by itself: token counts, and which models there are.

Runs in LiteLLM's process, with its libraries only; `child.py` loads it by path.
"""

from __future__ import annotations

import importlib
import json
import re
from typing import Any
from urllib.parse import quote

import httpx
from fastapi import Depends, FastAPI, Request, Response

# LiteLLM counts by itself for entries of this kind, with another tokenizer, or not at all.
COUNTED_BEHIND = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")
# LiteLLM lists its entries, which are those of its start.
LISTED_BEHIND = ("/v1/models", "/models")
COUNT_SECONDS = 120.0
DEFAULT = "default"
ABILITIES = (
    "supports_reasoning",
    "supports_adaptive_thinking",
    "supports_legacy_thinking",
    "supports_output_config",
    "supports_response_schema",
    "supports_system_messages",
    "supports_function_calling",
    "supports_tool_choice",
    "supports_parallel_function_calling",
    "supports_vision",
)


def count_behind(app: FastAPI, config: dict[str, Any], key_check: Any) -> None:
    """Has the server answer these requests; and has LiteLLM leave requests to models that it does not know as they are.

    Args:
        app: LiteLLM's application; the routes come before its own.
        config: LiteLLM's configuration.
        key_check: LiteLLM's dependency that refuses a wrong key.
    """
    behind = Behind(config)
    _leave_alone(behind.prefix)
    for path in COUNTED_BEHIND:
        _first(app, path, behind.count, "POST", key_check)
    for path in LISTED_BEHIND:
        _first(app, path, behind.models, "GET", key_check)
        _first(app, path + "/{name:path}", behind.model, "GET", key_check)


def _first(app: FastAPI, path: str, handler: Any, method: str, key_check: Any) -> None:
    app.add_api_route(path, handler, methods=[method], dependencies=[Depends(key_check)])
    app.router.routes.insert(0, app.router.routes.pop())


def _behind(entry: dict[str, Any]) -> str:
    """The name that the server is asked for."""
    return str(entry["litellm_params"]["model"].partition("/")[2])


def _leave_alone(prefix: str) -> None:
    """LiteLLM leaves `thinking` and the like out of messages to models that it knows nothing of, and goes by what
    Anthropic's models can do where a name is like theirs. What a name behind `prefix` can do is the server's to judge.
    """
    known = importlib.import_module("litellm.litellm_core_utils.fallback_generalizations")
    rules = known.get_fallback_generalization_rules()
    able = {"mode": "chat"} | dict.fromkeys(ABILITIES, True)
    rule = {"name": "start_llm", "pattern": f"^[a-z_]+/{re.escape(prefix)}", "model_info": able}
    known.set_fallback_generalizations([*rules, rule])  # the last one that fits has the last word


class Behind:
    """Handlers, and what they know of the server.

    Attributes:
        prefix: stands before names that have no entry of their own.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        entries = config["model_list"]
        parameters = entries[0]["litellm_params"]
        named = {entry["model_name"]: _behind(entry) for entry in entries}
        self.prefix = named["*"].removesuffix("*")
        self._named = {name: behind for name, behind in named.items() if "*" not in name}
        # PROXY_MODEL_ID, which the server knows nothing of
        self._made_up = [name for name, behind in self._named.items() if behind == DEFAULT != name]
        self._base = parameters["api_base"].removesuffix("/v1")
        self._headers = {"content-type": "application/json", "x-api-key": parameters["api_key"]}
        self._client = httpx.AsyncClient(timeout=COUNT_SECONDS, trust_env=False)

    async def count(self, request: Request) -> Response:
        """The count of the prompt that the server would make."""
        body = await request.body()
        try:
            given = json.loads(body)
            body = json.dumps(given | {"model": self._named.get(given["model"], given["model"])}).encode()
        except (ValueError, KeyError, TypeError):
            pass  # the server says what is wrong with it
        return _told(await self._ask("POST", request.url.path, body))

    async def models(self, request: Request) -> Response:
        answer = await self._ask("GET", "/v1/models")
        if not isinstance(answer, httpx.Response) or answer.status_code != 200:
            return _told(answer)
        listed = answer.json()
        main = listed["data"][:1]
        listed["data"] = [card | {"id": name} for name in self._made_up for card in main] + listed["data"]
        return Response(json.dumps(listed), media_type="application/json")

    async def model(self, name: str) -> Response:
        return _told(await self._ask("GET", f"/v1/models/{quote(self._named.get(name, name), safe='')}"))

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> httpx.Response | httpx.HTTPError:
        try:
            return await self._client.request(method, self._base + path, content=body, headers=self._headers)
        except httpx.HTTPError as error:
            return error


def _told(answer: httpx.Response | httpx.HTTPError) -> Response:
    if isinstance(answer, httpx.HTTPError):
        message = f"the server behind does not answer: {answer or type(answer).__name__}"
        problem = {"type": "error", "error": {"type": "api_error", "message": message}}
        return Response(json.dumps(problem), 502, media_type="application/json")
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))
