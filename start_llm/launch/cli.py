"""The command `launch`, top to bottom."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from start_llm.clients import CLIENTS
from start_llm.clients.agent import AgentClient, Endpoint, LaunchPlan
from start_llm.core.settings import Settings
from start_llm.files.atomic import write_atomic
from start_llm.host.home import command as program
from start_llm.host.home import home
from start_llm.host.ports import address, free_port, get_json
from start_llm.host.processes import wait_until
from start_llm.launch.folder import claimed, mark_of
from start_llm.launch.mine import bring, own_folder, take_away
from start_llm.launch.server import LaunchError, from_root, running_server
from start_llm.models.catalog import expected_model
from start_llm.models.recommended import full_name
from start_llm.proxy.config import master_key

STARTUP_SECONDS = 3600.0  # a first start downloads the model
SMALL_NAME = "claude-haiku-4-5"
"""What Claude Code calls its small model."""
PROXY_SECONDS = 120.0
MIN_ANSWER_TOKENS = 256
MOST_ANSWER_TOKENS = 16_384  # long enough for any file that is written at once; the rest of the context is for history
OWN_HOSTS = "127.0.0.1,localhost"  # never through the user's HTTP proxy
SECRET_BYTES = 24


def main(settings: Settings, options: argparse.Namespace) -> int:
    """Runs a client and returns its exit code; 1 where it cannot be launched, 127 if it is missing.

    Args:
        options: ``client``, ``print``, ``via_proxy``, ``my_config``, and ``arguments``, which are the client's own.
    """
    client = CLIENTS[options.client]
    executable = shutil.which(client.name)
    if executable is None and not options.print:
        needs = f" It needs Node {client.node}." if client.node else ""
        print(f"{client.title} ({client.name}) is not installed. Install it with: {client.install}.{needs}")
        return 127
    try:
        if options.print:
            expected = _expected(settings, options.via_proxy)
            warn_of_room(client, expected)
            if options.my_config:
                print(f"# {own_words(client)}")
            print_plan(client, client.plan(expected, _folder(settings, client)))
            return 0
        started = running_server(
            settings, options.overrides, proxy=options.via_proxy, seconds=STARTUP_SECONDS, say=_say
        )
        with started as server:
            check_joined(settings, options.overrides, server[0])
            wanted = full_name(options.overrides.get("model_path"))
            endpoint = connect(settings, server[0], server[1] if options.via_proxy else None, wanted)
            warn_of_room(client, endpoint)
            with claimed(
                _folder(settings, client),
                lambda folder: mark_of(client.plan(endpoint, folder), folder, _brought(client, options.my_config)),
                lambda folder: _set_up(client, endpoint, folder, options.my_config),
            ) as folder:
                if folder.name != client.name:
                    other = f"another {client.title} runs with another set-up"
                    _say(f"launch: {other}; this one keeps its sessions in {folder}.")
                plan = with_secrets(client.plan(endpoint, folder))
                return run(executable or client.name, plan, options.arguments)
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1


def _brought(client: AgentClient, my_config: bool) -> str:
    """The folder of the user's own that comes along; empty where none does."""
    return str(own_folder(client.own, os.environ)) if my_config and client.own.folder else ""


def _set_up(client: AgentClient, endpoint: Endpoint, folder: Path, my_config: bool) -> None:
    take_away(client.own, folder)
    write_files(client.plan(endpoint, folder))
    if my_config:
        _bring(client, folder)


def own_words(client: AgentClient) -> str:
    """What ``--my-config`` means for an agent."""
    own = client.own
    names = [*own.copied, *(key for fields in own.fields for key in fields.keys)]
    brought = [f"--my-config copies from ~/{own.folder}: {', '.join(names)}."] if names else []
    return " ".join([*brought, *([f"{client.title} reads {own.anyway} anyway."] if own.anyway else [])])


def _bring(client: AgentClient, folder: Path) -> None:
    own = client.own
    names = bring(own, folder, os.environ, lambda line: _say(f"launch: {line}"))
    if names:
        _say(f"launch: with your {', '.join(names)} (copies of {own_folder(own, os.environ)}; yours stay as they are)")
    elif own.folder:
        _say(f"launch: there is nothing of yours in {own_folder(own, os.environ)} to bring along.")
    if own.anyway:
        _say(f"launch: {client.title} reads {own.anyway} anyway.")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_joined(settings: Settings, flags: Mapping[str, str], url: str) -> None:
    """Raises LaunchError if the server that runs is not the one that flags ask for."""
    cards = _cards(settings, url)
    wanted, context = full_name(flags.get("model_path")), flags.get("max_kv_size")
    other = f"Stop it first ({program()} stop), or start another beside it: --port {free_port()}."
    card = _card(cards, wanted)
    if card is None:
        raise LaunchError(f"The server at {url} serves {cards[0]['id']}, not {wanted}. {other}")
    served = card.get("context_length")
    if context is not None and served and int(context) > served:
        _say(f"launch: {card['id']} is served with a context of {served:,} tokens, not {int(context):,}. {other}")


def _cards(settings: Settings, url: str) -> list[dict[str, Any]]:
    """What the server tells of its models, one at least, the main one first. Raises LaunchError."""
    status, body = get_json(f"{url}/v1/models", settings.api_key)
    cards = body.get("data") if isinstance(body, dict) else None
    if status != 200 or not cards:
        raise LaunchError(f"{url}/v1/models answered {status}: {body}")
    return list(cards)


def _card(cards: list[dict[str, Any]], wanted: str | None) -> dict[str, Any] | None:
    """The model that is wanted, or the main one where none is."""
    if wanted is None:
        return cards[0]
    return next((card for card in cards if wanted in {card["id"], card.get("details", {}).get("source")}), None)


def _folder(settings: Settings, client: AgentClient) -> Path:
    return from_root(settings.cache_dir) / "launch" / client.name


def connect(settings: Settings, server_url: str, proxy_port: int | None, model: str | None = None) -> Endpoint:
    """Asks the server which models it serves; `proxy_port` is set to go through the proxy, `model` is the one wanted.

    Raises:
        LaunchError: the server refuses, or the proxy does not answer.
    """
    cards = _cards(settings, server_url)
    card = _card(cards, model) or cards[0]
    context = card.get("context_length") or settings.max_kv_size
    url, key = server_url, settings.api_key or "none"
    if proxy_port is not None:
        url = address(settings.mlx_host, proxy_port)
        if not wait_until(lambda: get_json(f"{url}/health/readiness")[0] == 200, PROXY_SECONDS):
            raise LaunchError(f"The proxy at {url} does not answer. Is the server running with PROXY=on?")
        key = master_key(settings, home() / ".env")[0]
    sees = bool((card.get("capabilities") or {}).get("vision"))
    scale = float((card.get("details") or {}).get("context_scale") or settings.context_scale_for(context))
    small = _small(settings, server_url, [card, cards[0]])
    return replace(_endpoint(settings, url, key, card["id"], context), sees=sees, scale=scale, small=small)


def _small(settings: Settings, server_url: str, large: list[dict[str, Any]]) -> str:
    """`SMALL_NAME` where the server's MODEL_MAP has a model for it that is none of `large`, else nothing."""
    status, small = get_json(f"{server_url}/v1/models/{SMALL_NAME}", settings.api_key)
    if status != 200 or not isinstance(small, dict) or not _served(small)[0]:
        return ""
    return SMALL_NAME if _served(small) not in map(_served, large) else ""


def _served(card: dict[str, Any]) -> tuple[Any, Any]:
    """The model, and the adapter that it is served with."""
    details = card.get("details") or {}
    return details.get("source"), details.get("adapter")


def _endpoint(settings: Settings, url: str, key: str, model: str, context: int) -> Endpoint:
    # Clients ask for as much as they are told an answer may have, and compact when prompt and answer do not fit.
    answer = max(MIN_ANSWER_TOKENS, min(settings.default_max_tokens or MOST_ANSWER_TOKENS, context // 4))
    scale = settings.context_scale_for(context)
    return Endpoint(url=url, key=key, model=model, context=context, answer=answer, scale=scale)


def _expected(settings: Settings, via_proxy: bool) -> Endpoint:
    """The running server's endpoint, or what a server with these settings would be; starts nothing."""
    url = address(settings.mlx_host, settings.mlx_port)
    if settings.mlx_port and get_json(f"{url}/health")[0] == 200:
        return connect(settings, url, settings.proxy_port if via_proxy else None)
    print(f"# No server answers at {url}; this is what one would be. Start it: {program()} start")
    name, own = expected_model(settings.model_path)
    key = settings.api_key or "none"
    if via_proxy:
        url = address(settings.mlx_host, settings.proxy_port)
        if not settings.litellm_master_key:
            raise LaunchError(
                "The proxy has no key yet: start the server once, it makes one; or set LITELLM_MASTER_KEY."
            )
        key = settings.litellm_master_key
    context = min(settings.max_kv_size, own or settings.max_kv_size)
    return _endpoint(settings, url, key, settings.served_model_name or name, context)


def warn_of_room(client: AgentClient, endpoint: Endpoint) -> None:
    """Says so where not even the client's first prompt has room: what the client says then helps nobody."""
    if endpoint.context <= client.first_prompt:
        print(
            f"launch: {client.title}'s first prompt has about {client.first_prompt:,} tokens, but {endpoint.model} is "
            f"served with {endpoint.context:,}. Serve a model with room for more (MODEL_PATH, MAX_KV_SIZE).",
            file=sys.stderr,
        )


def print_plan(client: AgentClient, plan: LaunchPlan) -> None:
    """Shell text that does by hand what `launch` does."""
    print("(umask 077  # keys stand in these files: they are their owner's only")
    for path, text in (plan.files | plan.initial).items():
        kept = shlex.quote(str(path))
        print(f"mkdir -p {shlex.quote(str(path.parent))}")
        print(
            f"[ -e {kept} ] ||" if path in plan.initial else f"rm -f {kept};",
            f"cat > {kept} <<'END'\n{text.rstrip()}\nEND",
        )
    print(")")
    for name in plan.unset:
        print(f"unset {name}")
    for name, value in plan.defaults.items():
        print(f': "${{{name}:={value}}}"; export {name}')
    for name, value in plan.env.items():
        print(f"export {name}={shlex.quote(value)}")
    for name, path in plan.secrets.items():
        kept = shlex.quote(str(path))
        made = f"head -c {SECRET_BYTES} /dev/urandom | od -An -v -tx1 | tr -d ' \\n'"
        print(f"[ -s {kept} ] || (umask 077; {made} > {kept})")
        print(f'export {name}="$(cat {kept})"')
    print(" ".join(["export", *(f'{name}="${{{name}:+${name},}}{OWN_HOSTS}"' for name in ("NO_PROXY", "no_proxy"))]))
    print(shlex.join([client.name, *plan.arguments]))


def write_files(plan: LaunchPlan) -> None:
    """Writes the plan's files (0600, folders 0700), each by an atomic rename."""
    missing = {path: text for path, text in plan.initial.items() if not path.exists()}
    for path, text in (plan.files | missing).items():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, text)


def with_secrets(plan: LaunchPlan) -> LaunchPlan:
    """The plan with its secrets as variables. A secret is made when it is first needed, and kept."""
    made = {}
    for name, path in plan.secrets.items():
        if not path.exists():
            handle, temporary = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(secrets.token_hex(SECRET_BYTES))
            with suppress(FileExistsError):  # made elsewhere by now: that one counts
                os.link(temporary, path)
            os.unlink(temporary)
        made[name] = path.read_text(encoding="utf-8").strip()
    return replace(plan, env=plan.env | made)


def client_environment(inherited: Mapping[str, str], plan: LaunchPlan) -> dict[str, str]:
    """The client's variables: the user's and the plan's, without those that were set up for this Python."""
    environment = {name: value for name, value in inherited.items() if name not in plan.unset}
    own = [part for part in environment.pop("LD_PRELOAD", "").split(":") if part]
    kept = [part for part in own if not part.startswith(sys.prefix)]  # the server's BLAS is none of the client's
    if kept:
        environment["LD_PRELOAD"] = ":".join(kept)
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, [environment.get(name), OWN_HOSTS]))
    return plan.defaults | environment | plan.env


def run(executable: str, plan: LaunchPlan, arguments: Sequence[str]) -> int:
    """Runs the client in the foreground and returns its exit code (128 + n if signal n ended it)."""
    command = [executable, *plan.arguments, *arguments]
    client = subprocess.Popen(command, env=client_environment(os.environ, plan))
    with _signals_for(client):
        code = client.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _signals_for(client: subprocess.Popen[bytes]) -> Iterator[None]:
    """While the client runs, Ctrl-C is the client's alone, and what would end us ends the client."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        client.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
