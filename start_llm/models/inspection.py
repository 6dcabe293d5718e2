"""Has a model folder that is new here read by a child process first, so that it cannot harm the server. Knows no MLX.

A tokenizer, a chat template and a model's code may loop, eat memory or crash; nothing inside a process can stop all of
that. The child (`inspection_child`) reads all of them under limits of computing time and memory. What it found is kept
(`probe_table`), so that each folder is inspected once. Python code that a checkpoint brings is not limited: whoever
sets TRUST_REMOTE_CODE trusts it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import ChainMap
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from start_llm.core.errors import NotSupported
from start_llm.core.settings import Settings
from start_llm.core.sizes import as_size
from start_llm.host.home import python_path
from start_llm.models.capabilities import ProbeResult
from start_llm.models.checkpoint import CheckpointError, check_source, library_of, read_config
from start_llm.models.fingerprint import stamps_of, tokenizer_key
from start_llm.models.probe_table import PROBES, decode, keep_probe, probe_key, read_probe

MOST_BYTES = 4 << 30
"""Of memory that the child may have; without weights a model takes a tenth of that."""
STAGE_SECONDS = {"tokenizer": 30.0, "chat template": 10.0, "model": 60.0}
"""Of computing, all threads of the child together."""
MOST_SECONDS = 300.0
"""By the clock, for a disk that hangs."""
LOOK_SECONDS = 0.05


def inspect_once(settings: Settings, source: str, folder: Path) -> ProbeResult | None:
    """What the child found out; ``None``: the folder is trusted, or its template is to be tried where it is used.

    `source`: what the model is called in errors. Any thread but the model thread. Raises NotSupported with the reason
    if the folder cannot be served.
    """
    try:
        check_source(str(folder), command="", trust_code=settings.trust_remote_code)
        config = read_config(folder)
    except (CheckpointError, OSError, ValueError) as error:
        raise NotSupported(f"{source} cannot be loaded: {str(error).partition(': ')[2] or error}") from error
    if config.get("model_file"):
        return None
    vision = settings.vision != "off" and settings.kv_bits is None
    read = f"inspected {vision} {tokenizer_key(folder)} {sorted(stamps_of(folder))}"  # all that the child reads
    table, key = settings.cache_dir / PROBES, probe_key(read)
    known = read_probe(table, key)
    if known is None:
        known = _inspect(source, folder, vision, MOST_SECONDS)
        if known is not None:
            keep_probe(table, key, known)
    return known


def _inspect(source: str, folder: Path, vision: bool, seconds: float) -> ProbeResult | None:
    """Raises NotSupported."""
    name = source.rstrip("/").rsplit("/", 1)[-1]
    arguments = [str(folder.resolve()), name, "vision" if vision else "text", json.dumps(STAGE_SECONDS)]
    with tempfile.TemporaryFile() as output:
        child = _start(arguments, output)
        try:
            problem = _wait(child, seconds)
        finally:
            child.kill()  # does nothing to one that has ended
            child.wait()
        output.seek(0)
        lines = [json.loads(line) for line in output.read(1 << 20).splitlines()[-10:] if line.endswith(b"}")]
    said = ChainMap(*reversed(lines))  # the last word on each
    stage, error = said.get("stage", "process"), said.get("error")
    if not problem and "result" in said:
        return None if said["result"] is None else decode(said["result"])
    if not problem and error and stage == "model":
        raise NotSupported(f"{library_of(read_config(folder))} cannot load {source}: {error}")
    problem = problem or (f"cannot be read: {error}" if error else _ending(child.returncode, stage))
    raise NotSupported(f"{source} cannot be loaded: its {stage} {problem}.")


def _start(arguments: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "start_llm.models.inspection_child", *arguments]
    environment, nothing = os.environ | {"PYTHONPATH": python_path()}, subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nothing, stdout=output, stderr=nothing, env=environment)


def _wait(child: subprocess.Popen[bytes], seconds: float) -> str:
    """Waits for the child's end. Why it has to be stopped before that, or an empty text."""
    until = time.monotonic() + seconds
    while True:
        try:
            child.wait(LOOK_SECONDS)
            return ""
        except subprocess.TimeoutExpired:
            if _resident_bytes(child.pid) > MOST_BYTES:
                return f"takes more than {as_size(MOST_BYTES)} of memory"
            if time.monotonic() > until:
                return f"was not read within {seconds:g} s"


def _ending(code: int, stage: str) -> str:
    if code == -signal.SIGPROF:
        return f"takes more than {STAGE_SECONDS[stage]:g} s of computing"
    return f"ends the process that reads it ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"


def _resident_bytes(process: int) -> int:
    """Memory that a process has now; 0 if it has ended."""
    with suppress(psutil.Error):
        return int(psutil.Process(process).memory_info().rss)
    return 0
