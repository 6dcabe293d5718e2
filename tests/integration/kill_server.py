"""Servers that are killed while they write, and what the next one makes of it. Run by test_kill.

usage: kill_server.py MODEL CACHE KILLS SEED. Forks one server after another on the same cache folder. Each answers two
turns of a conversation, is asked for another, and is killed with SIGKILL at a random moment of that. At the end all
answers are compared with what the oracle says to the same prompt from nothing.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from start_llm.app import App
from start_llm.core.settings import load_settings
from tests.integration.live import places
from tests.oracle import Oracle, expected_truth

WAIT = 120.0


def serve(model: str, cache: Path, ready: int) -> None:
    """The child: a server that says its port through `ready` and runs until it is killed."""
    settings = places(Path(model), cache) | {"reanchor": "off", "log_json": True, "default_temperature": 0.0}
    app = App(load_settings(None, **settings), say=lambda line: None)
    app.start()
    os.write(ready, f"{app.server_url}\n".encode())
    app.wait()


def ask(url: str, messages: list[dict[str, Any]]) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were reused."""
    body = {"model": "default", "messages": messages}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT)
    assert answer.status_code == 200, answer.text
    data = answer.json()
    return str(data["choices"][0]["message"]["content"]), int(data["usage"]["start_llm"]["reused"])


def question(number: int, words: int) -> dict[str, str]:
    return {"role": "user", "content": f"part {number}: " + "word " * words + "[[truth]]"}


def figures(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=WAIT).text.splitlines()
    return {
        name: float(value) for name, _, value in (line.partition(" ") for line in lines) if name.startswith("start_")
    }


def settled(url: str, what: str) -> dict[str, float]:
    """The figures once `what` has happened and nothing waits: they are told anew about once a second."""
    end = time.monotonic() + WAIT
    while True:
        seen = figures(url)
        if seen[f"start_llm_kv_disk_{what}_files"] > 0 and seen["start_llm_kv_disk_waiting_segments"] == 0:
            return seen
        assert time.monotonic() < end, f"nothing is {what}"
        time.sleep(0.05)


def main(model: str, cache: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    said: list[tuple[list[dict[str, Any]], str]] = []
    history: list[dict[str, Any]] = [{"role": "system", "content": "You are careful."}]
    read = 0
    for number in range(kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            serve(model, cache, writing)
            os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as lines:
            url = lines.readline().strip()
        assert url, "the server did not start"
        for turn in (1, 2):
            asked = [*history, question(10 * number + turn, 60)]
            answer, reused = ask(url, asked)
            if turn == 1 and reused > 0:  # from the disk: the process is new
                read += 1
                assert settled(url, "read")["start_llm_kv_disk_damaged"] == 0, "a file was damaged by a kill"
            said.append((asked, answer))
            history = [*asked, {"role": "assistant", "content": answer}]
        if number % 2 == 0:  # else a busy machine may not have written anything before any of the kills
            settled(url, "written")
        last = threading.Thread(target=until_killed, args=(url, [*history, question(10 * number + 3, 200)]))
        last.start()
        time.sleep(chance.uniform(0, 0.4))  # the random moment
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        last.join()
        if len(history) > 12:
            history = history[:1]
    assert read > 0, "nothing that was written was ever read again"
    oracle = Oracle.load(Path(model))
    for messages, answer in said:
        assert answer == expected_truth(oracle.prompt(messages)), json.dumps(messages)[-200:]
    print(f"{kills} kills, {len(said)} answers right, {read} times read again")


def until_killed(url: str, messages: list[dict[str, Any]]) -> None:
    """The turn that the kill interrupts."""
    try:
        ask(url, messages)
    except (httpx.TransportError, AssertionError):
        return


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
