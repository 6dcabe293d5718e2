"""``kill -9`` while models are swapped: the next start serves each of them, and every conversation goes on."""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.pooled import link_oracles
from tests.integration.processes import WAIT, process
from tests.oracle import Oracle, expected_truth

NAMES = ("oracle-plain", "oracle-hybrid")
Talk = list[dict[str, Any]]


def ask(url: str, name: str, talk: Talk) -> str:
    answer = httpx.post(f"{url}/v1/chat/completions", json={"model": name, "messages": talk}, timeout=WAIT)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kills_while_models_are_swapped(folders: dict[str, Path], tmp_path: Path) -> None:
    chance = random.Random(1)
    link_oracles(folders, tmp_path)
    oracles = {f"oracle-{kind}": Oracle.load(folders[kind]) for kind in ("plain", "hybrid")}
    talks: dict[str, Talk] = {name: [] for name in NAMES}
    for kill in range(8):
        with process(folders["plain"], tmp_path, MAX_LOADED_MODELS="1", KV_DISK_DIR="auto") as (url, child):
            for turn in range(2):
                for name in NAMES:  # each turn is a swap
                    talk = talks[name]
                    talk.append({"role": "user", "content": f"kill {kill} turn {turn}: {'word ' * 200} [[truth]]"})
                    said = ask(url, name, talk)
                    assert said == expected_truth(oracles[name].prompt(talk)), (kill, name)
                    talk.append({"role": "assistant", "content": said})

            def swap() -> None:
                for number in range(50):
                    try:
                        ask(url, NAMES[number % 2], [{"role": "user", "content": "word " * 3000}])
                    except httpx.TransportError:
                        return

            swapping = threading.Thread(target=swap)
            swapping.start()
            time.sleep(chance.uniform(0, 2.0))  # the random moment
            child.send_signal(signal.SIGKILL)
            child.wait(WAIT)
            swapping.join(WAIT)
