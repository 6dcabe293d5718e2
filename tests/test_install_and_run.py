from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import install_and_run as bootstrap
from start_llm.host import blas

SCRIPT = Path(bootstrap.__file__)


@pytest.fixture(autouse=True)
def environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("START_LLM_COMMAND", "x")
    monkeypatch.delenv("START_LLM_COMMAND")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with its requirement files and no venv; the path of the venv to be."""
    for name in ("requirements.txt", "requirements-dev.txt", "constraints.txt"):
        (tmp_path / name).write_text("x==1\n")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    return tmp_path / ".venv"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Installing without a network: the steps are logged, the venv is an empty one."""
    log: list[str] = []

    def make(folder: Path, *, with_pip: bool) -> None:
        log.append(f"venv pip={with_pip}")
        for name in ("bin", "lib/python3.12/site-packages"):
            (folder / name).mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(bootstrap, "make_venv", make)
    monkeypatch.setattr(bootstrap, "run", lambda command: log.append(f"pip {command[-1]}"))
    monkeypatch.setattr(bootstrap, "run_uv", lambda command: log.append(f"uv {command.count('-r')}"))
    monkeypatch.setattr(bootstrap, "fast_products", lambda folder: "libopenblas.so.0")
    monkeypatch.setattr(shutil, "which", lambda name: "/opt/uv")
    return log


# --- another Python -----------------------------------------------------------


def test_it_parses_on_old_pythons() -> None:
    ast.parse(SCRIPT.read_text(), feature_version=(3, 7))


@pytest.mark.live
@pytest.mark.parametrize("version", [(3, 7, 3), (3, 11, 9), (3, 13, 0)])
def test_another_version_gets_one_line(version: tuple[int, int, int]) -> None:
    code = f"import runpy, sys; sys.version_info = {version}; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1
    assert "needs Python 3.12" in run.stderr
    assert "brew install python@3.12" in run.stderr


def test_standard_library_only() -> None:
    names = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).partition(".")[0])
    assert names <= sys.stdlib_module_names


# --- commands -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ("serve", [])),
        (["--port", "1"], ("serve", ["--port", "1"])),
        (["demo"], ("demo", [])),
        (["run", "qwen3.6-27b", "hi"], ("chat", ["--model", "qwen3.6-27b", "hi"])),
        (["run", "scripts/x.py"], ("run", ["scripts/x.py"])),
        (["test", "--e2e", "-k", "x"], ("test", ["--e2e", "-k", "x"])),
        (["launch", "pi", "--", "-p", "x"], ("launch", ["pi", "--", "-p", "x"])),
    ],
)
def test_command_and_flags(arguments: list[str], expected: tuple[str, list[str]]) -> None:
    assert bootstrap.parse(arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["srve"], ["did you mean serve?", f"{bootstrap.COMMAND} help"]), (["run"], ["which script"])],
)
def test_what_is_no_command_is_refused_in_a_line(
    arguments: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        bootstrap.parse(arguments)
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and said.count("\n") == 1 and all(words in said for words in says)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--help"], "This repository:"),
        (["help"], "install_and_run.py recommend"),
        (["help", "serve"], "--port PORT"),
        (["test", "--help"], "pytest"),
        (["run", "-h"], "script"),
        (["--version"], "0."),
    ],
)
def test_help_helps_and_runs_nothing(arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        bootstrap.parse(arguments)
    assert exit_.value.code == 0 and part in capsys.readouterr().out


@pytest.mark.live
def test_what_is_asked_before_the_venv_is_there_needs_nothing_of_it() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import start_llm.cli.reading as r; r.read(['serve'])"
    subprocess.run([sys.executable, "-S", "-I", "-c", code, str(SCRIPT.parent)], check=True)


# --- contamination ------------------------------------------------------------


def put(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        pytest.param(["real", "none", "real"], True, id="a python"),
        pytest.param(["links"], True, id="a link to it"),
        pytest.param(["real", "shims"], False, id="behind a shim that put it in front"),
        pytest.param(["shims"], False, id="a shim alone"),
        pytest.param(["none"], False, id="none"),
    ],
)
def test_the_python_of_printed_commands_is_found_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: list[str], found: bool
) -> None:
    """The `python3.12` of pyenv is a script that looks for a version in the folder that it is called in."""
    for name in ("real", "shims"):
        put(tmp_path / name / "python3.12")
        (tmp_path / name / "python3.12").chmod(0o755)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "python3.12").symlink_to(tmp_path / "real" / "python3.12")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "real" / "python3.12"))
    monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / folder) for folder in folders))
    assert bootstrap.python_anywhere() == ("python3.12" if found else sys.executable)
    assert shlex.split(bootstrap.COMMAND)[1] == str(SCRIPT)


def test_a_venv_of_this_python_is_clean(tmp_path: Path) -> None:
    folder = tmp_path / "python3.13" / ".venv"  # another version in a parent's name is no sign
    bootstrap.venv.create(folder, with_pip=False, symlinks=True)
    put(folder / "bin" / "pip3.12", f"#!{folder}/bin/python\n")
    put(folder / "bin" / "ruff", f"#!/bin/sh\n'''exec' '{folder}/bin/python3.12' \"$0\"\n")
    put(folder / "lib/python3.12/site-packages/x.cpython-312-x86_64-linux-gnu.so")
    put(folder / "lib/python3.12/site-packages/y.abi3.so")
    assert bootstrap.contamination(folder) == []
    assert bootstrap.contamination(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bin/python3.14", ""),
        ("bin/pip3.14", ""),
        ("bin/litellm", "#!/opt/homebrew/bin/python3.14\n"),
        ("bin/tool", "#!/bin/sh\n'''exec' '/very long/bin/python3.11' \"$0\" \"$@\"\n"),
        ("lib/python3.14/site-packages/x.py", ""),
        ("lib/python3.12/site-packages/x.cpython-314-darwin.so", ""),
        ("pyvenv.cfg", "home = /usr/bin\nversion = 3.11.7\n"),
        ("pyvenv.cfg", "home = /usr/bin\nversion_info = 3.13.0\n"),
    ],
)
def test_parts_of_another_python_are_found(tmp_path: Path, name: str, text: str) -> None:
    put(tmp_path / name, text)
    found = bootstrap.contamination(tmp_path)
    assert len(found) == 1
    assert str(tmp_path / Path(*Path(name).parts[:2])) in found[0]


def test_a_link_to_another_python_is_found(tmp_path: Path) -> None:
    put(tmp_path / "other" / "python3.13")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "other" / "python3.13")
    assert bootstrap.contamination(tmp_path) == [f"{tmp_path}/bin/python: of Python 3.13"]


def test_a_contaminated_venv_is_refused_with_a_way_out(
    folder: Path, steps: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    put(folder / "bin" / "pip3.14")
    assert bootstrap.main(["serve"]) == 1
    said = capsys.readouterr().err
    assert f"{folder}/bin/pip3.14" in said
    assert f"rm -rf {folder}" in said
    assert steps == []


# --- installing ---------------------------------------------------------------


def test_an_install_is_done_once(folder: Path, steps: list[str]) -> None:
    assert not bootstrap.is_ready(folder, dev=False)
    bootstrap.install(folder, dev=False)
    assert steps == ["venv pip=False", "uv 1"]
    assert bootstrap.is_ready(folder, dev=False)
    assert not (folder / bootstrap.UNFINISHED).exists()
    assert (bootstrap.site_packages(folder) / "start_llm.pth").read_text() == f"{folder.parent}\n"


def test_without_uv_it_goes_into_the_venv_first(
    folder: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    bootstrap.install(folder, dev=False)
    assert steps == ["venv pip=True", f"pip {bootstrap.UV}", "uv 1"]


def test_tests_add_their_packages_and_keep_them(folder: Path, steps: list[str]) -> None:
    bootstrap.install(folder, dev=False)
    assert not bootstrap.is_ready(folder, dev=True)
    bootstrap.install(folder, dev=True)
    assert bootstrap.is_ready(folder, dev=True)
    assert bootstrap.is_ready(folder, dev=False)
    (folder.parent / "requirements.txt").write_text("x==2\n")
    assert not bootstrap.is_ready(folder, dev=False)
    bootstrap.install(folder, dev=False)
    assert bootstrap.is_ready(folder, dev=True)
    assert steps == ["venv pip=False", "uv 1", "uv 2", "uv 2"]


def test_a_kill_in_the_middle_leaves_nothing_that_counts(
    folder: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(command: list[str]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "run_uv", killed)
        with pytest.raises(KeyboardInterrupt):
            bootstrap.install(folder, dev=False)
    put(folder / "half-installed")
    assert not bootstrap.is_ready(folder, dev=False)
    bootstrap.install(folder, dev=False)
    assert steps == ["venv pip=False", "venv pip=False", "uv 1"]
    assert not (folder / "half-installed").exists()


def test_a_kill_during_an_update_is_seen_too(folder: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap.install(folder, dev=False)
    (folder.parent / "constraints.txt").write_text("y==2\n")
    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "fast_products", lambda folder: sys.exit("killed"))
        with pytest.raises(SystemExit):
            bootstrap.install(folder, dev=False)
    assert bootstrap.read_stamp(folder) == {}
    bootstrap.install(folder, dev=False)
    assert steps == ["venv pip=False", "uv 1", "uv 1", "venv pip=False", "uv 1"]


def test_a_users_own_venv_is_kept(folder: Path, steps: list[str]) -> None:
    put(folder / "own", "mine")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    bootstrap.site_packages(folder).mkdir(parents=True)
    bootstrap.install(folder, dev=False)
    assert (folder / "own").read_text() == "mine"
    assert steps == ["uv 1"]


def test_a_moved_venv_is_made_again(folder: Path, steps: list[str], tmp_path: Path) -> None:
    bootstrap.install(folder, dev=False)
    stamp = (folder / bootstrap.STAMP).read_text()
    (folder / bootstrap.STAMP).write_text(stamp.replace(str(folder), "/elsewhere/.venv"))
    bootstrap.install(folder, dev=False)
    assert steps == ["venv pip=False", "uv 1"] * 2


@pytest.mark.live
def test_a_failing_step_shows_what_was_said(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('Resolved 3 packages', file=sys.stderr); sys.exit('no such version')"
    with pytest.raises(SystemExit, match="exit code 1"):
        bootstrap.run_uv([sys.executable, "-c", code])
    captured = capfd.readouterr()
    assert "no such version" in captured.err
    assert captured.out == "start_llm: Resolved 3 packages\n"


def test_uvs_sizes() -> None:
    found = [bootstrap.megabytes(text) for text in ("(1.5MiB)", "(512.0KiB)", "(2GiB)", "?")]
    assert found == [1.572864, 0.524288, 2147.483648, 0]


# --- running ------------------------------------------------------------------


def test_environment(folder: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap.install(folder, dev=False)
    monkeypatch.setenv("PYTHONPATH", "/other")
    monkeypatch.setenv("LD_PRELOAD", "libopenblas.so.0:/their/own.so")
    environment = bootstrap.run_environment(folder)
    assert "PYTHONPATH" not in environment
    expected = "libopenblas.so.0:/their/own.so"
    assert environment["LD_PRELOAD"] == expected
    stamp = folder / bootstrap.STAMP
    stamp.write_text(stamp.read_text().replace('"libopenblas.so.0"', '"/deleted/shim.so"'))
    assert bootstrap.run_environment(folder)["LD_PRELOAD"] == expected


class Commands:
    """What `run_checks` starts, in order; `failing` ends with 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
        self.order: list[str] = []
        self.failing = failing
        monkeypatch.setattr(subprocess, "run", self.run)
        monkeypatch.setattr(subprocess, "Popen", self.run)
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def run(self, command: list[str], env: dict[str, str], **_: object) -> Any:
        assert "PYTHONDONTWRITEBYTECODE" not in env
        words = ("--collect-only", "litellm", "ruff", "mypy", "lint-imports", "pytest")
        name = next(word for word in words if word in " ".join(command))
        self.order.append(f"{name} {command[-1]}" if name == "pytest" else name)

        def ended(*_: float) -> int:
            self.order.append(f"end {name}")
            return 0

        said = lambda: (f"what it says: {ended()}", None)  # noqa: E731
        return SimpleNamespace(returncode=int(name == self.failing), wait=ended, communicate=said)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("failing", ["ruff", "mypy", "pytest", ""])
def test_every_check_runs_and_one_failure_is_enough(
    failing: str, fresh: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fresh clone is compiled before the tests."""
    commands = Commands(monkeypatch, failing)
    put(bootstrap.ROOT / "tests" / "__pycache__" / ("note.txt" if fresh else "conftest.cpython-312.pyc"))
    assert bootstrap.run_checks(folder, ["--slow", "-x"]) == int(failing != "")
    compiling = ["--collect-only", "litellm"] if fresh else []
    ends = [f"end {name}" for name in compiling]
    assert commands.order == [*compiling, "mypy", "ruff", "ruff", "lint-imports", *ends, "pytest -x", "end mypy"]
    said = capsys.readouterr().out
    assert ("all checks passed" in said) == (failing == "")
    assert said.count(failing) > 1 and "what it says" in said
    assert all(f"=== {name}\n" in said for name in ("ruff check", "ruff format", "mypy", "imports", "pytest"))


@pytest.mark.live
def test_the_tests_do_without_what_is_not_compiled_in_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "COMPILE_SECONDS", 0.0)
    hangs = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    bootstrap.wait_for([hangs])
    assert hangs.returncode == -9 and "failed (exit code -9)" in capsys.readouterr().out


# --- the BLAS -----------------------------------------------------------------

needs_cc = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="the shim is for Linux with a C compiler"
)


@pytest.fixture
def python_folder(tmp_path: Path) -> Path:
    """A folder that looks like a venv and runs this Python with its packages."""
    python = tmp_path / "bin" / "python"
    put(python, f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    bootstrap.site_packages(tmp_path).mkdir(parents=True)
    return tmp_path


@pytest.mark.live
@needs_cc
def test_shim_gives_products_to_openblas_and_loads_it_late(python_folder: Path) -> None:
    import scipy_openblas32

    bundled = Path(scipy_openblas32.get_lib_dir()).parent
    (bootstrap.site_packages(python_folder) / "scipy_openblas32").symlink_to(bundled)
    shim = bootstrap.fast_products(python_folder)
    assert shim == str(python_folder / "lib/start_llm/libstart_llm_blas.so")
    code = (
        "import mlx.core as mx, numpy as np\n"
        "def loaded(): return int('libscipy_openblas.so' in open('/proc/self/maps').read())\n"
        "a = np.random.default_rng(0).normal(size=(96, 80)).astype(np.float32); before = loaded()\n"
        "c = np.array(mx.array(a) @ mx.array(a).T); d = np.array(mx.array(a).T @ mx.array(a))\n"
        "print(before, loaded(), np.allclose(c, a @ a.T, atol=1e-3), np.allclose(d, a.T @ a, atol=1e-3))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "LD_PRELOAD": shim}, capture_output=True, text=True, check=True
    )
    assert run.stdout == "0 1 True True\n"


@pytest.mark.live
@needs_cc
def test_a_broken_library_is_not_preloaded(
    python_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    put(bootstrap.site_packages(python_folder) / "scipy_openblas32/lib/libscipy_openblas.so", "not a library")
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert bootstrap.fast_products(python_folder) is None
    assert "30 times slower" in capfd.readouterr().out


def test_without_a_compiler_the_systems_openblas_is_used(python_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("ctypes.util.find_library", {"openblas": "libopenblas.so.0"}.get)
    monkeypatch.setattr(blas, "works", lambda folder, preload: preload == "libopenblas.so.0")
    assert bootstrap.fast_products(python_folder) == "libopenblas.so.0"


def test_every_direct_dependency_is_pinned_and_in_the_constraints() -> None:
    root = SCRIPT.parent
    lines = [
        line for name in ("requirements.txt", "requirements-dev.txt") for line in (root / name).read_text().split("\n")
    ]
    pins = {line.partition(";")[0].partition("[")[0].partition("==")[0].strip() for line in lines if "==" in line}
    assert all("==" in line.partition(";")[0] for line in lines if line and not line.startswith("#"))
    held = {line.partition("==")[0] for line in (root / "constraints.txt").read_text().splitlines() if "==" in line}
    assert pins <= held
    assert len(held) > 2 * len(pins)
