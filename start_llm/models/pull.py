"""Fetches a model from a hub into the Hugging Face cache. Knows no MLX.

huggingface_hub throws away what it has of a file when its process ends, which is hard on files of many GB. So the large
ones (those with a SHA-256) are fetched here: into a file beside their place that the next try goes on with, verified,
then put where huggingface_hub looks for them. Everything else is its own work.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from start_llm.core.errors import Explained, NotFound
from start_llm.core.paths import expanded
from start_llm.core.sizes import as_size
from start_llm.files.atomic import write_atomic
from start_llm.files.locks import FileLock
from start_llm.host.home import command
from start_llm.models.background import Progress
from start_llm.models.catalog import DEFAULT_REVISION, hub_folder
from start_llm.models.checkpoint import is_path

PATTERNS = ("*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja")
SPARE_BYTES = 256 << 20  # of the disk that stay free
TRIES = 5  # without a byte of progress between them
PAUSE_SECONDS = 1.0  # before a second try; each further one waits so much longer
TIMEOUT_SECONDS = 30.0
REACH_SECONDS = 5.0

_SHA256, _COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{7,64}")
_REVISION = re.compile(r"\w[\w./+-]{0,200}")

_REFUSALS: tuple[tuple[type[Exception], str], ...] = (
    (HFValidationError, "{0!r} is no repository's name (owner/name)."),
    (GatedRepoError, "{0} is for those who have agreed to its terms; do so on its page, then `hf auth login`."),
    (RevisionNotFoundError, "{0} has no revision {1!r}."),
    (RepositoryNotFoundError, "The hub has no model {0}, or it is private; look at the spelling."),
    (Exception, "{0} is not here, and Hugging Face cannot be reached ({2}); `{3} models` lists what can be served."),
)
"""What is said of an answer of the hub: of the repository, its revision, and the reason. The first that fits counts."""


class PullError(Explained):
    """The model could not be fetched. The message is one sentence that says why and what to do."""


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    sha256: str  # empty for small ones, which are no LFS files


@dataclass(frozen=True)
class Pulled:
    folder: Path
    size: int  # bytes of all of it
    fetched: int  # bytes that came over the network now
    commit: str


def pull(
    repository: str,
    progress: Progress,
    *,
    revision: str | None = None,
    check: Callable[[Path], object] | None = None,
    sized: Callable[[int], object] = int,
) -> Pulled:
    """Fetches what serving needs of a repository; what is here already is not fetched again.

    Args:
        revision: a branch, tag or commit; what it is now is what all files are of.
        check: called with the folder that has the small files only, before large ones are fetched; may raise.
        sized: is told the bytes of all files, once they are known.

    Raises PullError: no such repository, no hub in reach, no room on the disk, a file that is not what the hub says.
    """
    revision = revision or DEFAULT_REVISION
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise PullError(f"{revision[:80]!r} is no branch, tag or commit.")
    reach_hub(repository)
    commit, files = _listing(repository, revision)
    sized(sum(file.size for file in files))
    folder = hub_folder(repository)
    lock = fetch_lock(folder)
    if not lock.take():
        raise PullError(f"{repository} is being fetched by another process; wait for it.")
    try:
        large = [file for file in files if file.sha256]
        _by_hub(repository, commit, [file for file in files if not file.sha256])
        place, named = folder / "snapshots" / commit, folder / "refs" / revision
        if check is not None:
            check(place)
        fetched = _fetch_all(repository, commit, large, folder / "blobs", progress)
        _by_hub(repository, commit, large)
        named.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(named, commit, mode=0o666)
    finally:
        lock.drop()
    return Pulled(place, sum(file.size for file in files), fetched, commit)


def find_folder(
    source: str,
    setting: str,
    progress: Progress,
    here: Callable[[str], Path | None],
    check: Callable[[Path], object] | None = None,
) -> Path:
    """A folder, or a repository's: as `here` finds it on this disk if that is whole, else fetched. Raises NotFound.

    `setting`: which setting names it, for the error. `check`: see `pull`.
    """
    folder = expanded(source)
    if (folder / "config.json").is_file():
        return folder
    if is_path(source):
        raise NotFound(f"{setting}={source}: there is no config.json in that folder.")
    found = here(source)
    if found is not None:
        return found
    try:
        return pull(source, progress, check=check).folder
    except PullError as error:
        raise NotFound(f"{setting}={source}: {error}") from error


def reach_hub(what: str) -> None:
    """Raises PullError at once where there is no hub: its own client tries again and again, for half a minute."""
    try:
        if not constants.HF_HUB_OFFLINE:
            httpx.head(constants.ENDPOINT, timeout=REACH_SECONDS)
    except (httpx.HTTPError, OSError) as error:
        raise PullError(_REFUSALS[-1][1].format(what[:120], "", _reason(error), command())) from error


def removable(repository: str) -> Path:
    """The folder of a model that was fetched, also if not to its end. Raises PullError: it must stay, and why."""
    if is_path(repository):
        raise PullError(f"{repository} is a folder of yours; remove it yourself if you want to (rm -r).")
    try:
        folder = hub_folder(repository)
    except ValueError as error:
        raise PullError(f"{error}.") from error
    if not folder.is_dir():
        raise PullError(
            f"{repository} is none of the models that were fetched; `{command()} models` lists what is on this disk."
        )
    if folder.is_symlink():  # to a disk of the user's, say: what is behind it is not ours to remove
        raise PullError(f"{folder} is a link; remove {os.path.realpath(folder)} yourself if you want to.")
    return folder


def remove(repository: str) -> int:
    """Removes a model that was fetched. The bytes that are free again. Raises PullError."""
    folder = removable(repository)
    lock = fetch_lock(folder)
    if not lock.take():
        raise PullError(f"{repository} is being fetched; end that first.")
    try:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        shutil.rmtree(folder)
    except OSError as error:
        raise PullError(f"{repository} cannot be removed: {error}.") from error
    finally:
        lock.drop()
    return size


def fetch_lock(folder: Path) -> FileLock:
    """Held by whoever fetches into a repository's folder, or removes it."""
    return FileLock(folder.with_name(f".{folder.name}.start_llm.lock"))


def _listing(repository: str, revision: str) -> tuple[str, list[_File]]:
    """(commit, the files that are needed). Raises PullError, with what to do about it."""
    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
    except (HFValidationError, HfHubHTTPError, httpx.HTTPError, OfflineModeIsEnabled, OSError) as error:
        sentence = next(sentence for kind, sentence in _REFUSALS if isinstance(error, kind))
        raise PullError(sentence.format(repository, revision, _reason(error), command())) from error
    files = [_File(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else "") for each in info.siblings or ()]
    needed = [file for file in files if any(fnmatch.fnmatch(file.name, pattern) for pattern in PATTERNS)]
    _check_kind(repository, [file.name for file in files])
    _check_plain(repository, str(info.sha), needed)
    return str(info.sha), needed


def _check_plain(repository: str, commit: str, files: Sequence[_File]) -> None:
    """Raises PullError if what the hub says could lead out of the model's folder."""
    odd = next((file for file in files if not _is_plain(file)), None)
    if odd is not None or not _COMMIT.fullmatch(commit):
        what = f"the file {odd.name!r}" if odd is not None else f"the commit {commit[:80]!r}"
        raise PullError(f"{repository}: the hub tells {what[:160]}, which no hub should; nothing was fetched.")


def _check_kind(repository: str, names: Sequence[str]) -> None:
    """Raises PullError if these are not the files of a model that MLX can serve."""
    if any(fnmatch.fnmatch(name, "model*.safetensors") for name in names):
        return
    kind = "GGUF files for llama.cpp" if any(name.endswith(".gguf") for name in names) else "no model*.safetensors"
    raise PullError(f"{repository} has {kind}, which MLX cannot serve; look for it in mlx-community.")


def _is_plain(file: _File) -> bool:
    """Whether what the hub says of a file leads to a place inside the repository's folder."""
    parts = file.name.split("/")
    whole = all(part not in {"", ".", ".."} and part.isprintable() and "\\" not in part for part in parts)
    return whole and file.size >= 0 and (not file.sha256 or _SHA256.fullmatch(file.sha256) is not None)


def _by_hub(repository: str, commit: str, files: list[_File]) -> None:
    """Has huggingface_hub put files in their places, fetching those that are not there."""
    for file in files:
        try:
            hf_hub_download(repository, file.name, revision=commit)
        except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
            raise _broken_off(file, 0, error) from error


def _reason(error: Exception) -> str:
    """What the hub or the network says, without what a terminal would obey."""
    words = " ".join(str(error).split())[:120] or type(error).__name__
    return "".join(sign if sign.isprintable() else "?" for sign in words)


def _broken_off(file: _File, have: int, error: Exception) -> PullError:
    here = f" with {as_size(have)} of {as_size(file.size)} here" if have else ""
    return PullError(f"{file.name} was broken off{here} ({_reason(error)}); the same command goes on from there.")


# --- large files ----------------------------------------------------------------------------


def _fetch_all(repository: str, commit: str, files: list[_File], blobs: Path, progress: Progress) -> int:
    """Bytes that came over the network."""
    blobs.mkdir(parents=True, exist_ok=True)
    total = sum(file.size for file in files)
    here = sum(_bytes_here(blobs, file) for file in files)
    _check_room(repository, total - here, blobs)
    step, fetched, end = f"download {repository}", 0, -1.0

    def report(count: int) -> None:
        nonlocal fetched
        fetched += count
        progress(step, min((here + fetched) / total, 0.999))

    try:
        for file in files:
            if not (blobs / file.sha256).exists():
                _Fetch(hf_hub_url(repository, file.name, revision=commit), file, blobs).fetch(report)
        end = 1.0
    finally:
        if fetched:
            progress(step, end)
    return fetched


def _bytes_here(blobs: Path, file: _File) -> int:
    paths = [path for path in (blobs / file.sha256, _part(blobs, file)) if path.exists()]
    return min(paths[0].stat().st_size, file.size) if paths else 0


def _part(blobs: Path, file: _File) -> Path:
    return blobs / f"{file.sha256}.start_llm.part"


def _check_room(repository: str, needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed and needed + SPARE_BYTES > free:
        what = f"{repository} needs {as_size(needed)} more, and {folder} has {as_size(free)} free"
        raise PullError(f"{what}; make room, or set HF_HUB_CACHE to another disk.")


class _Fetch:
    """One large file, gone on with where an earlier try ended."""

    def __init__(self, url: str, file: _File, blobs: Path) -> None:
        self._url = url
        self._file = file
        self._part, self._target = _part(blobs, file), blobs / file.sha256
        self._digest = hashlib.sha256()
        self._have = 0

    def fetch(self, report: Callable[[int], None]) -> None:
        """`report` gets the numbers of bytes that come over the network, as they come. Raises PullError."""
        self._begin()
        failures = 0
        while self._have < self._file.size:
            before = self._have
            try:
                self._receive(report)
            except (httpx.HTTPError, OSError) as error:
                failures = 1 if self._have > before else failures + 1
                if failures >= TRIES or isinstance(error, httpx.HTTPStatusError):
                    raise _broken_off(self._file, self._have, error) from error
                time.sleep(PAUSE_SECONDS * failures)
        self._check()
        self._part.replace(self._target)

    def _begin(self) -> None:
        """Reads what is here already into the digest."""
        if self._part.exists() and self._part.stat().st_size > self._file.size:
            self._part.unlink()
        if self._part.exists():
            with self._part.open("rb") as file:
                self._digest = hashlib.file_digest(file, "sha256")
                self._have = file.tell()

    def _receive(self, report: Callable[[int], None]) -> None:
        """One request for what is missing. Raises httpx.HTTPError, OSError."""
        headers = build_hf_headers() | {"Range": f"bytes={self._have}-", "Accept-Encoding": "identity"}
        with (
            httpx.Client(follow_redirects=True, timeout=TIMEOUT_SECONDS) as client,
            client.stream("GET", self._url, headers=headers) as answer,
        ):
            answer.raise_for_status()
            if answer.status_code != httpx.codes.PARTIAL_CONTENT:  # all of it, from the beginning
                self._have, self._digest = 0, hashlib.sha256()
            with self._part.open("r+b" if self._have else "wb") as file:
                file.seek(self._have)
                for data in answer.iter_raw():
                    file.write(data)
                    self._digest.update(data)
                    self._have += len(data)
                    report(len(data))
                file.truncate()

    def _check(self) -> None:
        found, wanted = self._digest.hexdigest(), self._file.sha256
        if found != wanted:
            self._part.unlink()
            what = f"is not what the hub says it is (SHA-256 {found[:12]}..., not {wanted[:12]}...)"
            raise PullError(f"{self._file.name} {what}; it was removed, and the same command fetches it again.")
