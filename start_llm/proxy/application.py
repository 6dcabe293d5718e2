"""LiteLLM's application with this project's layers around it. Imported by the proxy's process only: LiteLLM takes
seconds and hundreds of megabytes.

A request passes `access` (who may ask), `bodies` (what may be asked) and `balancer` (who answers). Conversations go on
to LiteLLM, lists of models to routes of `passthrough`, and all else straight to a server.

Used of LiteLLM: its application, its lists of its own parameters, its rules for models that it does not know, and the
transport of its HTTP clients.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import httpx
import litellm
from litellm import router
from litellm.litellm_core_utils import fallback_generalizations
from litellm.llms.custom_httpx.aiohttp_transport import LiteLLMAiohttpTransport
from litellm.proxy import litellm_pre_call_utils, proxy_cli, proxy_server
from litellm.proxy.auth import auth_utils
from litellm.types.router import CredentialLiteLLMParams, GenericLiteLLMParams
from litellm.types.utils import StandardCallbackDynamicParams, all_litellm_params

from start_llm.core.modelmap import PROXIED
from start_llm.proxy.access import ProxyAccess
from start_llm.proxy.balancer import Balancer
from start_llm.proxy.bodies import ALLOWED, LiteLLMNames, RequestBodies
from start_llm.proxy.config import ADDITIONS, CONFIG, abilities, names_behind
from start_llm.proxy.fleet import NodeFleet
from start_llm.proxy.nodes import ServerNode
from start_llm.proxy.outcome import LOGGERS, Hooks, in_one_line
from start_llm.proxy.passthrough import ServerRoutes

_CLIENT_OPTIONS = frozenset({"default_headers", "deployment_id", "extra_headers", "extra_query", "specific_deployment"})
_FALLBACKS = frozenset({"fallbacks", "context_window_fallbacks", "content_policy_fallbacks", "litellm_params"})
_LOOKED_FOR = re.compile(r"""kwargs\.(?:get|pop)\(\s*["'](\w+)["']""")
MOST_ANSWER_BYTES = 64 * 2**20
"""Of a node's answer that is no stream: LiteLLM has all of it in memory."""
MOST_LINE_BYTES = 16 * 2**20
"""Of a stream, between two line breaks: so much of it is in memory."""
_STREAMED = re.compile(rb'"stream": ?true')  # of a request; in a text the quotes are escaped
_CALLS = ("completion", "text_completion", "responses", "embedding")


def run(folder: Path, arguments: list[str]) -> None:
    """Serves until the process ends; `child` calls it. `folder` has the files of `config.write_config`."""
    add_layers(
        proxy_server.app,
        json.loads((folder / CONFIG).read_text(encoding="utf-8")),
        json.loads((folder / ADDITIONS).read_text(encoding="utf-8")),
    )
    proxy_cli.run_server.main(args=arguments, prog_name="litellm")


def add_layers(app: Any, config: dict[str, Any], additions: dict[str, Any]) -> None:
    """The layer that is added last is the outermost. `app` and `config` are LiteLLM's; see `config.additions`."""
    _leave_alone()
    nodes = [ServerNode(**node) for node in additions["nodes"]]
    _bound_answers({httpx.URL(node.url).netloc for node in nodes})
    fleet = NodeFleet(nodes, names_behind(config))
    elsewhere = additions["elsewhere"]
    server = ServerRoutes(config, fleet, elsewhere)
    server.add_to(app)
    litellm.logging_callback_manager.add_litellm_callback(Hooks())
    for name in LOGGERS:
        logging.getLogger(name).addFilter(in_one_line)
    infos = [entry["model_info"] for entry in config["model_list"]]
    holders = {info["id"]: info["node"] for info in infos if "node" in info}
    app.add_middleware(Balancer, fleet=fleet, holders=holders, server=server, elsewhere=elsewhere)
    app.add_middleware(RequestBodies, litellm_names=litellm_names(), names=names_behind(config), **additions["bodies"])
    app.add_middleware(ProxyAccess, **additions["access"])


def _leave_alone() -> None:
    """LiteLLM leaves `thinking` and the like out of messages to models that it knows nothing of, and goes by what
    Anthropic's models can do where a name is like theirs. What a name behind `PROXIED` can do is the server's to judge.
    """
    able = abilities(context=0, reasoning=True, tools=True, vision=True)
    info = {name: value for name, value in able.items() if not name.startswith("max_")}
    rule = {"name": "start_llm", "pattern": f"^[a-z_]+/{re.escape(PROXIED)}", "model_info": info}
    rules = fallback_generalizations.get_fallback_generalization_rules()
    fallback_generalizations.set_fallback_generalizations([*rules, rule])  # the last one that fits has the last word


def _bound_answers(places: Collection[bytes]) -> None:
    """A node whose answer leads elsewhere, is packed, or has no end, has failed. `places`: host and port of each node.

    LiteLLM would send the conversation to any address that the answer names, also one that only this machine reaches,
    unpack what it gets and keep it. (It would send the request to the same node again after a RemoteProtocolError.)
    """
    transport: Callable[[Any, httpx.Request], Awaitable[httpx.Response]] = LiteLLMAiohttpTransport.handle_async_request

    async def bounded(self: Any, request: httpx.Request) -> httpx.Response:
        if request.url.netloc not in places:
            return await transport(self, request)
        request.headers["accept-encoding"] = "identity"
        answer = await transport(self, request)
        if answer.has_redirect_location or "content-encoding" in answer.headers:
            await answer.aclose()
            raise httpx.ReadError("The node's answer leads elsewhere, or is packed.", request=request)
        is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        answer.stream = _Bounded(answer.stream, by_lines=is_stream and bool(_STREAMED.search(request.content)))
        return answer

    LiteLLMAiohttpTransport.handle_async_request = bounded


class _Bounded(httpx.AsyncByteStream):
    """`stream`, which ends with an error if it is too long, or one of its lines (`by_lines`)."""

    def __init__(self, stream: Any, *, by_lines: bool) -> None:
        self._stream, self._by_lines = stream, by_lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read, most = 0, MOST_LINE_BYTES if self._by_lines else MOST_ANSWER_BYTES
        async for piece in self._stream:
            end = piece.rfind(b"\n") + 1 if self._by_lines else 0
            read = len(piece) - end if end else read + len(piece)
            if read > most:
                raise httpx.ReadError(f"The node's answer has more than {most} bytes{' in a line' * self._by_lines}.")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def litellm_names() -> LiteLLMNames:
    """The names that LiteLLM declares for itself, of every kind."""
    calls = {name for call in _CALLS for name in inspect.signature(getattr(litellm, call)).parameters}
    banned = frozenset(auth_utils._BANNED_REQUEST_BODY_PARAMS)
    parameters = banned.union(
        all_litellm_params,
        GenericLiteLLMParams.model_fields,
        litellm_pre_call_utils._UNTRUSTED_ROOT_CONTROL_FIELDS,
        _CLIENT_OPTIONS,
        _FALLBACKS,
    )
    nested = banned.union(
        CredentialLiteLLMParams.model_fields,
        StandardCallbackDynamicParams.__annotations__,
        litellm_pre_call_utils._UNTRUSTED_METADATA_CONTROL_FIELDS,
        _FALLBACKS,
    )
    functions = [function for _, function in inspect.getmembers(litellm.Router, inspect.isfunction)]
    arguments = {name for function in functions for name in inspect.signature(function).parameters}
    arguments |= set(_LOOKED_FOR.findall(inspect.getsource(router)))  # in the keywords of a request
    return LiteLLMNames(parameters, nested, frozenset(arguments - calls - ALLOWED))
