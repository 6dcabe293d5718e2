"""What each agent is asked to do, in its own tool names. The user's prompt carries the oracle's script.

Three user turns, each in a process of its own: repair a function and try it; write notes in the same session; resume
the session (with a sub-agent where the agent has one). Then a fresh session in the repository as it is by then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from start_llm.clients import CLIENTS
from tests.oracle.oracle import script

TRY = "python3 -c 'import src.calc as c; print(c.add(1, 2))' > out.txt"
STATUS = "git status --short > status.txt"
NOTES = "# Notes\n\n- add subtracted; it adds now\n"


@dataclass(frozen=True)
class Scenario:
    """An agent.

    Attributes:
        first, again, fresh: (arguments, standard input) of a run, given the prompt and the folder of its data.
        work: raw answers of the first turn, given the repository.
        note: raw answers of the second turn.
        more: raw answers of the resumed turn; the sub-agent's script is inside a call.
        look: raw answers of the fresh session.
        sub_agent: the resumed turn has one.
        unsaid: what no run of it prints.
        told: requests of the resumed turn in which the parent goes on once it is told what the sub-agent said.
        beside: (arguments, address of its health) of what runs as long as the session does.
        typed: it goes on with a session in a terminal only; the prompt is typed there.
        fresh_reuse: least share of the fresh session's first prompt that must be reused.
        seconds: limit of a run.
        live: the first three turns are typed into one process; the session is then resumed in a new one.
        most: tokens that a turn may compute where its client makes it more than the new ones, by the turn's name.
    """

    name: str
    first: Callable[[str, Path], tuple[list[str], str]]
    again: Callable[[str, Path], tuple[list[str], str]]
    work: Callable[[Path], list[str]]
    note: Callable[[Path], list[str]]
    more: Callable[[Path], list[str]]
    look: Callable[[Path], list[str]]
    fresh: Callable[[str, Path], tuple[list[str], str]] | None = None
    sub_agent: bool = False
    unsaid: str = ""
    told: int = 0
    beside: tuple[list[str], str] | None = None
    typed: bool = False
    fresh_reuse: float = 0.0
    seconds: float = 120
    live: bool = False
    most: Mapping[str, int] = MappingProxyType({})


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def think(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def nested(*texts: str) -> str:
    """A sub-agent's prompt, for use inside a call of an outer script: its own marks must not be seen there."""
    return "Which functions does src/util.py define? " + script(*texts)


def hidden(raw: str) -> str:
    """The raw answer with the marks of scripts inside its JSON escaped; JSON decoding brings them back."""
    return raw.replace("[[", "\\u005b\\u005b")


def tools(
    read: Callable[[Path], str],
    edit: Callable[[Path], str],
    run: Callable[[str], str],
    write: Callable[[Path], str],
    delegate: Callable[[str], str] | None = None,
) -> dict[str, Any]:
    """The four parts of a scenario from an agent's basic calls; with `delegate` a sub-agent is asked in the third."""

    def more(repo: Path) -> list[str]:
        look = read(repo / "src" / "util.py")
        if delegate is None:
            return [look, "It defines `clamp`."]
        asked = hidden(delegate(nested(look, "It defines `clamp`.")))
        return ["I ask a helper.\n" + asked, "The helper says: `clamp`."]

    return {
        "work": lambda repo: [
            think("The function is in src/calc.py.") + "I read it first.\n" + read(repo / "src" / "calc.py"),
            "It subtracts.\n" + edit(repo / "src" / "calc.py"),
            run(TRY),
            "`add` adds now.",
        ],
        "note": lambda repo: [
            think("Notes go to NOTES.md.") + write(repo / "NOTES.md"),
            "And the state of the tree.\n" + run(STATUS),
            "NOTES.md is written.",
        ],
        "more": more,
        "look": lambda repo: ["A look.\n" + read(repo / "src" / "calc.py"), "It adds."],
    }


OLD, NEW = "a - b", "a + b"

PI = Scenario(
    name="pi",
    first=lambda prompt, data: (["-p", prompt], ""),
    again=lambda prompt, data: (["-c", "-p", prompt], ""),
    **tools(
        lambda path: call("read", path=str(path)),
        lambda path: call("edit", path=str(path), edits=[{"oldText": OLD, "newText": NEW}]),
        lambda command: call("bash", command=command),
        lambda path: call("write", path=str(path), content=NOTES),
    ),
)


_CLAUDE = ["--permission-mode", "bypassPermissions", "-p"]
CLAUDE = Scenario(
    name="claude",
    first=lambda prompt, data: ([*_CLAUDE, prompt], ""),
    again=lambda prompt, data: (["--continue", *_CLAUDE, prompt], ""),
    sub_agent=True,
    fresh_reuse=0.8,
    **tools(
        lambda path: call("Read", file_path=str(path)),
        lambda path: call("Edit", file_path=str(path), old_string=OLD, new_string=NEW),
        lambda command: call("Bash", command=command, description="Try it"),
        lambda path: call("Write", file_path=str(path), content=NOTES),
        lambda prompt: call(
            "Agent", description="Look", prompt=prompt, subagent_type="general-purpose", run_in_background=False
        ),
    ),
)


OPENCODE = Scenario(
    name="opencode",
    first=lambda prompt, data: (["run"], prompt),
    again=lambda prompt, data: (["run", "--continue"], prompt),
    sub_agent=True,
    **tools(
        lambda path: call("read", filePath=str(path)),
        lambda path: call("edit", filePath=str(path), oldString=OLD, newString=NEW),
        lambda command: call("bash", command=command, description="Try it"),
        lambda path: call("write", filePath=str(path), content=NOTES),
        lambda prompt: call("task", description="Look", prompt=prompt, subagent_type="general"),
    ),
)

KILO = replace(
    OPENCODE,
    name="kilo",
    first=lambda prompt, data: (["run", "--auto"], prompt),
    again=lambda prompt, data: (["run", "--auto", "--continue"], prompt),
    seconds=300,
)


CN = Scenario(
    name="cn",
    first=lambda prompt, data: (["--auto", "-p", prompt], ""),
    again=lambda prompt, data: (["--auto", "--resume", "-p", prompt], ""),
    **tools(
        lambda path: call("Read", filepath=str(path)),
        lambda path: call("Edit", file_path=str(path), old_string=OLD, new_string=NEW),
        lambda command: call("Bash", command=command),
        lambda path: call("Write", filepath=str(path), content=NOTES),
    ),
)


def _codex_run(command: str) -> str:
    return call("exec_command", cmd=command)


def _codex_tools(spawn: str) -> dict[str, Any]:
    """The sub-agent's tools are searched first. It works beside its parent, which waits for it by the id that it was
    told.
    """
    parts = tools(
        lambda path: _codex_run(f"cat {path}"),
        lambda path: call("apply_patch", input=_PATCH.format(path=path.relative_to(path.parents[1]))),
        _codex_run,
        lambda path: _codex_run(f"printf '%s' '{NOTES}' > {path}"),
        lambda prompt: call(spawn, message=prompt),
    )

    def more(repo: Path) -> list[str]:
        asked, answer = parts["more"](repo)
        wait = call("multi_agent_v1__wait_agent", targets=["{after: agent_id}"], timeout_ms=60_000)
        return [call("tool_search", query="spawn_agent wait_agent"), asked, wait, answer]

    return parts | {"more": more}


_PATCH = f"*** Begin Patch\n*** Update File: {{path}}\n@@\n-    return {OLD}\n+    return {NEW}\n*** End Patch\n"
_CODEX = ["exec", "--dangerously-bypass-approvals-and-sandbox"]
CODEX = Scenario(
    name="codex",
    first=lambda prompt, data: ([*_CODEX, "-"], prompt),
    again=lambda prompt, data: ([*_CODEX, "resume", "--last", "-"], prompt),
    sub_agent=True,
    unsaid="Model metadata",
    fresh_reuse=0.95,
    **_codex_tools("multi_agent_v1__spawn_agent"),
)


QWEN = Scenario(
    name="qwen",
    first=lambda prompt, data: (["--yolo"], prompt),
    again=lambda prompt, data: (["--yolo", "--continue"], prompt),
    sub_agent=True,
    **tools(
        lambda path: call("read_file", file_path=str(path)),
        lambda path: call("edit", file_path=str(path), old_string=OLD, new_string=NEW),
        lambda command: call("run_shell_command", command=command, is_background=False),
        lambda path: call("write_file", file_path=str(path), content=NOTES),
        lambda prompt: call(
            "agent", description="Look", prompt=prompt, subagent_type="general-purpose", run_in_background=False
        ),
    ),
    # Each process tells git's state and the folders anew: a note of 150 tokens at its first request.
    most=MappingProxyType({"second": 640, "resumed": 530}),
)


def _openclaw(session: str) -> Callable[[str, Path], tuple[list[str], str]]:
    arguments = ["agent", "--agent", "main", "--session-id", session, "--message"]
    return lambda prompt, data: ([*arguments, prompt], "")


_OPENCLAW_TOOLS = {
    "read": lambda path: call("read", path=str(path)),
    "edit": lambda path: call("edit", path=str(path), edits=[{"oldText": OLD, "newText": NEW}]),
    "write": lambda path: call("write", path=str(path), content=NOTES),
}


def _openclaw_parts() -> dict[str, Any]:
    """OpenClaw works in its own workspace, so commands say where."""

    def for_repository(part: str) -> Callable[[Path], list[str]]:
        def raw(repo: Path) -> list[str]:
            run = lambda command: call("exec", command=f"cd {repo} && {command}")  # noqa: E731
            parts = tools(_OPENCLAW_TOOLS["read"], _OPENCLAW_TOOLS["edit"], run, _OPENCLAW_TOOLS["write"])
            texts: list[str] = parts[part](repo)
            return texts

        return raw

    def more(repo: Path) -> list[str]:
        # The message that tells the sub-agent's answer quotes its task, script included, with the tags escaped: the
        # parent does the same then, it looks for itself. Bare calls stay calls.
        read = {"name": "read", "arguments": {"path": str(repo / "src" / "util.py")}}
        task = nested(json.dumps(read), "It defines `clamp`.")
        spawn = call("tool_call", id="sessions_spawn", args={"task": task})
        return ["I ask a helper.\n" + hidden(spawn), call("sessions_yield")]

    return {part: for_repository(part) for part in ("work", "note", "look")} | {"more": more}


OPENCLAW = Scenario(
    name="openclaw",
    first=_openclaw("first"),
    again=_openclaw("first"),
    fresh=_openclaw("second"),
    sub_agent=True,
    told=2,
    beside=(["gateway"], f"http://127.0.0.1:{CLIENTS['openclaw'].env['OPENCLAW_GATEWAY_PORT']}/readyz"),
    seconds=300,
    **_openclaw_parts(),
)


def _cline_again(prompt: str, data: Path) -> tuple[list[str], str]:
    sessions = sorted((data / "sessions").iterdir())  # their names begin with the time
    return ["--tui", "--id", sessions[-1].name], prompt


CLINE = Scenario(
    name="cline",
    first=lambda prompt, data: ([prompt], ""),
    again=_cline_again,
    typed=True,
    sub_agent=True,
    **tools(
        lambda path: call("read_files", paths=[str(path)]),
        lambda path: call("editor", path=str(path), old_text=OLD, new_text=NEW),
        lambda command: call("run_commands", commands=[command]),
        lambda path: call("editor", path=str(path), new_text=NOTES),
        lambda prompt: call("spawn_agent", systemPrompt="You look things up.", task=prompt),
    ),
)


def _block(path: str, old: str, new: str) -> str:
    return f"{path}\n```python\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n"


def typed(prompt: str) -> str:
    """A prompt of several lines for aider's standard input."""
    return f"{{\n{prompt}\n}}\n"


# The model writes the commit messages too: one line, as in life, and not the script's next text.
AIDER_COMMIT = ["--commit-prompt", "Write a commit message. [[say: fix: what the user asked for]]"]
_AIDER = ["--yes-always", "--no-pretty", "--auto-test", "--test-cmd", f"{TRY}; {STATUS}", *AIDER_COMMIT, "src/calc.py"]
# aider does not keep which files are in the chat.
_AGAIN = ["--restore-chat-history", *_AIDER, "src/util.py", "NOTES.md"]
# As long as a model's answer is: the server knows the conversation again by 64 tokens of it, and the process's name.
_WHY = (
    "The function subtracts where it has to add, so that every sum comes out wrong. I change this one sign and leave "
    "the rest of the file as it is; the test command shows whether that is enough. Here is the change to the file:\n\n"
)
AIDER = Scenario(
    name="aider",
    first=lambda prompt, data: (_AIDER, typed(prompt)),
    again=lambda prompt, data: (_AGAIN, typed(prompt)),
    work=lambda repo: [
        think("It subtracts.") + _WHY + _block("src/calc.py", "    return a - b\n", "    return a + b\n")
    ],
    note=lambda repo: ["Notes.\n\n" + _block("NOTES.md", "", NOTES)],
    more=lambda repo: ["It defines `clamp`."],
    look=lambda repo: ["It adds."],
    live=True,
    # Second: a note on the changed file, 50 tokens.
    # Third: two files come into the chat, so the block is shown anew; a note tells what left the map.
    # Resumed: its history file tells the answers in other words, nothing proves whose they are. All behind the system
    # text is shown as it is sent, the rules for edit blocks (1,200 tokens) too.
    most=MappingProxyType({"second": 200, "third": 370, "resumed": 1900}),
)

SCENARIOS = {
    scenario.name: scenario for scenario in (PI, CLAUDE, OPENCODE, CODEX, QWEN, OPENCLAW, CLINE, KILO, CN, AIDER)
}
