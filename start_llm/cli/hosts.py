"""What `doctor` says of the machines that compute one model together: each is asked as `serve` would start it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from start_llm.cli.finding import Finding
from start_llm.core.paths import expanded
from start_llm.core.settings import Settings, SettingsError
from start_llm.engine.ranks.hosts import RankHost, host_command, rank_hosts, versions
from start_llm.host.home import python_path
from start_llm.models.catalog import snapshot
from start_llm.models.fingerprint import fingerprint

HOST_SECONDS = 60.0


def main_describe(settings: Settings, options: argparse.Namespace) -> int:
    """What this machine has, as one line of JSON."""
    print(json.dumps(describe(options.source)))
    return 0


def describe(model: str | None) -> dict[str, Any]:
    """Versions, and which files of the model are here; ``None``: none."""
    folder = None if model is None else expanded(model)
    if model is not None and folder is not None and not folder.is_dir():
        folder = snapshot(model)
    found = None
    if folder is not None:
        with suppress(OSError):
            found = fingerprint(folder)
    return {"versions": versions(), "model": found}


def check_hosts(settings: Settings) -> Iterator[Finding]:
    """One of each host of HOSTS or HOSTFILE, this machine left out; all are asked at the same time."""
    try:
        hosts = rank_hosts(settings)[1:]
    except SettingsError as error:
        yield Finding("hosts", "bad", str(error))
        return
    if not hosts:
        return
    here = describe(settings.model_path)
    model = [] if settings.model_path is None else ["--source", settings.model_path]
    with ThreadPoolExecutor(len(hosts)) as pool:
        yield from pool.map(partial(_asked, here=here, model=model), hosts)


def _asked(host: RankHost, here: dict[str, Any], model: list[str]) -> Finding:
    try:
        run = subprocess.run(
            host_command(host, "describe", *model),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONPATH": python_path()},
            timeout=HOST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(host.name, "bad", f"does not answer in {HOST_SECONDS:g} s")
    except OSError as error:  # there is no ssh
        return Finding(host.name, "bad", f"cannot be asked: {error}")
    try:
        return _compared(host, here, json.loads(run.stdout.splitlines()[-1]))
    except (ValueError, LookupError, TypeError, AttributeError):
        words = run.stderr.strip().splitlines()[-1:]
        return Finding(host.name, "bad", f"does not answer: {words[0] if words else 'it says nothing'}")


def _compared(host: RankHost, here: dict[str, Any], there: dict[str, Any]) -> Finding:
    other = [f"{name} {value}" for name, value in there["versions"].items() if here["versions"].get(name) != value]
    if other:
        return Finding(host.name, "bad", f"answers, with other versions than here: {', '.join(other)}")
    if there["model"] is None or here["model"] is None:
        where = "there" if here["model"] is not None else "here"
        return Finding(host.name, "ok", f"answers, same versions; the start fetches the model, which is not {where}")
    if there["model"] != here["model"]:
        return Finding(host.name, "bad", "answers, same versions, but the files of its model are other ones")
    return Finding(host.name, "ok", f"answers, same versions, same model ({here['model'][:12]})")
