"""The command line: its help, what it imports, what it is run with."""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import start_llm
from start_llm.__main__ import main
from start_llm.cli import running
from start_llm.cli.commands import COMMANDS, SHOWN
from start_llm.cli.reading import overview, read
from start_llm.clients import CLIENTS
from start_llm.core.settings import Settings
from start_llm.host.home import ANEW_VARIABLE
from start_llm.service import commands as service


class FakeModule:
    """Stands in for a command's module; notes what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def main(self, settings: Settings, options: argparse.Namespace) -> int:
        self.calls.append((settings, options, Path.cwd()))
        return 3


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeModule:
    fake = FakeModule()
    monkeypatch.setattr(running, "import_module", lambda name: fake)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # what other tests left would stay for ever
    project, caller = tmp_path / "project", tmp_path / "caller"
    project.mkdir()
    caller.mkdir()
    monkeypatch.setenv("START_LLM_HOME", str(project))
    monkeypatch.chdir(caller)
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # so that it is put back
    for name in ("MODEL_PATH", "MLX_PORT", "PROXY_PORT", "PROXY", "MLX_HOST"):
        monkeypatch.delenv(name, raising=False)
    return fake


@pytest.mark.parametrize("arguments", [["serve", "--port", "0"], ["--port", "0"]])
def test_serve_is_the_default(module: FakeModule, arguments: list[str]) -> None:
    assert main(arguments) == 3
    ((settings, _, _),) = module.calls
    assert settings.mlx_port == 0


def test_flags_win_over_environment_and_env_file(
    module: FakeModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project" / ".env").write_text("PROXY_PORT=4001\nMLX_PORT=1\nMAX_QUEUE=7\n")
    monkeypatch.setenv("MLX_PORT", "8081")
    flags = "--port 8082 --no-proxy --log-json --log-level INFO --host localhost --model owner/name"
    assert main(flags.split()) == 3
    settings = module.calls[0][0]
    assert (settings.mlx_port, settings.proxy, settings.mlx_host) == (8082, "off", "localhost")
    assert (settings.log_json, settings.log_level) == (True, "info")
    assert (settings.model_path, settings.proxy_port, settings.max_queue) == ("owner/name", 4001, 7)


def test_a_models_folder_is_meant_from_the_callers_folder(module: FakeModule, tmp_path: Path) -> None:
    (tmp_path / "caller" / "model").mkdir()
    main(["doctor", "--model", "model"])
    assert module.calls[0][0].model_path == str(tmp_path / "caller" / "model")


def test_the_servers_folder_is_the_projects_and_an_agents_the_callers(module: FakeModule, tmp_path: Path) -> None:
    (tmp_path / "project" / ".env").write_text("PROXY_PORT=4001\n")
    assert main(["launch", "claude", "--print", "--", "--help"]) == 3
    assert main(["doctor"]) == 3
    (settings, options, launched), (_, _, examined) = module.calls
    assert (options.client, options.print, options.arguments) == ("claude", True, ["--help"])
    assert settings.proxy_port == 4001
    assert (launched, examined) == (tmp_path / "caller", tmp_path / "project")


def test_where_several_servers_run_only_what_asks_one_has_to_be_told_which(module, monkeypatch, capsys) -> None:
    monkeypatch.setattr("start_llm.service.place.running_ports", lambda _: [8, 9])
    module.main_status = module.main
    assert main(["status"]) == 3 and len(module.calls) == 1
    assert main(["chat"]) == 2 and len(module.calls) == 1
    assert "ports 8, 9: name one" in capsys.readouterr().err


def test_a_folder_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("START_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path))
    with monkeypatch.context() as patch:  # as root every folder can be written
        patch.setattr("start_llm.cli.running.os.access", lambda path, how: path != tmp_path / "cache")
        assert main(["start", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert said == f"START_LLM_CACHE_DIR={tmp_path}/cache: {tmp_path}/cache cannot be written; name another place.\n"
    (tmp_path / "cache" / "run").touch()  # a file where the locks belong
    assert main(["start", "--port", "0"]) == 2
    assert "cache/run is no folder" in capsys.readouterr().err
    assert main(["stop", "--port", "1"]) == 0


def test_an_error_of_the_disk_is_one_sentence(
    module: FakeModule, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(settings: Any, options: Any) -> int:
        raise OSError(28, "No space left on device", "/x")

    monkeypatch.setattr(module, "main", full)
    assert main(["serve", "--port", "0"]) == 1
    assert capsys.readouterr().err == "serve: [Errno 28] No space left on device: '/x'\n"


def test_an_interrupt_during_imports_is_no_traceback(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "import_module", interrupted)
    assert main(["serve", "--port", "0"]) == 130
    assert gc.isenabled()


def test_what_is_imported_is_frozen_before_anything_runs(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was loaded before could not be given back."""
    done: list[str] = []
    monkeypatch.setattr(running, "import_module", lambda name: done.append("import") or module)  # type: ignore[func-returns-value]
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    monkeypatch.setattr(module, "main", lambda settings, options: done.append("main") or 0)  # type: ignore[func-returns-value]
    assert main(["serve", "--port", "0"]) == 0
    assert done == ["import", "freeze", "main"]


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
