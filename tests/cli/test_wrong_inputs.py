"""Wrong inputs of every kind: one sentence, the right exit code, at once. `@` stands for the folder of `places`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from start_llm.__main__ import main
from start_llm.core.settings import Settings
from tests.cli.places import make_places
from tests.launch.stub import serving

ROOT = Path(__file__).resolve().parents[2]

# command line, settings, what the sentence says
TABLE: list[tuple[str, dict[str, str], str]] = [
    ("srve", {}, "did you mean serve?"),
    ("setup", {}, "did you mean recommend?"),
    ("serve --prot 1", {}, "did you mean --port?"),
    ("serve --port", {}, "--port"),
    ("serve one two", {}, "no argument two"),
    ("serve one --model two", {}, "two models"),
    ("help srve", {}, "did you mean serve?"),
    ("launch", {}, "AGENT"),
    ("launch emacs", {}, "allowed: claude, codex"),
    ("launch claud", {}, "did you mean claude?"),
    ("launch pi -p hello", {}, "start-llm launch pi -- -p hello"),
    ("launch pi hello", {}, "start-llm launch pi -- hello"),
    ("service reinstall", {}, "allowed: install, uninstall"),
    ("serve --port 70000", {}, "MLX_PORT='70000': it must be at most 65535"),
    ("serve --port x", {}, "MLX_PORT='x': it must be a whole number"),
    ("logs -n x", {}, "-n 'x': it must be a whole number"),
    ("service", {}, "missing: install|uninstall"),
    ("service instal", {}, "did you mean install?"),
    ("serve qwen3.6-27", {}, "Did you mean qwen3.6-27b?"),
    ("serve --log-level loud", {}, "LOG_LEVEL="),
    ("serve", {"KV_BITS": "5"}, "KV_BITS="),
    ("serve", {"CACHE_RULES_FILE": "@/nothing.toml"}, "nothing.toml"),
    ("serve", {"CACHE_RULES_FILE": "@/rules.toml"}, "rules.toml"),
    ("serve --host 0.0.0.0", {}, "API_KEY"),
    ("serve --host 203.0.113.9 --port 8080", {"API_KEY": "k"}, "no address of this machine"),
    ("serve", {"START_LLM_CACHE_DIR": "@/file.txt/x"}, "START_LLM_CACHE_DIR"),
    ("serve @/nothing", {}, "no such folder"),
    ("serve @/file.txt", {}, "is a file"),
    ("serve @/m.gguf", {}, "llama.cpp"),
    ("serve @/ggufs", {}, "llama.cpp"),
    ("serve owner/Model-GGUF", {}, "llama.cpp"),
    ("serve @/torch", {}, "mlx_lm.convert --hf-path"),
    ("serve @/cut", {}, "model.safetensors is cut short"),
    ("serve @/noise", {}, "no safetensors file"),
    ("serve @/shards", {}, "model-00001-of-00002.safetensors and 1 more is missing"),
    ("serve @/escapes", {}, "is not complete: [2Jgone.safetensors is missing"),
    ("serve @/noweights", {}, "no weights"),
    ("serve @/empty", {}, "no config.json"),
    ("serve @/unknown", {}, "'quasar9'"),
    ("serve @/code", {}, r"('model.py\x1b[2J'); set TRUST_REMOTE_CODE=true"),
    ("serve @/badjson", {}, "config.json cannot be read"),
    ("serve @/notype", {}, "model_type"),
    ("serve @/notokens", {}, "no tokenizer"),
    ("serve qwen3:27b", {}, "Ollama"),
    ("serve", {"MODEL_PATH": "library/llama3.2:latest"}, "Ollama"),
    ("demo no~name", {}, "neither a folder nor a repository"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    make_places(root)
    return root


@pytest.fixture
def bare(places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None of the settings of whoever runs the tests; the place to stand is put back."""
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("START_LLM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield


def check(line: str, code: int, said: str, expected: str) -> None:
    assert code == 2, f"{line}: {code}, {said}"
    assert expected in said and "Traceback" not in said
    sentences = [each for each in said.splitlines() if not each.endswith(" ...")]  # "demo: starting a server ..."
    assert len(sentences) == 1 and len(said) < 500, said


@pytest.mark.parametrize(("line", "environment", "expected"), TABLE)
def test_a_wrong_input_gets_one_sentence(
    line: str,
    environment: dict[str, str],
    expected: str,
    places: Path,
    bare: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("@", str(places)))
    code = main(line.replace("@", str(places)).split())
    said = capsys.readouterr()
    check(line, code, said.err, expected)
    assert said.out == ""


HEAVY = {"mlx", "mlx_lm", "mlx_vlm", "transformers", "tokenizers", "torch", "numpy", "litellm", "llguidance"}
HEAVY |= {"huggingface_hub"}
"""Each takes from half a second to many; without them a refusal is there in about half a second of the processor."""
RUN = """
import atexit, runpy, sys
atexit.register(lambda: print("imported:", *sys.modules))
runpy.run_module("start_llm", run_name="__main__")
"""


def run_alone(line: str, environment: dict[str, str], places: Path) -> tuple[int, str, set[str]]:
    """Exit code, standard error, and the heavy packages that were imported, in a process of its own."""
    given = {name: value.replace("@", str(places)) for name, value in environment.items()}
    command = [sys.executable, "-c", RUN, *line.replace("@", str(places)).split()]
    run = subprocess.run(command, env=os.environ | given, cwd=ROOT, capture_output=True, text=True)
    imported = run.stdout.partition("imported: ")[2].split()
    assert "start_llm.cli" in imported, run.stdout
    return run.returncode, run.stderr, HEAVY & set(imported)


SOME = {"serve --prot 1", "serve @/unknown"}


@pytest.mark.live
@pytest.mark.parametrize(
    ("line", "environment", "expected"),
    [pytest.param(*row, marks=[] if row[0] in SOME else pytest.mark.slow) for row in TABLE],
)
def test_it_is_refused_before_anything_heavy_is_imported(
    line: str, environment: dict[str, str], expected: str, places: Path, bare: None
) -> None:
    code, said, heavy = run_alone(line, environment, places)
    check(line, code, said, expected)
    assert not heavy


def test_a_whole_checkpoint_is_not_refused(places: Path, bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    monkeypatch.setattr("start_llm.cli.running.called", lambda command, typed, settings: begun.append(settings) or 0)
    assert main(["serve", str(places / "whole"), "--port", "0"]) == 0
    assert main(["serve", "owner/name", "--port", "0"]) == 0
    assert len(begun) == 2


def test_a_port_that_start_llm_has_is_told_with_its_model(bare: None, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as port:
        assert main(["serve", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert "start_llm serves served-name there" in said and "launch pi" in said and said.count("\n") == 1


def test_a_port_that_somebody_else_has_is_told_with_the_process(bare: None, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    said = capsys.readouterr().err
    assert f"process {os.getpid()}" in said and "serve --port" in said and said.count("\n") == 1


@pytest.mark.parametrize(("stored", "says"), [(b"MLX_PORT 8099\n", "line 1 (MLX_PORT)"), (b"\xff\xfe\n", "UTF-8")])
def test_a_broken_file_of_settings_gets_one_sentence(
    stored: bytes, says: str, bare: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home := tmp_path / "home").mkdir()
    (home / ".env").write_bytes(stored)
    code = main(["serve"])
    check("serve", code, capsys.readouterr().err, says)
