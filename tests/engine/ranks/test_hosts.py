"""One model over several processes on this machine: what they say, what each holds, what happens when one is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from start_llm.core.settings import Settings, SettingsError, load_settings
from start_llm.engine.ranks.hosts import RankHost, host_command, one_model_only, rank_hosts
from tests.engine.ranks.checkpoints import write_checkpoint
from tests.integration.processes import process

pytestmark = pytest.mark.live

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 500  # seconds that a process may take
HELLO: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
HELLO |= {"logit_bias": {"1": -100}}
"""A request whose answer does not end by itself."""
ROUNDS, SEED = int(os.environ.get("RANK_ROUNDS", "30")), int(os.environ.get("RANK_SEED", "1"))
"""Of the slow tests: how many times one to three requests are sent, and which. About 1.5 answers a round."""


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "START_LLM_HOME": str(home), "MODEL_PROBE": "off"}


def run_turns(home: Path, kind: Any, hosts: int, turns: int, seed: int) -> dict[str, Any]:
    """What `turns.py` prints at its end."""
    about = {
        "home": str(home),
        "model": str(write_checkpoint(home / kind, kind)),
        "hosts": ",".join(["127.0.0.1"] * hosts) if hosts > 1 else "",
        "turns": turns,
        "seed": seed,
        "settings": {"cache_memory_bytes": 150_000 // hosts},
    }
    command = [sys.executable, str(Path(__file__).with_name("turns.py")), json.dumps(about)]
    done = subprocess.run(
        command, env=environment(home), capture_output=True, text=True, timeout=LIMIT, check=False, cwd=home
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(home: Path, kind: str, hosts: int, turns: int, seed: int) -> None:
    alone, together = (run_turns(home, kind, count, turns, seed) for count in (1, hosts))
    assert together["said"] == alone["said"] and sum(map(len, alone["said"])) > turns
    assert together["figures"]["failed_steps"] == together["figures"]["kv_errors"] == 0
    one, several = (_token_bytes(each["figures"]) for each in (alone, together))
    assert several * hosts == one
    figures, counts = together["figures"], ", ".join(f"{count} {name}" for name, count in together["counts"].items())
    print(f"{kind}, {hosts} hosts, seed {seed}: {len(alone['said'])} answers in {turns} rounds are equal; {counts}")
    events = [figures[name] for name in ("kv_evicted", "requests_paused", "tokens_accepted", "tokens_drafted")]
    print("{} segments evicted, {} requests paused, {} of {} drafted tokens right".format(*events))
    assert events[0] > 0 or turns < 30
    divided = (alone["weights"] - together["weights"]) * hosts / (hosts - 1)  # all but embeddings, norms and head
    assert 0.5 < divided / alone["weights"] < 1


def _token_bytes(figures: dict[str, float]) -> float:
    """Of stored KV; a request that was cancelled sooner or later leaves more or less of it."""
    return (figures["kv_used_bytes"] - figures["kv_checkpoint_bytes"]) / figures["kv_tokens"]


@pytest.mark.timeout(LIMIT * 2)
@pytest.mark.parametrize(
    ("kind", "hosts", "turns"),
    [
        pytest.param("plain", 2, 8, marks=pytest.mark.thorough),
        *(pytest.param(*each, ROUNDS, marks=pytest.mark.slow) for each in product(("plain", "hybrid"), (2, 3))),
    ],
)
def test_several_hosts_say_what_one_says(tmp_path: Path, kind: str, hosts: int, turns: int) -> None:
    compare(tmp_path, kind, hosts, turns, SEED)


FAULT = """
import os
import mlx.core as mx

all_sum, file, calls = mx.distributed.all_sum, os.environ.get("FAULT_FILE"), 0

def failing(array, **about):
    global calls
    if os.environ.get("MLX_RANK") == os.environ["FAULT_RANK"] and os.path.exists(file):
        calls += 1
        if calls == 3:  # in the middle of a pass, which the others make
            raise RuntimeError("[malloc] Unable to allocate")
    return all_sum(array, **about)

if file:
    mx.distributed.all_sum = failing
"""


@contextmanager
def served(home: Path, **more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server over two hosts, and its address. What it says goes to ``home / "said"``."""
    here = {"START_LLM_HOME": str(home), "MODEL_PROBE": "off", "HOSTS": "127.0.0.1,127.0.0.1"}
    with process(write_checkpoint(home / "plain", "plain"), home, **here, **more) as (url, server):
        yield server, url


def follower_of(process: subprocess.Popen[str]) -> psutil.Process:
    return next(each for each in psutil.Process(process.pid).children() if "--rank" in _words_of(each))


def _words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty if it ends at this moment."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT)
def test_a_silent_host_ends_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as (server, url):
        answer = httpx.post(f"{url}/v1/chat/completions", json={**HELLO, "max_tokens": 5}, timeout=LIMIT).json()
        assert answer["usage"]["completion_tokens"] > 0
        follower = follower_of(server)
        began = time.monotonic()
        follower.send_signal(signal.SIGSTOP)
        try:
            assert server.wait(LIMIT) == 75
        finally:
            with suppress(psutil.NoSuchProcess):
                follower.kill()
        print(f"the server ended after {time.monotonic() - began:.1f} s")
        assert "Rank 1 on 127.0.0.1 has given no sign of life for 10 s" in (tmp_path / "said").read_text()


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT)
def test_a_lost_host_is_told_in_an_answer_and_ends_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as (server, url):
        body = {**HELLO, "max_tokens": 3000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LIMIT) as answer:
            lines = answer.iter_lines()
            while "content" not in next(lines):
                pass
            follower_of(server).kill()
            assert "Rank 1 on 127.0.0.1 has ended." in "".join(lines)
        assert server.wait(LIMIT) == 75
        assert "Rank 1 on 127.0.0.1 has ended" in (tmp_path / "said").read_text()


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_pass_of_one_rank_loses_all(tmp_path: Path, rank: int) -> None:
    site, fault = tmp_path / "site", tmp_path / "fault"
    site.mkdir()
    (site / "sitecustomize.py").write_text(FAULT)
    path = os.pathsep.join([str(site), str(ROOT)])
    with served(tmp_path, PYTHONPATH=path, FAULT_FILE=str(fault), FAULT_RANK=str(rank)) as (server, url):

        def words(most: int) -> Iterator[str]:
            body = {**HELLO, "max_tokens": most, "stream": True}
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LIMIT) as answer:
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        yield event["error"]["message"]
                    yield from (choice["delta"].get("content") or "" for choice in event.get("choices", ()))

        right = "".join(words(120))
        follower, found = follower_of(server), []
        for word in words(120):
            found.append(word)
            if len(found) == 3:
                fault.touch()
                began = time.monotonic()
        *found, why = found
        assert why == f"Rank {rank} on 127.0.0.1 cannot go on: RuntimeError: [malloc] Unable to allocate."
        assert len(found) < 120 and right.startswith("".join(found))
        assert server.wait(LIMIT) == 75
        print(f"a fault on rank {rank}: the server ended after {time.monotonic() - began:.1f} s")
        follower.wait(60)


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT)
def test_followers_end_with_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as (server, _):
        follower = follower_of(server)
        server.kill()
        follower.wait(60)


def test_a_hostfile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps([{"ssh": "mac-1", "ips": ["10.0.0.1"]}, {"ssh": "mac-2", "ips": ["10.0.0.2"]}]))
    hosts = rank_hosts(Settings(hostfile=path))
    assert [(host.name, host.address, host.is_local) for host in hosts] == [
        ("mac-1", "10.0.0.1", False),
        ("mac-2", "10.0.0.2", False),
    ]
    for content in ("", "{}", "[]", '[{"ssh": "mac-1", "ips": []}]', '[{"ssh": "a", "ips": ["10.0.0.1"]}]'):
        path.write_text(content)
        with pytest.raises(SettingsError, match="HOSTFILE"):
            rank_hosts(Settings(hostfile=path))


def test_a_name_is_no_option_of_ssh() -> None:
    *options, name, command = host_command(RankHost("-oProxyCommand=touch stolen", "10.0.0.2"), "rank")
    assert options == ["ssh", "-o", "BatchMode=yes", "--"] and name.startswith("-o") and command.endswith(" rank")


def test_without_hosts_nothing_of_it_is_imported() -> None:
    code = "import sys, start_llm.app; print([m for m in sys.modules if m.startswith('multiprocessing')])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_bad_hosts_are_refused() -> None:
    for value in ("mac-1", "mac-1,,mac 2", "mac-1,http://mac-2"):
        with pytest.raises(SettingsError, match="HOSTS="):
            load_settings(None, hosts=value)
    with pytest.raises(SettingsError, match="ADAPTER_PATH"):
        one_model_only(Settings(adapter_path="a"))
    assert rank_hosts(Settings()) == []
