"""The commands `search`, `pull` and `rm`: models from a hub, and their end."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

from start_llm.core.settings import Settings
from start_llm.core.sizes import as_size
from start_llm.dashboard.progress import ProgressLines
from start_llm.dashboard.tables import print_table
from start_llm.dashboard.terminal import LiveRows, make_console
from start_llm.host.home import command as program
from start_llm.host.home import home
from start_llm.models.catalog import EMBEDDED_NAME
from start_llm.models.checkpoint import is_path
from start_llm.models.device import inspect_device, likely_accelerator
from start_llm.models.hub_search import search_hub
from start_llm.models.pull import PullError, pull, removable, remove
from start_llm.models.recommended import full_name, published_head
from start_llm.models.servers import check_unused


def main_pull(settings: Settings, options: argparse.Namespace) -> int:
    """Returns once the whole model is here and verified, with or without its head for drafts. Raises PullError."""
    repository = full_name(options.name) or options.name
    _pull(repository, options.revision, f" Serve it: {program()} serve {options.name}")
    wanted = settings.drafts != "off" and settings.draft_model == "auto"
    if wanted and (head := published_head(repository)):
        try:
            _pull(head, None, f" It drafts for {options.name} (DRAFT_MODEL=auto).")
        except PullError as error:
            print(error, file=sys.stderr)
    return 0


def _pull(repository: str, revision: str | None, then: str) -> None:
    """Fetches a model and prints the outcome, with `then` behind it. Raises PullError."""
    with closing(LiveRows(make_console(stderr=True))) as rows:
        done = pull(repository, ProgressLines(partial(print, file=sys.stderr, flush=True), rows), revision=revision)
    came = f"{as_size(done.fetched)} fetched" if done.fetched else "all of it was here"
    print(f"{repository} at {done.commit[:12]}: {as_size(done.size)}, {came}.{then}")


def main_rm(settings: Settings, options: argparse.Namespace) -> int:
    """Removes a model that came from a hub.

    Raises PullError, Conflict: it is not there, is somebody's own folder, or is in use.
    """
    repository = full_name(options.name) or options.name
    _check_came_from_hub(options.name, home() / settings.cache_dir / "models")
    removable(repository)
    check_unused(repository, settings)
    size = remove(repository)
    print(f"{repository} was removed: {as_size(size)} are free again.")
    return 0


def _check_came_from_hub(name: str, own: Path) -> None:
    """`own`: where the embedded model lies, and what the user has put there. Raises PullError."""
    if name == EMBEDDED_NAME:
        raise PullError(f"{name} comes with start_llm and stays on the list. `rm -r {own / name}-*` frees its bytes.")
    if not is_path(name) and (own / name).is_symlink():
        raise PullError(f"{name} is a link to a folder of yours. `rm {own / name}` takes it off the list.")
    if not is_path(name) and (own / name).is_dir():
        raise PullError(f"{name} is a folder of yours. `rm -r {own / name}` removes it.")


def main_search(settings: Settings, options: argparse.Namespace) -> int:
    """Models on the hub, those that are fetched most first. Raises PullError: there is no hub or no model."""
    words = " ".join(options.words)
    found = search_hub(words)
    usable = inspect_device(likely_accelerator).usable
    if options.json:
        print(json.dumps([asdict(model) | {"fits": model.fits(usable)} for model in found], indent=2))
        return 0
    if not found:
        raise PullError(f"The hub has no model for MLX with {words!r} in its name.")
    fits = {True: "yes", False: "no", None: "-"}
    rows = [
        (
            model.short or model.name,
            as_size(model.bytes) if model.bytes else "-",
            model.quantisation or "-",
            f"{model.context:,}" if model.context else "-",
            f"{model.downloads:,}",
            fits[model.fits(usable)],
        )
        for model in found
    ]
    print_table(("NAME", "SIZE", "QUANT", "CONTEXT", "DOWNLOADS", "FITS"), rows, words=("NAME",))
    print(f"FITS: weights and KV of 32k tokens in {as_size(usable)}. `{program()} pull NAME` fetches one.")
    return 0
