"""Every command: its words, its flags, its examples. Standard library only, so that help and refusals come at once."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from start_llm.clients import CLIENTS
from start_llm.core.paths import expanded

Flag = tuple[tuple[str, ...], dict[str, Any]]
SETTING_FLAGS = (
    "model_path",
    "mlx_host",
    "mlx_port",
    "proxy_port",
    "proxy",
    "max_kv_size",
    "hosts",
    "log_level",
    "log_json",
)
"""Names of options that are settings: they win over the environment and `.env`."""
BY = ("client", "model", "session", "day", "outcome", "miss")
ENDS = ("answered", "cut", "refused", "gone", "failed")


@dataclass(frozen=True)
class Command:
    """One word after the program's name."""

    name: str
    what: str  # one line for the list of commands
    place: str  # ``module:function`` that runs it, as ``function(settings, options)``; imported only then
    flags: tuple[Flag, ...]  # its flags and arguments
    examples: tuple[tuple[str, str], ...] = ()  # what follows the program's name, and what it does
    joins: bool = False  # is for a server that runs: the one that there is, where no port is named
    in_home: bool = False  # runs in the folder of `.env` and logs, not in the caller's
    more: str = ""  # what help says besides
    tail: bool = False  # takes words behind ``--`` that are not ours (``options.arguments``)
    # what is said on standard error at once, before what takes its time; empty: nothing
    begins: Callable[[argparse.Namespace], str] = lambda options: ""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        for names, how in self.flags:
            parser.add_argument(*names, **how)


def model_word(name: str) -> str:
    """A folder is meant from where the caller stands."""
    folder = expanded(name)
    return str(folder.resolve()) if folder.exists() else name


def context_word(text: str) -> str:
    """``32k`` are 32,768 tokens, as others write it."""
    number, unit = text[:-1], text[-1:].lower()
    return str(int(number) * 1024) if unit == "k" and number.isdigit() else text


def flag(*names: str, **how: Any) -> Flag:
    """As for `argparse.ArgumentParser.add_argument`."""
    return names, how


def launch_begins(options: argparse.Namespace) -> str:
    return "" if options.print else f"launch: {CLIENTS[options.client].title}; looking for the server ..."


def chat_begins(options: argparse.Namespace) -> str:
    return "chat: looking for the server ..." if sys.stderr.isatty() else ""  # in a script only what matters


MODEL_WORDS = ("show", "load", "unload", "pin", "set")
MODEL = flag(
    "--model", dest="model_path", type=model_word, metavar="MODEL", help="repository, folder or short name (MODEL_PATH)"
)
PORT = flag("--port", dest="mlx_port", metavar="PORT", help="port of the server (MLX_PORT)")
CONTEXT = flag(
    "--context",
    dest="max_kv_size",
    type=context_word,
    metavar="TOKENS",
    help="most tokens of one request's context, 32768 or 32k (MAX_KV_SIZE)",
)
JSON = flag("--json", action="store_true", help="for programs")
NAME = flag("name", metavar="NAME", help="owner/name on Hugging Face, or a short name of recommend")
JOIN = (MODEL, PORT, CONTEXT)
"""Flags of what joins a server, and may start one."""
SERVER = (
    flag("model", nargs="?", type=model_word, metavar="MODEL", help="as --model"),
    MODEL,
    flag("--host", dest="mlx_host", metavar="HOST", help="address of the server (MLX_HOST)"),
    PORT,
    CONTEXT,
    flag("--hosts", metavar="A,B", help="machines that compute one model together, this one first (HOSTS)"),
    flag("--proxy-port", metavar="PORT", help="port of the proxy, 0 for a free one (PROXY_PORT)"),
    flag("--no-proxy", dest="proxy", action="store_const", const="off", help="no proxy (PROXY=off)"),
    flag("--log-level", metavar="LEVEL", help="debug, info, warning or error (LOG_LEVEL)"),
    flag("--log-json", action="store_const", const="true", help="JSON lines in place of live lines (LOG_JSON)"),
)
"""Flags of everything that starts a server."""


GROUPS: dict[str, tuple[Command, ...]] = {
    "Server": (
        Command(
            "serve",
            "run the server and the LiteLLM proxy in front of it, here in the terminal",
            "start_llm.cli.serve:main",
            (
                *SERVER,
                flag(
                    "--supervised",
                    action="store_true",
                    help="events as JSON lines on stdout, commands on stdin: for a program",
                ),
            ),
            (
                ("serve", "the model of MODEL_PATH, or a small embedded one"),
                ("serve mlx-community/Qwen3.6-27B-4bit --port 8081", "another model and port"),
                ("serve ./my-model --no-proxy", "a folder of your own"),
            ),
            in_home=True,
            more="Every setting is a variable, too: see .env.example.",
        ),
        Command(
            "start",
            "start the server in the background; it is started again if it dies",
            "start_llm.service.commands:main_start",
            SERVER,
            (
                ("start", "returns when it answers"),
                ("start mlx-community/Qwen3.6-27B-4bit --port 8081", "a second one beside it"),
            ),
        ),
        Command(
            "stop",
            "end the server on a port, and all that belongs to it",
            "start_llm.service.commands:main_stop",
            (PORT, flag("--all", action="store_true", help="every server of this user")),
            (("stop", "the one on MLX_PORT"), ("stop --all", "every server of yours")),
            joins=True,
        ),
        Command(
            "restart",
            "stop and start, with the flags of the last start",
            "start_llm.service.commands:main_restart",
            SERVER,
            (("restart", ""), ("restart --context 65536", "the rest as before")),
            joins=True,
        ),
        Command(
            "status",
            "what the server on a port does, how it was restarted and why",
            "start_llm.service.commands:main_status",
            (PORT, JSON),
            (("status", "exit code 0: it answers, 1: not yet, 3: it does not run"), ("status --json", "")),
            joins=True,
        ),
        Command(
            "ps",
            "all servers of yours: requests, models, memory, KV",
            "start_llm.service.commands:main_ps",
            (JSON,),
            (("ps", ""),),
        ),
        Command(
            "nodes",
            "the servers that the proxy shares requests with (NODES): state, models, load, stored tokens",
            "start_llm.cli.nodes:main",
            (PORT, JSON),
            (("nodes", "exit code 0: all of them answer"), ("nodes --json", "")),
            joins=True,
        ),
        Command(
            "logs",
            "the last lines of the server's log",
            "start_llm.service.commands:main_logs",
            (
                PORT,
                flag("-f", "--follow", action="store_true", help="go on with what comes, until Ctrl-C"),
                flag("-n", "--lines", type=int, default=50, metavar="N", help="so many of the last lines (50)"),
                flag("--proxy", action="store_true", dest="proxy_log", help="the proxy's log"),
            ),
            (("logs -f", "goes on with what comes"), ("logs --proxy", "those of the LiteLLM proxy")),
            joins=True,
        ),
        Command(
            "audit",
            "what was asked: when, by which agent, what was reused, what it took, how it ended",
            "start_llm.cli.audit:main",
            (
                flag(
                    "--since",
                    default="1d",
                    metavar="AGE",
                    help="no older than that: 30m, 12h, 7d (1d); all for everything",
                ),
                flag("--by", choices=BY, metavar="WHAT", help=f"added up by {', '.join(BY)}"),
                flag("--client", metavar="NAME", help="of one agent"),
                flag("--model", metavar="NAME", dest="of_model", help="of one model"),
                flag("--outcome", choices=ENDS, metavar="HOW", help=", ".join(ENDS)),
                flag("-n", "--lines", type=int, default=20, metavar="N", help="so many of the last ones (20)"),
                JSON,
            ),
            (
                ("audit", "the last 20 requests of the last day"),
                ("audit --by client --since 7d", "added up"),
                ("audit --outcome failed --json", "for programs"),
            ),
            more="The table holds no text of any conversation; AUDIT_DAYS says how long it keeps a row.",
        ),
        Command(
            "service",
            "have the system start the server when you log in (systemd, launchd)",
            "start_llm.service.units:main",
            (
                flag("what", choices=["install", "uninstall"], metavar="install|uninstall", help="which of both"),
                flag("--yes", action="store_true", help="write it without asking"),
                flag("--from-env", action="store_true", help="write the settings of this shell into it, too"),
                *JOIN,
            ),
            (
                ("service install", "shows the unit and asks"),
                ("service uninstall", ""),
            ),
        ),
    ),
    "": (
        Command("begin", "what the program says without a command", "start_llm.service.commands:main_begin", ()),
        Command(
            "supervise",
            "what start runs in the background",
            "start_llm.service.supervisor:main",
            (flag("--flags", type=json.loads, default={}, help="settings that were given as flags, as JSON"),),
        ),
        Command(
            "rank",
            "what serve --hosts starts on each host but the first",
            "start_llm.modelpool.follower:main",
            (
                flag("--rank", type=int, metavar="N", help="which one this is"),
                flag("--leader", metavar="ADDRESS:PORT", help="where rank 0 writes its log"),
                flag("--address", metavar="ADDRESS", help="of this host, for the other ranks"),
            ),
        ),
        Command(
            "describe",
            "what doctor asks each host but the first",
            "start_llm.cli.hosts:main_describe",
            (flag("--source", metavar="MODEL", help="repository or folder"),),
        ),
    ),
    "Agents": (
        Command(
            "launch",
            "run a coding agent connected to the server; starts one if none runs",
            "start_llm.launch.cli:main",
            (
                flag("client", choices=list(CLIENTS), metavar="AGENT", help=", ".join(CLIENTS)),
                flag("--print", action="store_true", help="show what would be set, as shell text; run nothing"),
                flag("--via-proxy", action="store_true", help="connect through the LiteLLM proxy"),
                flag(
                    "--my-config",
                    action="store_true",
                    help="with copies of your own skills, MCP servers, theme for that agent",
                ),
                *JOIN,
            ),
            (
                ("launch pi", "PI in this folder"),
                ("launch claude -- --continue", "words behind -- are the agent's own"),
                ("launch claude --my-config", "with your own skills, MCP servers, theme"),
                ("launch codex --print", "what would be set, to do it by hand"),
            ),
            tail=True,
            begins=launch_begins,
            joins=True,
        ),
        Command(
            "chat",
            "talk to the model here in the terminal, or ask it one thing from a pipe",
            "start_llm.launch.chat:main",
            (
                flag("words", nargs="*", metavar="TEXT", help="what to ask; standard input is added to it"),
                flag("--image", action="append", metavar="FILE", help="an image that it shows; may be repeated"),
                JSON,
                *JOIN,
            ),
            (
                ("chat", "a conversation; /help lists its commands, Ctrl-D ends it"),
                ("chat What is RoPE?", "one answer"),
                ("chat --image a.png What is this?", "with a picture"),
                ("chat --json Say hello.", "the answer with its usage; 0: answered, 1: not, 2: nothing asked"),
            ),
            begins=chat_begins,
            joins=True,
        ),
    ),
    "Models": (
        Command(
            "models",
            "what is on this disk, and which of it a running server has loaded; load, unload, pin",
            "start_llm.cli.models:main_models",
            (
                flag(
                    "what",
                    nargs="?",
                    choices=MODEL_WORDS,
                    metavar="WHAT",
                    help="show, load, unload, pin or set one",
                ),
                flag(
                    "name",
                    nargs="?",
                    metavar="NAME",
                    help="repository, folder or short name; show: MODEL_PATH if unset",
                ),
                flag("values", nargs="*", metavar="KEY=VALUE", help="set: context=32k, ttl=600; KEY= takes one out"),
                flag("--off", action="store_true", help="pin: the model may go again when its memory is needed"),
                flag("--all", action="store_true", help="show: every fact, and who says so"),
                PORT,
                JSON,
            ),
            (
                ("models", "sizes, context, what each can do; state and KV where a server runs"),
                ("models show qwen3.6-27b", "context, tools, reasoning; --all: every fact, and who says so"),
                ("models load qwen3.5-9b", "into the running server's memory, beside what is there"),
                ("models unload qwen3.5-9b", "its KV goes to disk, its memory is free"),
                ("models pin qwen3.5-9b", "it stays; --off: it may go again"),
                (
                    "models set qwen3.5-9b context=32k ttl=600",
                    "in its own file, for when it is loaded next",
                ),
            ),
            joins=True,
        ),
        Command(
            "search",
            "look for models on Hugging Face: size, context, what fits this machine",
            "start_llm.cli.fetched:main_search",
            (flag("words", nargs="+", metavar="WORDS", help="part of a model's name"), JSON),
            (("search qwen coder", "those that are fetched most first"),),
        ),
        Command(
            "pull",
            "fetch a model; one that was broken off goes on where it was",
            "start_llm.cli.fetched:main_pull",
            (NAME, flag("--revision", help="branch, tag or commit; main by default")),
            (("pull qwen3.6-27b", ""), ("pull mlx-community/Qwen3.5-9B-4bit --revision main", "")),
        ),
        Command(
            "rm", "remove a model that was fetched", "start_llm.cli.fetched:main_rm", (NAME,), (("rm qwen3.6-27b", ""),)
        ),
        Command(
            "recommend",
            "models for this machine, with the KV of a long conversation",
            "start_llm.cli.models:main_recommend",
            (flag("--memory", type=int, metavar="GIB", help="for a machine with so much memory"),),
            (("recommend", ""), ("recommend --memory 64", "for another machine")),
        ),
    ),
    "Look around": (
        Command(
            "demo",
            "run a short agent conversation with a server of its own, print what each turn cost",
            "start_llm.cli.demo:main",
            SERVER,
            (("demo", "with the embedded model"),),
            in_home=True,
            begins=lambda options: "demo: starting a server on a free port ...",
        ),
        Command(
            "bench",
            "how quick this machine is with a model: prefill, decode, an agent's turns; some two minutes",
            "start_llm.cli.bench:main",
            (
                flag("model", nargs="?", type=model_word, metavar="MODEL", help="as --model"),
                MODEL,
                CONTEXT,
                flag("--against", choices=["mlx_lm.server"], metavar="SERVER", help="beside mlx_lm.server"),
            ),
            (
                ("bench qwen3.6-27b", "a table, and a text to paste"),
                ("bench qwen3.6-27b --against mlx_lm.server", "with that server's figures beside it"),
            ),
            in_home=True,
            begins=lambda options: "bench: loading the model; the figures come in some two minutes ...",
        ),
        Command(
            "doctor",
            "say what this machine has and what is missing; --deep: whether it computes right, too",
            "start_llm.cli.doctor:main",
            (
                *SERVER,
                flag(
                    "--deep",
                    action="store_true",
                    help="serve the model and compare its answers: cold, reused, forked ...",
                ),
            ),
            (("doctor", ""), ("doctor --deep qwen3.6-27b", "minutes; a text to paste")),
            in_home=True,
            begins=lambda options: "doctor: trying what this machine computes, some seconds ...",
        ),
        Command(
            "completion",
            "print a script that completes these commands in your shell",
            "start_llm.cli.completion:main",
            (flag("shell", choices=["bash", "zsh", "fish"], metavar="SHELL", help="bash, zsh or fish"),),
            (
                ("completion bash >> ~/.bashrc", ""),
                ("completion zsh > ~/.zfunc/_start-llm", "with that folder in fpath"),
                ("completion fish > ~/.config/fish/completions/start-llm.fish", ""),
            ),
        ),
    ),
}
"""By the heading under which help lists them. What has none is for this program itself."""
COMMANDS = {command.name: command for commands in GROUPS.values() for command in commands}
SHOWN = {name: command for name, command in COMMANDS.items() if command not in GROUPS[""]}
"""Those that a user types."""
