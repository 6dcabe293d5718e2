"""The one command: makes .venv with everything in it, then runs start_llm. Standard library only.

    python3.12 install_and_run.py [COMMAND] [flags]        help lists the commands

The first start installs (a step a line); later ones find a stamp file and hand over at once, without the network.
"""

import fcntl
import hashlib
import importlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import NoReturn

if sys.version_info[:2] != (3, 12):  # this file parses on older versions, so that they reach this line
    sys.exit(
        f"start_llm needs Python 3.12, this is {platform.python_version()}. Install it "
        "(macOS: brew install python@3.12, elsewhere: uv python install 3.12) and run: python3.12 install_and_run.py"
    )

ROOT = Path(__file__).resolve().parent


def python_anywhere() -> str:
    """This Python, as it is called in every folder and shell.

    The `python3.12` of pyenv and mise looks for a file in the folder first. It puts the Python that it finds there in
    front of itself on PATH, for this process only.
    """
    found = [shutil.which("python3.12", path=folder) for folder in os.get_exec_path()]
    are_this = {os.path.realpath(each) == os.path.realpath(sys.executable) for each in found if each}
    return "python3.12" if are_this == {True} else sys.executable


COMMAND = shlex.join([python_anywhere(), str(Path(__file__).resolve())])
OWN = {  # what start_llm itself does not know; all other commands are its own
    "test": "the checks of every day; --all: those of CI; other flags go to pytest (--slow, --e2e, -k NAME)",
    "run": "run a script in this environment: run scripts/agent_bench.py --help",
}
UV = "uv==0.13.8"
INSTALLER = 2  # part of the stamp: raise it when what is done to the venv below changes
STAMP = "start_llm.json"
UNFINISHED = "start_llm.unfinished"
COMPILE_SECONDS = 300.0  # after the other checks; 45 s is usual for all of it


def main(arguments: list[str]) -> int:
    command, flags = parse(arguments)
    folder = ROOT / ".venv"
    foreign = contamination(folder)
    if foreign:
        print(f"{folder} holds parts of another Python than 3.12:", *foreign, sep="\n  ", file=sys.stderr)
        print(f"Mend it: delete these, or the whole folder (rm -rf {folder}), and start again.", file=sys.stderr)
        return 1
    dev = command in {"test", "run"}
    if not is_ready(folder, dev=dev):
        root = os.open(ROOT, os.O_RDONLY)
        try:
            fcntl.flock(root, fcntl.LOCK_EX)  # two first starts at once: the second waits and finds it done
            if not is_ready(folder, dev=dev):
                install(folder, dev=dev)
        finally:
            os.close(root)
    if command == "test":
        return run_checks(folder, flags)
    return hand_over(folder, flags if command == "run" else ["-m", "start_llm", command, *flags])


def parse(arguments: list[str]) -> tuple[str, list[str]]:
    """The command and its flags; flags alone are for ``serve``. Ends the process where there is only help to give."""
    if arguments and arguments[0] in OWN and not names_a_model(arguments):
        if arguments[1:2] and arguments[1] in {"-h", "--help"}:
            print(f"usage: {COMMAND} {arguments[0]} ...\n\n{OWN[arguments[0]]}")
            sys.exit(0)
        if arguments == ["run"]:
            print(f"run: which script? For instance: {COMMAND} run scripts/agent_bench.py --help", file=sys.stderr)
            sys.exit(2)
        return arguments[0], arguments[1:]
    os.environ["START_LLM_COMMAND"] = COMMAND  # what help and hints tell the user to type
    reading = importlib.import_module(
        "start_llm.cli.reading"
    )  # standard library only, so it can be asked before the venv
    try:
        reading.read(arguments)
    except reading.HelpRequested as answer:
        print(answer)
        if arguments[0] in {"-h", "--help"} or arguments == ["help"]:
            print("\nThis repository:", *(f"  {name:12}{what}" for name, what in OWN.items()), sep="\n")
        sys.exit(0)
    except reading.UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    arguments = reading.translated(arguments)
    return ("serve", arguments) if not arguments or arguments[0].startswith("-") else (arguments[0], arguments[1:])


def names_a_model(arguments: list[str]) -> bool:
    """Whether ``run`` is meant as Ollama's: ``run MODEL``, not a script of this repository."""
    what = arguments[1:2]
    return arguments[0] == "run" and bool(what) and not what[0].startswith("-") and not what[0].endswith(".py")


def say(text: str) -> None:
    print(f"start_llm: {text}", flush=True)


# --- is it there, is it ours ---------------------------------------------------------------


def contamination(folder: Path) -> list[str]:
    """What lies in the venv that belongs to another Python; a line each, empty if nothing does."""
    found = []
    config = folder / "pyvenv.cfg"
    if config.is_file():
        version = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+)", config.read_text(), re.MULTILINE)
        if version and version[1] != "3.12":
            found.append(f"{config}: made by Python {version[1]}")
    for path in sorted((folder / "bin").glob("*")):
        other = other_version(path.name) or other_version(path.resolve().name)
        if other is None and path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                head = file.read(256).decode("latin-1")
            # The interpreter stands in the first line, or in the second where its path is too long for a #! line.
            other = other_version(" ".join(head.splitlines()[:2])) if head.startswith("#!") else None
        if other:
            found.append(f"{path}: of Python {other}")
    for library in sorted((folder / "lib").glob("python*")):
        if library.name != "python3.12":
            found.append(f"{library}: site-packages of another Python")
        for module in sorted(library.glob("site-packages/*.cpython-*")):
            if ".cpython-312-" not in module.name:
                found.append(f"{module}: compiled for another Python")
    return found


def other_version(text: str) -> str | None:
    """The Python version that a file name or a #! line names, if it is not 3.12."""
    for version in re.findall(r"(?:^|/)(?:python|pip)-?(\d\.\d+)(?=$|[\s\"'])", text):
        if version != "3.12":
            return str(version)
    return None


def fingerprint(folder: Path, *, dev: bool) -> dict[str, object]:
    """What a finished install was made from."""
    marks: dict[str, object] = {
        "installer": INSTALLER,
        "python": sys.implementation.cache_tag,
        "machine": platform.machine(),
        "folder": str(folder),
        "requirements": digest("requirements.txt", "constraints.txt"),
        "extras": list(extras()),
    }
    if dev:
        marks["requirements-dev"] = digest("requirements-dev.txt", "constraints.txt")
    return marks


def extras() -> tuple[str, ...]:
    """Pins of the extras that a clone has from the start: the proxy, and what reads images."""
    pins: tuple[str, ...] = importlib.import_module("start_llm.core.extras").OF_A_CLONE  # standard library only
    return pins


def digest(*names: str) -> str:
    return hashlib.sha256(b"\0".join((ROOT / name).read_bytes() for name in names)).hexdigest()


def read_stamp(folder: Path) -> dict[str, object]:
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def is_ready(folder: Path, *, dev: bool) -> bool:
    stamp = read_stamp(folder)
    wanted = fingerprint(folder, dev=dev)
    return (folder / "bin" / "python").exists() and all(stamp.get(key) == value for key, value in wanted.items())


# --- installing ----------------------------------------------------------------------------


def install(folder: Path, *, dev: bool) -> None:
    """Makes or mends the venv. A kill at any moment leaves `UNFINISHED` and no stamp: the next start begins anew."""
    started, stamp = time.monotonic(), read_stamp(folder)
    moved = bool(stamp) and stamp.get("folder") != str(folder)
    broken = folder.exists() and not (folder / "bin" / "python").exists()
    if moved or broken or (folder / UNFINISHED).exists():
        say(f"removing the {'moved' if moved else 'unfinished'} {folder}")
        remove(folder)
    folder.mkdir(exist_ok=True)
    (folder / UNFINISHED).touch()
    (folder / STAMP).unlink(missing_ok=True)
    python = folder / "bin" / "python"
    uv = shutil.which("uv")
    if not python.exists():
        say(f"making {folder} with Python {platform.python_version()}")
        make_venv(folder, with_pip=uv is None)
    if uv is None:
        uv = str(folder / "bin" / "uv")
        if not Path(uv).exists():
            say(f"installing {UV}")
            run([str(python), "-m", "pip", "install", "--disable-pip-version-check", UV])
    lists = ["requirements.txt", *(["requirements-dev.txt"] if dev or "requirements-dev" in stamp else [])]
    say(f"installing {' and '.join(lists)}")
    wanted = [*extras(), *(part for name in lists for part in ("-r", str(ROOT / name)))]
    run_uv([uv, "pip", "install", "--python", str(python), *wanted, "-c", str(ROOT / "constraints.txt")])
    # Makes the package importable from any folder without PYTHONPATH, which children would inherit.
    (site_packages(folder) / "start_llm.pth").write_text(f"{ROOT}\n")
    done = fingerprint(folder, dev=len(lists) == 2)
    done["preload"] = fast_products(folder) if sys.platform == "linux" else None
    fresh = folder / f"{STAMP}.new"
    fresh.write_text(json.dumps(done, indent=1))
    fresh.replace(folder / STAMP)
    (folder / UNFINISHED).unlink()
    say(f"installed in {time.monotonic() - started:.0f} s")


def fast_products(folder: Path) -> str | None:
    """What to preload for fast float32 matrix products on the CPU, or nothing."""
    blas = importlib.import_module("start_llm.host.blas")  # standard library only
    preload: str | None = blas.bridge(folder)
    if preload is None:
        say("no C compiler and no libopenblas.so.0: matrix products on the CPU stay about 30 times slower (install cc)")
    else:
        say(f"float32 matrix products: {'OpenBLAS' if preload.startswith('/') else preload}")
    return preload


def remove(folder: Path) -> None:
    """Takes the folder away at once, then deletes it: a kill in the middle must not leave half of it in its place."""
    away = folder.with_name(f"{folder.name}.removed")
    shutil.rmtree(away, ignore_errors=True)
    folder.rename(away)
    shutil.rmtree(away)


def make_venv(folder: Path, *, with_pip: bool) -> None:
    try:
        venv.create(folder, with_pip=with_pip, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"Could not make {folder} ({error}). On Debian and Ubuntu: apt install python3.12-venv. "
            "Or install uv, which needs no pip: https://docs.astral.sh/uv"
        )


def site_packages(folder: Path) -> Path:
    return folder / "lib" / "python3.12" / "site-packages"


def run(command: list[str]) -> None:
    """Runs an installing step; its own progress bar goes to the terminal."""
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code != 0:
        failed(command, code)


def run_uv(command: list[str]) -> None:
    """Runs uv with one bar for all downloads in place of its list of 150 packages; says its own words if it fails."""
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}
    )
    assert process.stderr is not None
    said, sizes, done, bar = [], {}, set(), sys.stdout.isatty()
    for line in process.stderr:
        said.append(line)
        words = line.split()
        if words[:1] == ["Downloading"] and len(words) > 2:
            sizes[words[1]] = megabytes(words[2])
        elif words[:1] == ["Downloaded"] and len(words) > 1:
            done.add(words[1])
        elif words[:1] and words[0] in {"Resolved", "Prepared", "Installed", "Audited"}:
            sizes = {}
            print("\r\033[K" if bar else "", end="")
            say(line.strip())
        if bar and sizes:
            part = sum(sizes.get(name, 0) for name in done) / (sum(sizes.values()) or 1)
            filled = "#" * round(part * 30)
            print(f"\r\033[K[{filled:-<30}] {part:4.0%} of {sum(sizes.values()):,.0f} MB", end="", flush=True)
    code = process.wait()
    if code != 0:
        sys.stderr.writelines(["\n", *said])
        failed(command, code)


def megabytes(text: str) -> float:
    """uv's ``(20.1MiB)`` in thousands of thousands; 0 where it says something else."""
    size = re.fullmatch(r"\(([\d.]+)([KMG])iB\)", text)
    return float(size[1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[size[2]] / 1e6 if size else 0.0


def failed(command: list[str], code: int) -> NoReturn:
    sys.exit(f"This step failed with exit code {code}; why stands above. Start again to go on:\n  {' '.join(command)}")


# --- running -------------------------------------------------------------------------------


def run_environment(folder: Path) -> dict[str, str]:
    """The environment with the shim preloaded, if there is one; without what would point at another Python."""
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONHOME", "PYTHONPATH"}}
    preload = read_stamp(folder).get("preload")
    if isinstance(preload, str) and (not preload.startswith("/") or Path(preload).exists()):
        others = [name for name in environment.get("LD_PRELOAD", "").split(":") if name and name != preload]
        environment["LD_PRELOAD"] = ":".join([preload, *others])
    return environment


def hand_over(folder: Path, arguments: list[str]) -> NoReturn:
    python = str(folder / "bin" / "python")
    sys.stdout.flush()
    os.execve(python, [python, *arguments], run_environment(folder))


def run_checks(folder: Path, flags: list[str]) -> int:
    """All checks, each named, all of them even if one fails. Flags go to pytest."""
    python = [str(folder / "bin" / "python"), "-m"]
    environment = run_environment(folder)
    # Tests start many processes. Without kept bytecode each compiles all that it imports: 15 s for LiteLLM alone.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    wrong, took = [], []

    def ended(name: str, code: int, started: float) -> None:
        took.append(f"{name} {time.monotonic() - started:.0f} s")
        if code != 0:
            wrong.append(name)

    def check(name: str, command: list[str]) -> None:
        say(f"=== {name}")
        started = time.monotonic()
        ended(name, subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode, started)

    compiling = [] if compiled() else compile_beside(python, environment)
    mypy_started = time.monotonic()  # it runs beside the others: without its cache it takes 15 s
    mypy = subprocess.Popen(
        [*python, "mypy"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    check("ruff check", [*python, "ruff", "check", "."])
    check("ruff format", [*python, "ruff", "format", "--check", "."])
    check("imports", [str(folder / "bin" / "lint-imports")])
    wait_for(compiling)
    check("pytest", [*python, "pytest", *flags])
    said = mypy.communicate()[0]
    say(f"=== mypy\n{said.strip()}")
    ended("mypy", mypy.returncode, mypy_started)
    say(", ".join(took))
    say(f"FAILED: {', '.join(wrong)}" if wrong else "all checks passed")
    return 1 if wrong else 0


def wait_for(compiling: list["subprocess.Popen[bytes]"]) -> None:
    """Until all have ended, or COMPILE_SECONDS are over: the tests do without what is missing."""
    until = time.monotonic() + COMPILE_SECONDS
    for process in compiling:
        try:
            code = process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code != 0:
            say(f"compiling beforehand failed (exit code {code}); the tests take longer")


def compiled() -> bool:
    """Whether the tests have been collected here before."""
    return any((ROOT / "tests" / "__pycache__").glob("*.pyc"))


def compile_beside(python: list[str], environment: dict[str, str]) -> list["subprocess.Popen[bytes]"]:
    """In a fresh clone: has all compiled once, on a core that the checks before the tests leave idle.

    Otherwise each of pytest's workers does it, all at the same time (22 s of computing), and each first LiteLLM.
    What goes wrong here is told by the tests.
    """
    litellm = (
        "import os; from start_llm.proxy.config import proxy_environment; "
        "os.environ.update(proxy_environment(os.environ)); import litellm.proxy.proxy_cli, litellm.proxy.proxy_server"
    )
    collecting = [*python, "pytest", "-n", "0", "--collect-only", "-p", "no:cacheprovider"]
    return [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in (collecting, [*python[:-1], "-c", litellm])
    ]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
