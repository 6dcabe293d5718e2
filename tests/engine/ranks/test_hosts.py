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
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from start_llm.core.settings import Settings, SettingsError, load_settings
from start_llm.engine.ranks.hosts import RankHost, host_command, one_model_only, rank_hosts
from tests.engine.ranks.checkpoints import write_checkpoint

pytestmark = pytest.mark.live

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 500  # seconds that a process may take
ROUNDS, SEED = int(os.environ.get("RANK_ROUNDS", "30")), int(os.environ.get("RANK_SEED", "1"))
"""Of the slow tests: how many times one to three requests are sent, and which. About 1.5 answers a round."""


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "START_LLM_HOME": str(home), "MODEL_PROBE": "off"}


def run_turns(home: Path, kind: Any, hosts: int, turns: int, seed: int = 1, budget: int = 150_000) -> dict[str, Any]:
    """What `turns.py` prints at its end. `budget`: bytes of stored KV over all hosts."""
    about = {
        "home": str(home),
        "model": str(write_checkpoint(home / kind, kind)),
        "hosts": ",".join(["127.0.0.1"] * hosts) if hosts > 1 else "",
        "turns": turns,
        "seed": seed,
        "settings": {"cache_memory_bytes": budget // hosts},
    }
    command = [sys.executable, str(Path(__file__).with_name("turns.py")), json.dumps(about)]
    done = subprocess.run(
        command, env=environment(home), capture_output=True, text=True, timeout=LIMIT, check=False, cwd=home
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(home: Path, kind: str, hosts: int, turns: int, seed: int = 1) -> None:
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


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT * 2)
def test_two_hosts_say_what_one_says(tmp_path: Path) -> None:
    compare(tmp_path, "plain", 2, 8)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT * 2)
@pytest.mark.parametrize(("kind", "hosts"), [("plain", 2), ("plain", 3), ("hybrid", 2), ("hybrid", 3)])
def test_more_hosts_say_what_one_says(tmp_path: Path, kind: str, hosts: int) -> None:
    compare(tmp_path, kind, hosts, ROUNDS, SEED)


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
    """A server over two hosts, with the line that told that it is ready."""
    model = write_checkpoint(home / "plain", "plain")
    command = [sys.executable, "-m", "start_llm", "serve", str(model), "--supervised", "--port", "0", "--no-proxy"]
    variables = environment(home) | {"START_LLM_CACHE_DIR": str(home), **more}
    process = subprocess.Popen(
        [*command, "--hosts", "127.0.0.1,127.0.0.1"],
        env=variables,
        cwd=home,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(home / "log").open("w"),
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if (event := json.loads(line))["event"] == "ready":
                yield process, event["url"]
                break
        else:
            raise AssertionError((home / "log").read_text())
    finally:
        process.kill()
        process.wait()


def follower_of(process: subprocess.Popen[str]) -> psutil.Process:
    return next(each for each in psutil.Process(process.pid).children() if "--rank" in _words_of(each))


def _words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty if it ends at this moment."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def ask(url: str) -> httpx.Response:
    body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=LIMIT)


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT)
def test_a_silent_host_ends_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as (process, url):
        answer = ask(url).json()
        assert answer["usage"]["completion_tokens"] > 0
        follower = follower_of(process)
        began = time.monotonic()
        follower.send_signal(signal.SIGSTOP)
        try:
            assert process.wait(LIMIT) == 75
        finally:
            with suppress(psutil.NoSuchProcess):
                follower.kill()
        print(f"the server ended after {time.monotonic() - began:.1f} s")
        assert "Rank 1 on 127.0.0.1 has given no sign of life for 10 s" in (tmp_path / "log").read_text()


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT)
def test_a_lost_host_is_told_in_an_answer_and_ends_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as (process, url):
        body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3000}
        body |= {"stream": True, "logit_bias": {"1": -100}}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=LIMIT) as answer:
            lines = answer.iter_lines()
            while "content" not in next(lines):
                pass
            follower_of(process).kill()
            assert "Rank 1 on 127.0.0.1 has ended." in "".join(lines)
        assert process.wait(LIMIT) == 75
        assert "Rank 1 on 127.0.0.1 has ended" in (tmp_path / "log").read_text()


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_pass_of_one_rank_loses_all(tmp_path: Path, rank: int) -> None:
    site, fault = tmp_path / "site", tmp_path / "fault"
    site.mkdir()
    (site / "sitecustomize.py").write_text(FAULT)
    path = os.pathsep.join([str(site), str(ROOT)])
    body = {"model": "default", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "stream": True}
    body |= {"logit_bias": {"1": -100}}
    with served(tmp_path, PYTHONPATH=path, FAULT_FILE=str(fault), FAULT_RANK=str(rank)) as (process, url):

        def words(most: int) -> Iterator[str]:
            more = body | {"max_tokens": most}
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=more, timeout=LIMIT) as answer:
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        yield event["error"]["message"]
                    yield from (choice["delta"].get("content") or "" for choice in event.get("choices", ()))

        right = "".join(words(120))
        follower, found = follower_of(process), []
        for word in words(120):
            found.append(word)
            if len(found) == 3:
                fault.touch()
                began = time.monotonic()
        *found, why = found
        assert why == f"Rank {rank} on 127.0.0.1 cannot go on: RuntimeError: [malloc] Unable to allocate."
        assert len(found) < 120 and right.startswith("".join(found))
        assert process.wait(LIMIT) == 75
        print(f"a fault on rank {rank}: the server ended after {time.monotonic() - began:.1f} s")
        follower.wait(60)


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT)
def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "odd", "plain", num_attention_heads=3, num_key_value_heads=3)
    command = [sys.executable, "-m", "start_llm", "serve", str(model), "--port", "0", "--no-proxy"]
    variables = environment(tmp_path) | {"START_LLM_CACHE_DIR": str(tmp_path), "HOSTS": "127.0.0.1,127.0.0.1"}
    done = subprocess.run(
        command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "cannot be divided by 2 hosts: num_attention_heads=3, num_key_value_heads=3." in done.stderr


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT)
def test_followers_end_with_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as (process, _):
        follower = follower_of(process)
        process.kill()
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
