from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import pytest

from start_llm.__main__ import main
from start_llm.cli import running
from start_llm.core.settings import Settings


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
