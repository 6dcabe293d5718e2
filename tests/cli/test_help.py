from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import start_llm
from start_llm.__main__ import main
from start_llm.cli.commands import COMMANDS, SHOWN
from start_llm.cli.reading import overview, read
from start_llm.clients import CLIENTS
from start_llm.host.home import ANEW_VARIABLE
from start_llm.service import commands as service


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    said = capsys.readouterr().out
    assert re.fullmatch(rf"start-llm {re.escape(start_llm.__version__)} \(Python 3\.1[23].*\)\n", said)


def test_help_lists_every_command_in_a_group() -> None:
    said = overview()
    for command in COMMANDS.values():
        assert not command.group or f"\n{command.group}:" in said
        assert (f"\n  {command.name} " in said) is bool(command.group)
    assert max(map(len, said.splitlines())) <= 120


@pytest.mark.parametrize("name", SHOWN)
def test_help_of_a_command_is_the_same_either_way(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", name]) == 0
    said = capsys.readouterr().out
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out == said
    for words, _ in SHOWN[name].examples:
        assert f"start-llm {words}" in said


@pytest.mark.parametrize("name", SHOWN)
def test_examples_can_be_typed(name: str) -> None:
    for words, _ in SHOWN[name].examples:
        typed = words.split(" >")[0].split()
        assert read(typed).command.name == name


def test_words_behind_the_dashes_are_the_agents() -> None:
    typed = read(["launch", "pi", "--print", "--model", "a/b", "--", "--help", "--", "-x"])
    assert typed.options.arguments == ["--help", "--", "-x"]
    assert typed.options.overrides == {"model_path": "a/b"} and typed.options.print


@pytest.mark.smoke
def test_help_imports_little() -> None:
    code = (
        "import sys; from start_llm.__main__ import main; main(['help']); main(['srve']);"
        "print(sorted({'pydantic', 'rich', 'psutil', 'mlx', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.endswith("[]\n")


@pytest.mark.live
def test_what_only_looks_imports_no_library_that_takes_its_time() -> None:
    """0.4 s of computing in place of 1.0; each of these adds a tenth or more."""
    code = (
        "import sys, start_llm.cli.running, start_llm.cli.models, start_llm.service.commands;"
        "slow = {'numpy', 'httpx', 'rich', 'jsonschema', 'llguidance', 'pydantic_settings', 'asyncio', 'mlx'};"
        "slow |= {'transformers', 'litellm', 'openai'};"
        "print(sorted(slow & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_without_a_command_it_says_what_runs_or_how_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path))
    monkeypatch.setenv("START_LLM_CACHE_DIR", str(tmp_path / "cache"))
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(f"start-llm {words}" in said for words in ("recommend", "start NAME", "launch pi"))
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(service, "running_ports", lambda settings: [8099])
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "8099" in said and "recommend" not in said


@pytest.mark.live
@pytest.mark.parametrize("agent", CLIENTS)
def test_launch_says_something_before_it_imports_what_takes_its_time(agent: str) -> None:
    code = (
        "import sys, start_llm.__main__ as m\n"
        "def stop(name): print(name, sorted({'pydantic', 'rich', 'httpx', 'psutil'} & set(sys.modules))); sys.exit()\n"
        f"m.import_module = stop; m.main(['launch', {agent!r}])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr == f"launch: {CLIENTS[agent].title}; looking for the server ...\n"
    assert run.stdout == "start_llm.cli.running []\n"


@pytest.mark.live
@pytest.mark.parametrize("name", ["demo", "doctor"])
def test_what_takes_seconds_says_so_first_and_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, start_llm.__main__ as m\n"
        "def stop(name): print(sorted({'pydantic', 'rich', 'httpx', 'subprocess'} & set(sys.modules))); sys.exit()\n"
        f"m.import_module = stop; m.main([{name!r}])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.startswith(f"{name}: ") and run.stderr.count("\n") == 1
    assert run.stdout == "[]\n"
    monkeypatch.setenv(ANEW_VARIABLE, "yes")  # started anew, with the bridge for fast products
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr == ""


@pytest.mark.live
def test_the_first_run_says_that_it_takes_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    command = [sys.executable, "-m", "start_llm", "recommend"]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True).stderr for _ in range(2))
    assert "first run" in first and second == ""


def test_launch_print_is_shell_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert read(["launch", "pi", "--print"]).command.first_words(read(["launch", "pi", "--print"]).options) == ""


@pytest.mark.live
@pytest.mark.parametrize("line", ["help serve", "models --json"])
def test_whoever_stops_reading_sees_no_traceback(line: str, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    places = {"START_LLM_HOME": str(tmp_path), "START_LLM_CACHE_DIR": str(tmp_path), "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "start_llm", *line.split()]
    try:
        run = subprocess.run(command, env=os.environ | places, stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert (run.returncode, run.stderr) == (141, "")


@pytest.mark.parametrize(
    ("typed", "name", "options"),
    [
        ("list", "models", {"what": None}),
        ("ls --json", "models", {"json": True}),
        ("show a/b", "models", {"what": "show", "name": "a/b"}),
        ("run a/b", "chat", {"model_path": "a/b", "words": []}),
        ("run a/b Say hello.", "chat", {"model_path": "a/b", "words": ["Say", "hello."]}),
        ("run", "chat", {"model_path": None}),
        ("serve --context 32k", "serve", {"max_kv_size": "32768"}),
        ("serve --context 32000", "serve", {"max_kv_size": "32000"}),
    ],
)
def test_words_of_ollamas_users_mean_what_they_mean_there(typed: str, name: str, options: dict[str, object]) -> None:
    found = read(typed.split())
    assert found.command.name == name
    assert {key: getattr(found.options, key) for key in options} == options


def test_help_begins_with_what_a_new_user_needs() -> None:
    first = re.findall(r"^  start-llm (\w+)", overview(), re.MULTILINE)[:3]
    assert first == ["recommend", "start", "launch"]
