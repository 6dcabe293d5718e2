"""The bridge to OpenBLAS of an installed package; tests/test_install_and_run.py shows how it is made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from start_llm.host import blas
from start_llm.host.home import ANEW_VARIABLE

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="other systems have a fast BLAS of their own")


@pytest.mark.live
@linux_only
def test_a_process_begins_again_once_with_the_same_words(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from start_llm.host import blas\n"
        "blas.known = lambda prefix: 'libm.so.6'\n"
        "print(os.getpid(), os.getcwd(), sys.argv[1:], os.environ.get('LD_PRELOAD'), flush=True)\n"
        "folder = os.getcwd(); os.chdir('/'); blas.begin_again(folder); print('done')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in {"LD_PRELOAD", ANEW_VARIABLE}}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", code, "two words"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    before, after, done = run.stdout.splitlines()
    assert before.endswith("['two words'] None") and done == "done"
    assert after == before.replace("None", "libm.so.6"), "the same process, folder and words"


def test_what_is_known_is_not_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    answers = iter([None, "libopenblas.so.0", str(tmp_path / "bridge.so"), None])
    compiler: list[str | None] = [None]

    def bridge(prefix: Path) -> str | None:
        asked.append(prefix)
        return next(answers)

    monkeypatch.setattr(blas, "bridge", bridge)
    monkeypatch.setattr(blas, "_compiler", lambda: compiler[0])
    (tmp_path / "lib").mkdir()
    assert [blas.known(tmp_path), blas.known(tmp_path)] == [None, None] and len(asked) == 1
    compiler[0] = "/usr/bin/cc"  # installed meanwhile
    assert [blas.known(tmp_path), blas.known(tmp_path)] == ["libopenblas.so.0"] * 2 and len(asked) == 2
    compiler[0] = "/usr/bin/gcc"
    assert blas.known(tmp_path) == str(tmp_path / "bridge.so")
    assert blas.known(tmp_path) is None and len(asked) == 4, "that file is gone"
    (tmp_path / blas.NOTE).write_text("[]")
    with pytest.raises(StopIteration):
        blas.known(tmp_path)
