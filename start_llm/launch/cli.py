"""The command `launch`, top to bottom."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from start_llm.clients import CLIENTS
from start_llm.clients.agent import AgentClient, Endpoint, LaunchPlan
from start_llm.core.paths import expanded
from start_llm.core.settings import Settings
from start_llm.dashboard.audit import AUDIT_FILE, Wanted, entries
from start_llm.files.atomic import write_atomic
from start_llm.files.database import FileUnavailable
from start_llm.host.home import command as program
from start_llm.host.home import home
from start_llm.launch.folder import claimed, set_up_of
from start_llm.launch.mine import bring, config_folder, take_away
from start_llm.launch.server import expected_endpoint, running_server, say

OWN_HOSTS = "127.0.0.1,localhost"  # never through the user's HTTP proxy
SECRET_BYTES = 24
WEEK_SECONDS = 7 * 86_400.0
MOST_REQUESTS = 200  # the newest ones
MANY = 500  # computed tokens that a request needs to tell a speed


def main(settings: Settings, options: argparse.Namespace) -> int:
    """Runs a client and returns its exit code; 127 if it is missing. Raises ServiceError."""
    client = CLIENTS[options.client]
    executable = shutil.which(client.name)
    if executable is None and not options.print:
        needs = f" It needs Node {client.node}." if client.node else ""
        print(f"{client.title} ({client.name}) is not installed. Install it with: {client.install}.{needs}")
        return 127
    # The server runs in `home`, the agent in the user's repository.
    first = home() / expanded(settings.cache_dir) / "launch" / client.name
    if options.print:
        expected = expected_endpoint(settings, options.via_proxy)
        warn_of_context(client, expected)
        if options.my_config:
            print(f"# {user_config_help(client)}")
        print_plan(client, client.plan(expected, first))
        return 0
    config = client.user_config
    brought = str(config_folder(config, os.environ)) if options.my_config and config.folder else ""
    with running_server(settings, options.overrides, via_proxy=options.via_proxy) as endpoint:
        warn_of_context(client, endpoint)
        warn_of_time(client, endpoint, home() / expanded(settings.cache_dir) / AUDIT_FILE)
        with claimed(
            first,
            lambda folder: set_up_of(client.plan(endpoint, folder), folder, brought),
            lambda folder: _set_up(client, endpoint, folder, options.my_config),
        ) as folder:
            if folder != first:
                other = f"another {client.title} runs with another set-up"
                say(f"launch: {other}; this one keeps its sessions in {folder}.")
            return run(executable or client.name, client.plan(endpoint, folder), options.arguments)


def _set_up(client: AgentClient, endpoint: Endpoint, folder: Path, my_config: bool) -> None:
    """Writes the private `folder` anew. What the user's own set-up has there is what this launch brings along."""
    config = client.user_config
    take_away(config, folder)
    write_files(client.plan(endpoint, folder))
    if not my_config:
        return
    names = bring(config, folder, os.environ, lambda line: say(f"launch: {line}"))
    if names:
        source = config_folder(config, os.environ)
        say(f"launch: with your {', '.join(names)} (copies of {source}; yours stay as they are)")
    elif config.folder:
        say(f"launch: there is nothing of yours in {config_folder(config, os.environ)} to bring along.")
    if config.always_read:
        say(f"launch: {client.title} reads {config.always_read} anyway.")


def user_config_help(client: AgentClient) -> str:
    """What ``--my-config`` means for an agent."""
    config = client.user_config
    names = [*config.copied, *(key for keys in config.fields.values() for key in keys)]
    brought = [f"--my-config copies from ~/{config.folder}: {', '.join(names)}."] if names else []
    return " ".join([*brought, *([f"{client.title} reads {config.always_read} anyway."] if config.always_read else [])])


def warn_of_context(client: AgentClient, endpoint: Endpoint) -> None:
    """Says so where not even the client's first prompt fits: what the client says then helps nobody."""
    if endpoint.context <= client.first_prompt:
        say(
            f"launch: {client.title}'s first prompt has about {client.first_prompt:,} tokens, but {endpoint.model} is "
            f"served with {endpoint.context:,}. Start a model with room for more (`{program()} recommend`), or raise "
            "MAX_KV_SIZE if that is what limits it."
        )


def warn_of_time(client: AgentClient, endpoint: Endpoint, audit: Path) -> None:
    """Says what the first prompt will cost, where requests of the last week have shown how quick this machine is."""
    wanted = Wanted(since=time.time() - WEEK_SECONDS, model=endpoint.model, outcome="answered")
    try:
        asked = entries(audit, wanted, MOST_REQUESTS)
    except FileUnavailable:
        return
    rates = [each.computed / each.seconds_first for each in asked if each.computed >= MANY and each.seconds_first]
    if rates and client.first_prompt:
        seconds = client.first_prompt / statistics.median(rates)
        took = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
        say(
            f"launch: the first prompt has about {client.first_prompt:,} tokens, {took} on this machine; the next "
            "turns cost only what is new in them."
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
    """Writes the plan's files (0600, folders 0700), each by an atomic rename. A secret is made once, and kept."""
    secret = {path: secrets.token_hex(SECRET_BYTES) for path in plan.secrets.values()}
    missing = {path: text for path, text in (plan.initial | secret).items() if not path.exists()}
    for path, text in (plan.files | missing).items():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, text)


def client_environment(inherited: Mapping[str, str], plan: LaunchPlan) -> dict[str, str]:
    """The client's variables: the user's, the plan's and its secrets, without those set up for this Python."""
    environment = {name: value for name, value in inherited.items() if name not in plan.unset}
    own = [part for part in environment.pop("LD_PRELOAD", "").split(":") if part]
    kept = [part for part in own if not part.startswith(sys.prefix)]  # the server's BLAS is none of the client's
    if kept:
        environment["LD_PRELOAD"] = ":".join(kept)
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, [environment.get(name), OWN_HOSTS]))
    secret = {name: path.read_text("utf-8").strip() for name, path in plan.secrets.items()}
    return plan.defaults | environment | plan.env | secret


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
