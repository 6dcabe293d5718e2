"""Token counts through the proxy. Runs in LiteLLM's process, with its libraries only; `child.py` loads it by path."""

from __future__ import annotations

import fnmatch
import json
from typing import Any

import httpx
from fastapi import Depends, FastAPI, Request, Response

# LiteLLM counts by itself for entries of this kind, with another tokenizer, or not at all.
COUNTED_BEHIND = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")
COUNT_SECONDS = 120.0


def count_behind(app: FastAPI, config: dict[str, Any], key_check: Any) -> None:
    """Has requests that count tokens answered by the server, whose count is that of the prompt it would make.

    Args:
        app: LiteLLM's application; the routes come before its own.
        config: LiteLLM's configuration. All entries lead to one server.
        key_check: LiteLLM's dependency that refuses a wrong key.
    """
    entries = config["model_list"]
    parameters = entries[0]["litellm_params"]
    names = [entry["model_name"] for entry in entries]
    served = parameters["model"].partition("/")[2]
    base = parameters["api_base"].removesuffix("/v1")
    client = httpx.AsyncClient(timeout=COUNT_SECONDS, trust_env=False)

    async def count(request: Request) -> Response:
        body = await request.body()
        try:
            given = json.loads(body)
            if any(fnmatch.fnmatchcase(str(given["model"]), name) for name in names):
                body = json.dumps(given | {"model": served}).encode()
        except (ValueError, KeyError, TypeError):
            pass  # the server says what is wrong with it
        headers = {"content-type": "application/json", "x-api-key": parameters["api_key"]}
        try:
            answer = await client.post(base + request.url.path, content=body, headers=headers)
        except httpx.HTTPError as error:
            message = f"the server behind does not answer: {error or type(error).__name__}"
            problem = {"type": "error", "error": {"type": "api_error", "message": message}}
            return Response(json.dumps(problem), 502, media_type="application/json")
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    for path in COUNTED_BEHIND:
        app.add_api_route(path, count, methods=["POST"], dependencies=[Depends(key_check)])
        app.router.routes.insert(0, app.router.routes.pop())
