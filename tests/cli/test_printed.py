"""Every command that a page, a message or a comment of `.env.example` tells somebody to type is one."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import install_and_run
from start_llm.cli.commands import SHOWN
from start_llm.cli.reading import HelpRequested, read
from start_llm.core.settings import Settings
from start_llm.host.hints import hint
from start_llm.host.home import COMMAND_VARIABLE

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", ".env.example", "Dockerfile")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
BEGINS = re.compile(r"(?:\.venv/bin/|/)?(start-llm|python3\.12 \S*install_and_run\.py|python -m start_llm)(?= |$)")
ENDS = re.compile(r"\s{3,}|  +#| # | \| | && |[;>]|\\$")
CALLS = ("program", "command", "hint")
PLACE = "\ue000"  # of a value in a message
SAMPLES = {"shell": "bash", "client": "pi", "first": "pi", "what": "load", "words": "launch pi"}


def check(words: str) -> None:
    """Raises UsageError if these are no words behind the program's name."""
    typed = shlex.split(re.sub(r"\[[^]]*\]", "", words).replace("launch NAME", "launch pi"))
    if typed[:1] and typed[0] in install_and_run.OWN:
        assert typed[0] != "run" or typed[1] == "-c" or (ROOT / typed[1]).is_file(), typed
        return
    if len(typed) == 1 and typed[0] in SHOWN:
        return  # the command's name, in a sentence
    with suppress(HelpRequested):
        read(typed)


def in_page(text: str) -> Iterator[str]:
    """Words behind the program's name, in blocks of code and between backticks."""
    parts = re.split(r"^ *```.*$", text, flags=re.MULTILINE)
    spans = [span for part in parts[::2] for span in re.findall(r"`([^`\n]+)`", part)]
    for line in [*spans, *(line for part in parts[1::2] for line in part.splitlines())]:
        for found in BEGINS.finditer(line):
            if line[: found.start()].rstrip().endswith(("install", "docker run", "-t", "serve", "#compdef", "image")):
                continue  # the name of a package, of an image
            yield ENDS.split(line[found.end() :], maxsplit=1)[0].strip().rstrip(",.")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_says_to_type_can_be_typed(path: Path) -> None:
    for words in in_page(path.read_text("utf-8")):
        check(words)


def in_source(tree: ast.AST) -> Iterator[str]:
    """Words that messages name behind the program's name: up to a backtick, three blanks or a line's end."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hint":
            yield _sample(node.args[0])
        if isinstance(node, ast.JoinedStr):
            text = "".join(PLACE if _is_program(part) else _sample(part) for part in node.values)
            for found in re.finditer(f"{PLACE}([^`\n]*)", text):
                yield re.split(r"\s{3,}", found[1])[0]


def _is_program(part: ast.expr) -> bool:
    call = part.value if isinstance(part, ast.FormattedValue) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in {"program", "command"}


def _sample(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    if isinstance(part, ast.JoinedStr):
        return "".join(map(_sample, part.values))
    value = part.value if isinstance(part, ast.FormattedValue) else part
    name = ast.unparse(value).rpartition(".")[2]
    return SAMPLES.get(name, "8081" if "port" in name else "name")


SOURCES = [path for path in sorted((ROOT / "start_llm").rglob("*.py")) if path.name not in {"hints.py", "reading.py"}]


def test_what_a_message_says_to_type_can_be_typed() -> None:
    found = [(path.name, words) for path in SOURCES for words in in_source(ast.parse(path.read_text("utf-8")))]
    assert len(found) > 30
    for _, words in found:
        check(words)


def test_a_hint_names_the_port_where_a_plain_command_would_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path))
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    usual = Settings.model_fields["mlx_port"].default
    assert hint("stop", usual) == hint("stop", None) == "start-llm stop"
    assert hint("stop", 18188) == "start-llm stop --port 18188"
    (tmp_path / ".env").write_text("MLX_PORT=18188\n")
    assert hint("stop", 18188) == "start-llm stop" and hint("stop", usual) == f"start-llm stop --port {usual}"
