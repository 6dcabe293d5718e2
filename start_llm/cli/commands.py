"""Every command: its words, its flags, its examples. Standard library only, so that help and refusals come at once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from start_llm.clients import CLIENTS

AddFlags = Callable[[argparse.ArgumentParser], None]
SETTING_FLAGS = ("model_path", "mlx_host", "mlx_port", "proxy_port", "proxy", "max_kv_size", "log_level", "log_json")
"""Names of options that are settings: they win over the environment and `.env`."""
BY = ("client", "model", "session", "day", "outcome", "miss")
ENDS = ("answered", "cut", "refused", "gone", "failed")


@dataclass(frozen=True)
class Command:
    """One word after the program's name.

    Attributes:
        group: the heading under which help lists it.
        what: one line for that list.
        place: ``module:function`` that runs it, as ``function(settings, options)``; imported only then.
        flags: adds its flags and arguments.
        examples: what follows the program's name, and what it does.
        in_home: runs in the folder of `.env` and logs, not in the caller's.
        more: what help says besides.
        tail: takes words behind ``--`` that are not ours (``options.arguments``).
        begins: what is said on standard error at once, before what takes its time; empty: nothing.
    """

    name: str
    group: str
    what: str
    place: str
    flags: AddFlags
    examples: tuple[tuple[str, str], ...] = ()
    in_home: bool = False
    more: str = ""
    tail: bool = False
    begins: Callable[[argparse.Namespace], str] = lambda options: ""


def model_word(name: str) -> str:
    """A folder is meant from where the caller stands."""
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.exists() else name


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        dest="model_path",
        type=model_word,
        metavar="MODEL",
        help="repository, folder or short name (MODEL_PATH)",
    )


def add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", dest="mlx_port", metavar="PORT", help="port of the server (MLX_PORT)")


def add_context(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--context", dest="max_kv_size", metavar="TOKENS", help="most tokens of one request's context (MAX_KV_SIZE)"
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """Flags of everything that starts a server."""
    parser.add_argument("model", nargs="?", type=model_word, metavar="MODEL", help="as --model")
    add_model(parser)
    parser.add_argument("--host", dest="mlx_host", metavar="HOST", help="address of the server (MLX_HOST)")
    add_port(parser)
    add_context(parser)
    parser.add_argument("--proxy-port", metavar="PORT", help="port of the proxy, 0 for a free one (PROXY_PORT)")
    parser.add_argument("--no-proxy", dest="proxy", action="store_const", const="off", help="no proxy (PROXY=off)")
    add_log(parser)


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    parser.add_argument(
        "--supervised", action="store_true", help="events as JSON lines on stdout, commands on stdin: for a program"
    )


def add_supervise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--flags", type=json.loads, default={}, help="settings that were given as flags, as JSON")


def add_stop(parser: argparse.ArgumentParser) -> None:
    add_port(parser)
    parser.add_argument("--all", action="store_true", help="every server of this user")


def add_status(parser: argparse.ArgumentParser) -> None:
    add_port(parser)
    add_json(parser)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def add_logs(parser: argparse.ArgumentParser) -> None:
    add_port(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what comes, until Ctrl-C")
    parser.add_argument("-n", "--lines", type=int, default=50, metavar="N", help="so many of the last lines (50)")
    parser.add_argument("--proxy", action="store_true", dest="proxy_log", help="the proxy's log")


def add_service(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["install", "uninstall"], metavar="install|uninstall", help="which of both")
    parser.add_argument("--yes", action="store_true", help="write it without asking")
    parser.add_argument(
        "--on-demand", action="store_true", help="the system listens; the first request starts the server"
    )
    add_model(parser)
    add_port(parser)
    add_context(parser)


def add_pull(parser: argparse.ArgumentParser) -> None:
    add_name(parser)
    parser.add_argument("--revision", help="branch, tag or commit; main by default")


def add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="owner/name on Hugging Face, or a short name of recommend")


MODEL_WORDS = ("show", "load", "unload", "pin")


def add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=MODEL_WORDS, metavar="WHAT", help="show, load, unload or pin one")
    name = "repository, folder or short name; show: MODEL_PATH if unset"
    parser.add_argument("name", nargs="?", metavar="NAME", help=name)
    parser.add_argument("--off", action="store_true", help="pin: the model may go again when its memory is needed")
    add_port(parser)
    add_json(parser)


def add_recommend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", type=int, metavar="GIB", help="for a machine with so much memory")


def add_log(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error (LOG_LEVEL)")
    parser.add_argument(
        "--log-json", action="store_const", const="true", help="JSON lines in place of live lines (LOG_JSON)"
    )


def add_launch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("client", choices=list(CLIENTS), metavar="AGENT", help=", ".join(CLIENTS))
    parser.add_argument("--print", action="store_true", help="show what would be set, as shell text; run nothing")
    parser.add_argument("--via-proxy", action="store_true", help="connect through the LiteLLM proxy")
    parser.add_argument(
        "--my-config", action="store_true", help="with copies of your own skills, MCP servers, theme for that agent"
    )
    add_model(parser)
    add_port(parser)
    add_context(parser)


def launch_begins(options: argparse.Namespace) -> str:
    return "" if options.print else f"launch: {CLIENTS[options.client].title}; looking for the server ..."


def add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="TEXT", help="what to ask; standard input is added to it")
    add_json(parser)
    add_model(parser)
    add_port(parser)
    add_context(parser)


def add_audit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--since", default="1d", metavar="AGE", help="no older than that: 30m, 12h, 7d (1d); all for everything"
    )
    parser.add_argument("--by", choices=BY, metavar="WHAT", help=f"added up by {', '.join(BY)}")
    parser.add_argument("--client", metavar="NAME", help="of one agent")
    parser.add_argument("--model", metavar="NAME", dest="of_model", help="of one model")
    parser.add_argument("--outcome", choices=ENDS, metavar="HOW", help=", ".join(ENDS))
    parser.add_argument("-n", "--lines", type=int, default=20, metavar="N", help="so many of the last ones (20)")
    add_json(parser)


def add_shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], metavar="SHELL", help="bash, zsh or fish")


COMMANDS = {
    command.name: command
    for command in (
        Command(
            "serve",
            "Server",
            "run the server and the LiteLLM proxy in front of it, here in the terminal (default)",
            "start_llm.cli.serve:main",
            add_serve,
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
            "Server",
            "start the server in the background; it is started again if it dies",
            "start_llm.service.commands:main_start",
            add_server,
            (
                ("start", "returns when it answers"),
                ("start mlx-community/Qwen3.6-27B-4bit --port 8081", "a second one beside it"),
            ),
        ),
        Command(
            "stop",
            "Server",
            "end the server on a port, and all that belongs to it",
            "start_llm.service.commands:main_stop",
            add_stop,
            (("stop", "the one on MLX_PORT"), ("stop --all", "every server of yours")),
        ),
        Command(
            "restart",
            "Server",
            "stop and start, with the flags of the last start",
            "start_llm.service.commands:main_restart",
            add_server,
            (("restart", ""), ("restart --context 65536", "the rest as before")),
        ),
        Command(
            "status",
            "Server",
            "what the server on a port does, how it was restarted and why",
            "start_llm.service.commands:main_status",
            add_status,
            (("status", "exit code 0: it answers, 1: not yet, 3: it does not run"), ("status --json", "")),
        ),
        Command(
            "ps",
            "Server",
            "all servers of yours: requests, models, memory, KV",
            "start_llm.service.commands:main_ps",
            add_json,
            (("ps", ""),),
        ),
        Command(
            "logs",
            "Server",
            "the last lines of the server's log",
            "start_llm.service.commands:main_logs",
            add_logs,
            (("logs -f", "goes on with what comes"), ("logs --proxy", "those of the LiteLLM proxy")),
        ),
        Command(
            "audit",
            "Server",
            "what was asked: when, by which agent, what was reused, what it took, how it ended",
            "start_llm.cli.audit:main",
            add_audit,
            (
                ("audit", "the last 20 requests of the last day"),
                ("audit --by client --since 7d", "added up"),
                ("audit --outcome failed --json", "for programs"),
            ),
            more="The table holds no text of any conversation; AUDIT_DAYS says how long it keeps a row.",
        ),
        Command(
            "service",
            "Server",
            "have the system start the server when you log in (systemd, launchd)",
            "start_llm.service.units:main",
            add_service,
            (
                ("service install", "shows the unit and asks"),
                ("service install --on-demand", "started by the first request, ended when it is not used"),
                ("service uninstall", ""),
            ),
        ),
        Command(
            "supervise", "", "what start runs in the background", "start_llm.service.supervisor:main", add_supervise
        ),
        Command(
            "launch",
            "Agents",
            "run a coding agent connected to the server; starts one if none runs",
            "start_llm.launch.cli:main",
            add_launch,
            (
                ("launch pi", "PI in this folder"),
                ("launch claude -- --continue", "words behind -- are the agent's own"),
                ("launch claude --my-config", "with your own skills, MCP servers, theme"),
                ("launch codex --print", "what would be set, to do it by hand"),
            ),
            tail=True,
            begins=launch_begins,
        ),
        Command(
            "chat",
            "Agents",
            "talk to the model here in the terminal, or ask it one thing from a pipe",
            "start_llm.launch.chat:main",
            add_chat,
            (
                ("chat", "a conversation; Ctrl-D ends it"),
                ("chat What is RoPE?", "one answer"),
                ("chat --json Say hello.", "the answer with its usage; 0: answered, 1: not, 2: nothing asked"),
            ),
        ),
        Command(
            "models",
            "Models",
            "what is on this disk, and which of it a running server has loaded; load, unload, pin",
            "start_llm.cli.models:main_models",
            add_models,
            (
                ("models", "sizes, context, what each can do; state and KV where a server runs"),
                ("models show qwen3.6-27b", "how it calls tools, thinks, ..., and who says so"),
                ("models load qwen3.5-9b", "into the running server's memory, beside what is there"),
                ("models unload qwen3.5-9b", "its KV goes to disk, its memory is free"),
                ("models pin qwen3.5-9b", "it stays; --off: it may go again"),
            ),
        ),
        Command(
            "pull",
            "Models",
            "fetch a model; one that was broken off goes on where it was",
            "start_llm.cli.models:main_pull",
            add_pull,
            (("pull qwen3.6-27b", ""), ("pull mlx-community/Qwen3.5-9B-4bit --revision main", "")),
        ),
        Command(
            "rm",
            "Models",
            "remove a model that was fetched",
            "start_llm.cli.models:main_rm",
            add_name,
            (("rm qwen3.6-27b", ""),),
        ),
        Command(
            "recommend",
            "Models",
            "models for this machine, with the KV of a long conversation",
            "start_llm.cli.models:main_recommend",
            add_recommend,
            (("recommend", ""), ("recommend --memory 64", "for another machine")),
        ),
        Command(
            "demo",
            "Look around",
            "start both on free ports, run a short agent conversation, print what each turn cost",
            "start_llm.cli.demo:main",
            add_server,
            (("demo", "with the embedded model"),),
            in_home=True,
        ),
        Command(
            "doctor",
            "Look around",
            "say what this machine has and what is missing",
            "start_llm.cli.doctor:main",
            add_server,
            (("doctor", ""),),
            in_home=True,
        ),
        Command(
            "completion",
            "Look around",
            "print a script that completes these commands in your shell",
            "start_llm.cli.completion:main",
            add_shell,
            (
                ("completion bash >> ~/.bashrc", ""),
                ("completion zsh > ~/.zfunc/_start-llm", "with that folder in fpath"),
                ("completion fish > ~/.config/fish/completions/start-llm.fish", ""),
            ),
        ),
    )
}
SHOWN = {name: command for name, command in COMMANDS.items() if command.group}
"""Those that a user types."""
