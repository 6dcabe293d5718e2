"""The commands `pull` and `rm`: models from a hub, and their end."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from rich.console import Console

from start_llm.core.settings import Settings
from start_llm.dashboard.progress import ProgressBars
from start_llm.host.home import command as program
from start_llm.host.ports import served_model
from start_llm.models.catalog import hub_folder
from start_llm.models.checkpoint import is_path
from start_llm.models.pull import PullError, fetch_lock, pull
from start_llm.models.recommended import full_name, published_head
from start_llm.service.place import running_ports

GB = 1e9


def main_pull(settings: Settings, options: argparse.Namespace) -> int:
    """0 once all of the model is here and verified, with or without the head that drafts for it; 1 with a sentence."""
    repository = full_name(options.name) or options.name
    if not _pull(repository, options.revision, f" Serve it: {program()} serve {options.name}"):
        return 1
    wanted = settings.drafts != "off" and settings.draft_model == "auto"
    if wanted and (head := published_head(repository)):
        _pull(head, None, f" It drafts for {options.name} (DRAFT_MODEL=auto).")
    return 0


def _pull(repository: str, revision: str | None, then: str) -> bool:
    """Fetches a model and prints the outcome, with `then` behind it. False: it failed, and stderr says why."""
    bars = ProgressBars(Console(stderr=True))
    try:
        done = pull(repository, bars, revision=revision)
    except PullError as error:
        bars.close()
        print(error, file=sys.stderr)
        return False
    bars.close()
    came = f"{done.fetched / GB:.2f} GB fetched" if done.fetched else "all of it was here"
    print(f"{repository} at {done.commit[:12]}: {done.size / GB:.2f} GB, {came}.{then}")
    return True


def main_rm(settings: Settings, options: argparse.Namespace) -> int:
    """Removes a model that came from a hub. 1 if it is not there, is somebody's own folder, or is served now."""
    repository = full_name(options.name) or options.name
    refusal = _not_removable(settings, repository)
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return 1
    folder = hub_folder(repository)
    lock = fetch_lock(folder)
    if not lock.take():
        print(f"{repository} is being fetched by another process; end that first.", file=sys.stderr)
        return 1
    try:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        shutil.rmtree(folder)
    finally:
        lock.drop()
    print(f"{repository} was removed: {size / GB:.2f} GB are free again.")
    return 0


def _not_removable(settings: Settings, repository: str) -> str | None:
    """Why it cannot be removed, as a sentence."""
    if is_path(repository):
        return f"{repository} is a folder of yours; remove it yourself if you want to (rm -r)."
    try:
        found = hub_folder(repository).is_dir()  # also of a fetch that was begun and never ended
    except ValueError:
        found = False
    if not found:
        return f"{repository} is not on this disk; `{program()} models` lists what is."
    for port in running_ports(settings):
        if served_model(settings.mlx_host, port, settings.api_key) == repository.rpartition("/")[2]:
            return f"{repository} is served on port {port}; `{program()} stop --port {port}` first."
    folder = hub_folder(repository)
    if folder.is_symlink():  # to a disk of the user's, say: what is behind it is not ours to remove
        return f"{folder} is a link; remove {os.path.realpath(folder)} yourself if you want to."
    return None
