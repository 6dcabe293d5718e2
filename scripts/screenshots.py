"""Makes the pictures of the page that README and docs show: ``python -m scripts.screenshots docs/images``.

Nothing of it is drawn by hand: a server on the oracle is asked by three agents, and Chromium looks at it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from tests.dashboard.browser import Browser, browser
from tests.integration.live import WAIT, Live, live
from tests.memory_folder import memory_folder
from tests.oracle.build import build_oracle

AGENTS = {"fix-login": "pi", "move-the-store": "opencode", "write-docs": "pi", "review": "codex"}
AGENTS["flaky-test"] = "opencode"
TURNS = 6
RULES = {"pi": "Keep to the rules of the project. ", "opencode": "Small steps. ", "codex": "Read before you write. "}
MOST_BYTES = 200_000


def ask(server: Live, messages: list[Any], session: str, **more: Any) -> None:
    """One turn, read to its end; the answer joins the messages."""
    body = {"model": "default", "messages": messages, "session_id": session, "stream": True, **more}
    text: list[str] = []
    headers = {"User-Agent": f"{AGENTS[session]}/1"}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=WAIT) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    messages.append({"role": "assistant", "content": "".join(text)})


def talk(server: Live) -> dict[str, list[Any]]:
    """Conversations of several turns; in one of them the client changes an old message."""
    talks: dict[str, list[Any]] = {}
    for number, (session, agent) in enumerate(AGENTS.items()):
        system = f"You are {agent}, a coding agent. " + RULES[agent] * 300
        messages: list[Any] = [{"role": "system", "content": system}]
        for turn in range(TURNS):
            said = f"{session}, step {turn}. [[long 5]] " + f"def part_{number}_{turn}(): ... " * (60 + 45 * number)
            messages.append({"role": "user", "content": said})
            ask(server, messages, session, max_tokens=40)
        talks[session] = messages
    changed = [dict(message) for message in talks["fix-login"]]
    changed[5]["content"] = changed[5]["content"].replace("step 2", "step two, edited")
    ask(server, changed, "fix-login", max_tokens=40)
    return talks


def pictures(window: Browser, server: Live, folder: Path, talks: dict[str, list[Any]]) -> None:
    os.environ |= {"ORACLE_SLEEP_PER_TOKEN": "0.002", "ORACLE_SLEEP_PER_STEP": "0.03"}
    for dark in (False, True):
        with window.wide(1280, 860, dark=dark):
            window.open("about:blank")
            window.open(server.url)
            window.until_text("#conversations", "review")
            window.one("#ended .tag").click()  # what was computed again, and why
            window.until_text("#ended dl", "told")
            text = f"Look at {'that' if dark else 'this'}. [[long 500]] " + "a changed line " * 1500
            messages = [*talks["review"], {"role": "user", "content": text}]
            asking = threading.Thread(target=ask, args=(server, messages, "review"), kwargs={"max_tokens": 60})
            asking.start()
            window.until_text("#now .prefill", "reading", "left")
            time.sleep(2.5)  # the bar is somewhere in the middle
            save(window, folder / f"page-{'dark' if dark else 'light'}.png")
            asking.join(WAIT)


def save(window: Browser, path: Path) -> None:
    window.driver.save_screenshot(str(path))
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256).save(path, optimize=True)
    assert path.stat().st_size < MOST_BYTES, f"{path} has {path.stat().st_size} bytes"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with memory_folder() as made, browser() as window:
        options = {"drafts": "off", "kv_disk_dir": "auto", "cache_memory_bytes": 420_000}
        with live(build_oracle(made / "oracle", "plain"), made / "cache", **options) as server:
            pictures(window, server, folder, talk(server))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
