"""What LiteLLM is told: its configuration, its environment and its master key; and what is said of NODES.

Every dialect takes the shortest way through LiteLLM (1.106): a `hosted_vllm/` entry passes chat completions on as chat
completions and Responses as Responses, and an entry that declares ``/v1/messages`` among its `supported_endpoints` gets
Anthropic messages untranslated. (`openai/` entries refuse `thinking` and `reasoning` for models that LiteLLM does not
know; `anthropic/` entries turn everything into messages.)

Which model a name means is the server's to say: every name that has no entry of its own goes there as it came, behind
`modelmap.PROXIED`. So a model that is put on the disk later is served, MODEL_MAP is read in one place, and a name that
means nothing gets the server's own sentence.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from dotenv import dotenv_values, set_key

from start_llm.core.limits import MOST_BODY_BYTES
from start_llm.core.modelmap import MAIN_NAME, PROXIED
from start_llm.core.protocol import HEAD_HEADER, WHEN_PLANNED
from start_llm.core.service import ModelCard
from start_llm.core.settings import Settings
from start_llm.files.atomic import write_atomic
from start_llm.proxy.nodes import nodes_of

log = logging.getLogger(__name__)

CONFIG = "config.yaml"
ADDITIONS = "additions.json"
KEY_NAME = "LITELLM_MASTER_KEY"
ANY_NAME = "*"
# LiteLLM gives up on a request after this long; a long cold prefill must fit.
REQUEST_SECONDS = 6 * 3600
PING_SHARE = 0.8  # of what was promised: its timers are late rather than early
# A database, a cache or an account that the user's shell happens to name is none of this proxy's business.
_NOT_INHERITED = ("DATABASE_URL", "REDIS_URL", "REDIS_HOST", "LITELLM_SALT_KEY", "CONFIG_FILE_PATH", "NUM_WORKERS")


def served_name(settings: Settings, model_id: str) -> str:
    """The name that the server is asked for; it knows `model_id`, but not what PROXY_MODEL_ID makes up."""
    return MAIN_NAME if model_id == settings.proxy_model_id else model_id.removeprefix("openai/")


def proxy_model_names(settings: Settings, model_id: str) -> list[str]:
    """Names that are known to mean the main model, the served name first; no duplicates."""
    name = served_name(settings, model_id)
    served = [] if name == MAIN_NAME else [name]
    named = settings.proxy_model_id or f"openai/{settings.model_path or name}"
    return list(dict.fromkeys([*served, model_id, named, MAIN_NAME]))


_LIMITS = ("max_tokens", "max_input_tokens", "max_output_tokens")
_THINKING = ("supports_reasoning", "supports_adaptive_thinking", "supports_legacy_thinking")
_CALLS = ("supports_function_calling", "supports_tool_choice", "supports_parallel_function_calling")
_ALWAYS = ("supports_output_config", "supports_response_schema", "supports_system_messages")
_NEVER = ("supports_pdf_input", "supports_audio_input")


def abilities(*, context: int, reasoning: bool, tools: bool, vision: bool) -> dict[str, Any]:
    """What LiteLLM is told of a model; without that it leaves `thinking` and `output_config` out of messages.
    `context`: most tokens of a request, answer included."""
    info: dict[str, Any] = {"mode": "chat", "supports_vision": vision}
    for names, value in ((_LIMITS, context), (_THINKING, reasoning), (_CALLS, tools), (_ALWAYS, True), (_NEVER, False)):
        info |= dict.fromkeys(names, value)
    return info


def name_behind(entry: Mapping[str, Any]) -> str:
    """The name that the server is asked for by an entry of LiteLLM's configuration."""
    return str(entry["litellm_params"]["model"].partition("/")[2])


def names_behind(config: Mapping[str, Any]) -> dict[str, str]:
    """The server's names of models, by LiteLLM's."""
    ours = [entry for entry in config["model_list"] if entry["litellm_params"]["model"].startswith("hosted_vllm/")]
    return {entry["model_name"]: name_behind(entry) for entry in ours if entry["model_name"] != ANY_NAME}


def proxy_config(
    settings: Settings, *, server_url: str, model_id: str, master_key: str, card: ModelCard
) -> dict[str, Any]:
    """LiteLLM's configuration as plain JSON types (JSON is YAML); the launcher makes it before each start. `model_id`:
    the served name, bare or as ``openai/NAME``, or PROXY_MODEL_ID."""
    ping_seconds = settings.sse_ping_seconds * PING_SHARE
    parameters: dict[str, Any] = {
        "timeout": REQUEST_SECONDS,
        "stream_timeout": REQUEST_SECONDS,
        # It drops the comments that the server sends while it prefills, so it has to show life itself.
        "keepalive_seconds": ping_seconds,
    }
    info = abilities(context=card.context, reasoning=card.reasoning, tools=card.tools, vision=card.vision)
    info["supported_endpoints"] = ["/v1/messages"]
    nodes = nodes_of(settings, server_url)
    if len(nodes) > 1:  # what a server cannot answer it refuses by a status
        parameters["extra_headers"] = {HEAD_HEADER: WHEN_PLANNED}
    behind = dict.fromkeys(proxy_model_names(settings, model_id), served_name(settings, model_id))
    entries: list[dict[str, Any]] = [
        {
            "model_name": name,
            # Without a key LiteLLM would look for one in the environment and send that.
            "litellm_params": parameters
            | {"api_base": f"{node.url}/v1", "api_key": node.key or "none", "model": f"hosted_vllm/{asked}"},
            "model_info": {**info, "id": f"start_llm:{name}@{node.id}", "node": node.name},
        }
        for node in nodes
        for name, asked in (behind | {ANY_NAME: f"{PROXIED}*"}).items()
    ]
    # LiteLLM looks abilities of a messages request up under the bare name of the model behind, where it files an
    # entry under its id: so one entry, and only one, carries that name as its id.
    entries[0]["model_info"]["id"] = served_name(settings, model_id)
    return {
        "model_list": entries,
        "litellm_settings": {
            "telemetry": False,
            "request_timeout": REQUEST_SECONDS,
            "num_retries": 0,
            "sse_keepalive_ping_interval_seconds": ping_seconds,
            "anthropic_sse_ping_interval_seconds": ping_seconds,  # of `/v1/messages`; 15 s if nobody says so
        },
        # A retry would compute twice, a cool-down would refuse what could be answered: `balancer` does that for nodes.
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
        "general_settings": {"master_key": master_key, "disable_spend_logs": True},
    }


def proxy_environment(inherited: Mapping[str, str], nodes: Sequence[str] = ()) -> dict[str, str]:
    """The child's environment: nothing is fetched, reported or taken from a `.env` of the current folder. `nodes`:
    addresses. HTTP_PROXY is not for them: it would see their keys and all conversations."""
    environment = {name: value for name, value in inherited.items() if name not in _NOT_INHERITED}
    hosts = ["127.0.0.1", "localhost", "::1", *(urlsplit(node).hostname or "" for node in nodes)]
    for name in ("no_proxy", "NO_PROXY"):
        listed = [host for host in inherited.get(name, "").split(",") if host]
        environment[name] = ",".join(dict.fromkeys(listed + hosts))
    for name in ("MODEL_COST_MAP", "ANTHROPIC_BETA_HEADERS", "AUTOROUTER_PRESETS", "BLOG_POSTS", "POLICY_TEMPLATES"):
        environment[f"LITELLM_LOCAL_{name}"] = "True"
    environment |= {
        "LITELLM_TELEMETRY": "False",
        "LITELLM_DONT_SHOW_FEEDBACK_BOX": "true",
        "LITELLM_MODE": "PRODUCTION",
        "PYTHONUNBUFFERED": "1",
    }
    return environment


def additions(settings: Settings, server_url: str, master_key: str) -> dict[str, Any]:
    """The arguments of the layers around LiteLLM; `add_layers` takes them. The launcher adds ``elsewhere``."""
    access = {"key": master_key, "names": sorted(settings.host_names)}
    nodes = [asdict(node) for node in nodes_of(settings, server_url)]
    return {"access": access, "bodies": {"most_bytes": MOST_BODY_BYTES}, "nodes": nodes}


def write_config(folder: Path, config: Mapping[str, Any], additions: Mapping[str, Any]) -> None:
    """Writes both for `application.run`, readable by this user only. Raises OSError."""
    write_atomic(folder / CONFIG, json.dumps(config, indent=1))
    write_atomic(folder / ADDITIONS, json.dumps(additions, indent=1))


def master_key(settings: Settings, env_file: Path) -> str:
    """The proxy's key, for the launcher and for agents that are launched. One that is made is kept in `env_file` (0600
    afterwards): one line is added or replaced. Where it cannot be kept, it is good for this run."""
    if settings.litellm_master_key:
        return settings.litellm_master_key
    key = f"sk-{secrets.token_urlsafe(24)}"
    try:
        stored = dotenv_values(env_file, interpolate=False).get(KEY_NAME) or ""
        if stored.lower() not in {"", "off", "none"}:
            return stored
        with TemporaryDirectory() as folder:  # a power failure leaves the old file or the new one
            copy = Path(folder) / ".env"
            copy.write_bytes(env_file.read_bytes() if env_file.exists() else b"")
            set_key(copy, KEY_NAME, key, quote_mode="never")
            write_atomic(env_file.resolve(), copy.read_bytes(), sync=True)  # a link stays a link
    except (OSError, UnicodeDecodeError) as error:
        log.warning("the proxy's key is good for this run only, set %s: %s", KEY_NAME, error)
    return key


def usable(settings: Settings, say: Callable[[str], None]) -> Settings:
    """Says what NODES is going to do. Returns the settings, without it where it cannot work."""
    if not settings.nodes:
        return settings
    if settings.proxy == "off":
        say("nodes     off: NODES works through the proxy only, and PROXY=off.")
        return settings.model_copy(update={"nodes": ""})
    here = " and this server" if settings.nodes_self == "on" else ""
    say(f"nodes     ON: the proxy shares requests between {', '.join(settings.node_addresses)}{here}")
    return settings
