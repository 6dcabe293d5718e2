"""A hub on loopback: what huggingface_hub asks of one, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RESOLVE = re.compile(r"/owner/model/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """Serves `folder` as ``owner/model``.

    Attributes:
        port: where it listens.
        commit: what ``main`` is.
        cuts: after how many bytes each of the next answers of a large file is broken off.
        damaged: large files are sent with their last byte changed.
        sent: bytes of large files that went out; `asked`: the first byte of each request for one.
    """

    folder: Path
    port: int = 0
    commit: str = COMMIT
    cuts: list[int] = field(default_factory=list)
    damaged: bool = False
    sent: int = 0
    asked: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def listing(self) -> dict[str, Any]:
        files = []
        for path in sorted(self.folder.iterdir()):
            entry: dict[str, Any] = {"rfilename": path.name, "size": path.stat().st_size, "blobId": _git_id(path)}
            if path.suffix == ".safetensors":
                entry["lfs"] = {"sha256": digest(path), "size": path.stat().st_size, "pointerSize": 134}
            files.append(entry)
        return {"id": "owner/model", "modelId": "owner/model", "sha": self.commit, "siblings": files}


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git_id(path: Path) -> str:
    return hashlib.sha1(path.name.encode()).hexdigest()


class _Handler(web.Handler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        found = _RESOLVE.fullmatch(path)
        if path == "/api/models":
            row = {"id": "owner/model", "downloads": 7, "safetensors": {"parameters": {"U32": 1000, "BF16": 50}}}
            self._send(200, json.dumps([row, {"id": "<b>odd"}, 5]).encode(), {"Content-Type": "application/json"})
        elif path.startswith("/api/models/owner/model"):
            if "/revision/" in path and path.rpartition("/")[2] not in {"main", self.hub.commit}:
                self._refuse("RevisionNotFound")
                return
            self._send(200, json.dumps(self.hub.listing()).encode(), {"Content-Type": "application/json"})
        elif found and (self.hub.folder / found[2]).is_file():
            self._file(self.hub.folder / found[2], with_body)
        else:
            self._refuse("RepoNotFound" if found is None else "EntryNotFound")

    def _refuse(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code})

    def _file(self, path: Path, with_body: bool) -> None:
        large = path.suffix == ".safetensors"
        data = path.read_bytes()
        if large and self.hub.damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        etag = digest(path) if large else _git_id(path)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.hub.commit, "X-Linked-Size": str(len(data))}
        begin, status = 0, 200
        if wanted := self.headers.get("Range"):
            begin, status = int(wanted.removeprefix("bytes=").partition("-")[0]), 206
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        body = data[begin:]
        if not with_body:
            self._send(status, body, headers, head=True)
            return
        if large:
            self.hub.asked.append(begin)
            if self.hub.cuts:
                cut = body[: self.hub.cuts.pop(0)]
                self._send(status, cut, headers, length=len(body))
                self.hub.sent += len(cut)
                self.close_connection = True
                return
            self.hub.sent += len(body)
        self._send(status, body, headers)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], *, head: bool = False, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if not head:
            self.wfile.write(body)


@contextmanager
def running(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder)
    with web.running(type("", (_Handler,), {"hub": hub})) as hub.port:
        yield hub


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """As HF_ENDPOINT does at the start of a process."""
    monkeypatch.setattr("start_llm.models.pull.PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    path = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{")[2]
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{{path}")
