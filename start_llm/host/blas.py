"""Fast float32 matrix products on Linux's CPU: a bridge from MLX to OpenBLAS, which has to be preloaded.

A clone's `install_and_run.py` preloads it for everything; a `start-llm` that was installed as a package has it made at
the first start of a server and starts its own process anew with it. Standard library only: the installer asks it, too.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from start_llm.host.home import ANEW_VARIABLE

BRIDGE = Path("lib") / "start_llm" / "libstart_llm_blas.so"
NOTE = Path("lib") / "start_llm" / "blas.json"
SOURCE = Path(__file__).with_name("blas.c")
SECONDS = 120


def bridge(prefix: Path) -> str | None:
    """What to preload for the Python in `prefix`: our bridge, which is made, the system's OpenBLAS, or nothing."""
    packages = prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    library = packages / "scipy_openblas32" / "lib" / "libscipy_openblas.so"
    if (made := _compiled(prefix, library)) is not None and works(prefix, made):
        return made
    system = ctypes.util.find_library("openblas")
    return system if system and works(prefix, system) else None


def _compiled(prefix: Path, library: Path) -> str | None:
    """The path of the bridge, made anew; nothing where there is no compiler, no OpenBLAS or no place for it."""
    compiler, path = _compiler(), prefix / BRIDGE
    if compiler is None or not library.is_file():
        return None
    try:
        path.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            fresh = Path(scratch) / path.name
            define = f"-DOPENBLAS={json.dumps(str(library))}"
            command = [compiler, "-O2", "-shared", "-fPIC", define, str(SOURCE), "-o", str(fresh), "-ldl"]
            if subprocess.run(command, check=False).returncode != 0:
                return None
            os.replace(fresh, path)  # whoever computes with an older one keeps it
    except OSError:
        return None
    return str(path)


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def works(prefix: Path, preload: str) -> bool:
    """Whether MLX computes right with it; in a process of its own."""
    code = "import mlx.core as mx; a = mx.ones((64, 64)); assert (a @ a).sum().item() == 64**3"
    command = [str(prefix / "bin" / "python"), "-c", code]
    try:
        return subprocess.run(command, env=_with(preload), check=False, timeout=SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _with(preload: str) -> dict[str, str]:
    others = [name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    return {**os.environ, "LD_PRELOAD": ":".join([preload, *others]), ANEW_VARIABLE: "yes"}


def begin_again(folder: str) -> None:
    """Starts this process anew with the bridge, in `folder`; returns where there is none, or it is there already.

    The process keeps its number, its open files and its place with whoever started it.
    """
    if sys.platform != "linux" or ANEW_VARIABLE in os.environ or "blas" in os.environ.get("LD_PRELOAD", ""):
        return
    prefix = Path(sys.prefix)
    if prefix == Path(sys.base_prefix):
        return  # a Python of the system: nothing of ours goes into it
    preload = known(prefix)
    if preload is None:
        return
    os.chdir(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], _with(preload))


def known(prefix: Path) -> str | None:
    """`bridge`, which is asked once for this compiler: making and trying it takes seconds."""
    compiler, note = _compiler(), prefix / NOTE
    try:
        found = json.loads(note.read_text("utf-8"))
        preload: str | None = found["preload"]
        gone = preload is not None and preload.startswith("/") and not os.path.exists(preload)
        if found["compiler"] == compiler and not gone:
            return preload
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    preload = bridge(prefix)
    try:
        note.parent.mkdir(exist_ok=True)
        note.write_text(json.dumps({"compiler": compiler, "preload": preload}), "utf-8")
    except OSError:
        pass  # it is looked for again at the next start
    return preload
