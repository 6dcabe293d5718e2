from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from start_llm import __main__ as command_line
from start_llm.core.settings import Settings


class FakeModule:
    """Stands in for a command's module; notes what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def main_serve(self, settings: Settings) -> int:
        self.calls.append(("serve", settings, Path.cwd()))
        return 3

    def main(self, *arguments: Any) -> int:
        self.calls.append((*arguments, Path.cwd()))
        return 4


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeModule:
    fake = FakeModule()
    monkeypatch.setattr(command_line, "import_module", lambda name: fake)
    project, caller = tmp_path / "project", tmp_path / "caller"
    project.mkdir()
    caller.mkdir()
    monkeypatch.setattr(command_line, "ROOT", project)
    monkeypatch.chdir(caller)
    monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # so that it is put back
    for name in ("MODEL_PATH", "MLX_PORT", "PROXY_PORT", "PROXY", "MLX_HOST"):
        monkeypatch.delenv(name, raising=False)
    return fake


@pytest.mark.parametrize("arguments", [["serve", "--port", "0"], ["--port", "0"]])
def test_serve_is_the_default(module: FakeModule, arguments: list[str]) -> None:
    assert command_line.main(arguments) == 3
    ((name, settings, _),) = module.calls
    assert name == "serve"
    assert settings.mlx_port == 0


def test_flags_win_over_environment_and_env_file(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    (command_line.ROOT / ".env").write_text("PROXY_PORT=4001\nMLX_PORT=1\nMAX_QUEUE=7\n")
    monkeypatch.setenv("MLX_PORT", "8081")
    flags = ["--port", "8082", "--no-proxy", "--host", "0.0.0.0", "--model", "owner/name"]
    assert command_line.main(flags) == 3
    settings = module.calls[0][1]
    assert (settings.mlx_port, settings.proxy, settings.mlx_host) == (8082, "off", "0.0.0.0")
    assert (settings.model_path, settings.proxy_port, settings.max_queue) == ("owner/name", 4001, 7)


def test_a_models_folder_is_meant_from_the_callers_folder(module: FakeModule, tmp_path: Path) -> None:
    (tmp_path / "caller" / "model").mkdir()
    command_line.main(["demo", "--model", "model"])
    assert module.calls[0][0].model_path == str(tmp_path / "caller" / "model")


def test_the_servers_folder_is_the_projects_and_an_agents_the_callers(module: FakeModule, tmp_path: Path) -> None:
    (tmp_path / "project" / ".env").write_text("PROXY_PORT=4001\n")
    assert command_line.main(["launch", "claude", "--print", "--", "--help"]) == 4
    assert command_line.main(["doctor"]) == 4
    (arguments, settings, launched), (_, examined) = module.calls
    assert arguments == ["claude", "--print", "--", "--help"]
    assert settings.proxy_port == 4001
    assert (launched, examined) == (tmp_path / "caller", tmp_path / "project")


def test_a_bad_setting_stops_the_start(module: FakeModule, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--port", "70000"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("MLX_PORT='70000': ")
    assert "65535" in said
    assert module.calls == []


def test_unknown_command_and_flag_exit_with_2(module: FakeModule, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["srve"], ["serve", "--prot", "1"]):
        with pytest.raises(SystemExit) as exit_:
            command_line.main(arguments)
        assert exit_.value.code == 2
    assert module.calls == []


def test_the_command_line_alone_imports_nothing_heavy() -> None:
    heavy = {"mlx", "transformers", "litellm", "openai"}
    code = f"import start_llm.__main__, sys; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent
    )
    assert run.stdout == "[]\n"


def test_an_interrupt_during_imports_is_no_traceback(module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "import_module", interrupted)
    assert command_line.main(["serve"]) == 130
