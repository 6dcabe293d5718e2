"""``kill -9``, start again: the next turn costs what is new in it, no file is damaged, every answer is right."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.live import Start
from tests.integration.pooled import link_oracles
from tests.integration.processes import WAIT, figures, process
from tests.oracle import Oracle, expected_truth
from tests.waiting import until

TURNS = 5


def is_written(url: str, tokens: int = 1) -> bool:
    """The figures are told together, about once a second: they count if they know of the last answer.

    While one model goes for another there are none.
    """
    told, names = figures(url), ("tokens", "disk_waiting_bytes", "disk_waiting_segments")
    stored, *waiting = (told.get(f"start_llm_kv_{name}", 0.0) for name in names)
    return stored >= tokens - 8 and not any(waiting)


def turn(url: str, messages: list[dict[str, Any]], text: str, model: str = "default") -> tuple[str, dict[str, Any]]:
    """What is said to one more question, and its usage; the conversation grows by both."""
    messages.append({"role": "user", "content": text})
    answer = httpx.post(f"{url}/v1/chat/completions", json={"model": model, "messages": messages}, timeout=WAIT)
    assert answer.status_code == 200, answer.text
    data = answer.json()
    said = str(data["choices"][0]["message"]["content"])
    messages.append({"role": "assistant", "content": said})
    return said, data["usage"]


@pytest.mark.live
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.slow), "hybrid"])
@pytest.mark.parametrize("tokens", [5_000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_a_conversation_goes_on_after_a_kill(
    oracle_path: Callable[..., Path], tmp_path: Path, start: Start, kind: str, tokens: int
) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are careful."}]
    with process(oracle_path(kind), tmp_path) as (url, child):
        for i in range(TURNS):
            _, usage = turn(url, messages, f"part {i}: " + "word " * (tokens // TURNS // 2))
        known = usage["total_tokens"]
        assert known >= tokens
        until(lambda: is_written(url, known))
        child.send_signal(signal.SIGKILL)
        child.wait(WAIT)
    with start(kind, kv_disk_dir="auto") as server:
        _, usage = turn(server.url, messages, "and now " * 100)
        assert server.work() <= 1.1 * (usage["prompt_tokens"] - known), json.dumps(usage)


def ask_on(url: str, models: list[str]) -> None:
    """Asks until the server is killed."""
    for number in range(50):
        try:
            turn(url, [], "word " * 3000, models[number % len(models)])
        except httpx.TransportError:
            return


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kinds", "kills"), [(["plain"], 20), (["hybrid"], 20), (["plain", "hybrid"], 8)])
def test_kills_during_writes(folders: dict[str, Path], tmp_path: Path, kinds: list[str], kills: int) -> None:
    """At random moments; where there are two models, each of their turns is a swap."""
    chance, read = random.Random(1), 0
    link_oracles(folders, tmp_path)
    oracles = {f"oracle-{kind}": Oracle.load(folders[kind]) for kind in kinds}
    talks: dict[str, list[dict[str, Any]]] = {name: [] for name in oracles}
    for kill in range(kills):
        with process(folders[kinds[0]], tmp_path, MAX_LOADED_MODELS="1", KV_DISK_DIR="auto") as (url, child):
            for number in range(2):
                for name, talk in talks.items():
                    said, usage = turn(url, talk, f"kill {kill} turn {number}: {'word ' * 60} [[truth]]", name)
                    assert said == expected_truth(oracles[name].prompt(talk[:-1])), (kill, name)
                    read += usage["start_llm"]["reused"] if number == 0 else 0  # from the disk: the process is new
            if kill % 2 == 0:  # else a busy machine may not have written anything before any of the kills
                until(lambda url=url: is_written(url))  # type: ignore[misc]
            assert not figures(url).get("start_llm_kv_disk_damaged"), "a file was damaged by a kill"
            asking = threading.Thread(target=ask_on, args=(url, [*talks]))
            asking.start()
            time.sleep(chance.uniform(0, 2.0))  # the random moment
            child.send_signal(signal.SIGKILL)
            child.wait(WAIT)
            asking.join(WAIT)
    assert read > 0, "nothing that was written was ever read again"
