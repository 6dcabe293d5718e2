"""`start-llm` as a user has it: real processes on the oracle; what is left over, who restarts whom."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from start_llm.__main__ import main
from start_llm.host.ports import free_port, is_free
from tests.integration.lifecycle import Machine
from tests.integration.processes import ROOT, WAIT
from tests.waiting import until

Make = Callable[..., Machine]


@pytest.fixture
def make(oracle_path: Callable[..., Path], tmp_path: Path) -> Iterator[Make]:
    machines: list[Machine] = []

    def machine(**settings: str) -> Machine:
        machines.append(Machine(oracle_path("plain"), tmp_path, **settings))
        return machines[-1]

    yield machine
    for each in machines:
        each.end()


def ask(port: int) -> int:
    body = {"model": "default", "messages": [{"role": "user", "content": "[[long 20]]"}]}
    try:
        return httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body).status_code
    except httpx.TransportError:
        return 0


@pytest.mark.live
@pytest.mark.parametrize(
    "ends_first", ["pi", pytest.param("aider", marks=pytest.mark.slow)], ids=["starter-first", "joiner-first"]
)
@pytest.mark.thorough
def test_two_agents_share_a_server_that_ends_after_the_last(make: Make, ends_first: str) -> None:
    """Launch, join, a dead engine meanwhile, either agent ended first, the end of an unused server."""
    machine = make(IDLE_SHUTDOWN_MINUTES="0.01")
    pi = machine.launch("pi")
    until(lambda: machine.said("pi").endswith("\n"))
    until(lambda: "starting the server on port" in machine.said("pi") and str(machine.folder) in machine.said("pi"))
    until(lambda: "bin/pi" in machine.said("pi"))
    state = machine.reach(lambda state: state["phase"] == "ready")
    aider = machine.launch("aider")
    until(lambda: "bin/aider" in machine.said("aider"))
    assert "starting" not in machine.said("aider")

    first, last = ("pi", "aider") if ends_first == "pi" else ("aider", "pi")
    running = {"pi": pi, "aider": aider}
    assert machine.finish(first, running[first]) == 0
    os.kill(state["engine"], signal.SIGKILL)
    later = machine.reach(lambda state: state["phase"] == "ready" and state["restarts"] == 1)
    assert later["pid"] == state["pid"] and later["last_exit"]["code"] == -signal.SIGKILL
    assert ask(machine.port) == 200 and running[last].poll() is None

    assert machine.finish(last, running[last]) == 0
    until(machine.is_empty)


@pytest.mark.smoke
def test_start_status_stop(make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine = make()
    monkeypatch.chdir(machine.folder)  # put back afterwards: `serve` goes to its own
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> tuple[int, str]:
        code = main(words)
        told = capsys.readouterr()
        return code, told.out + told.err

    code, said = run("start")
    assert code == 0 and "ready: oracle at http://127.0.0.1" in said and "stop" in said
    code, said = run("start")
    assert code == 0 and "already running" in said
    code, said = run("serve")
    assert code == 2 and "start_llm serves oracle there" in said

    code, said = run("status")
    assert code == 0 and said.startswith("ready ") and "oracle" in said and "in the background" in said
    told = json.loads(run("status", "--json")[1])
    assert told["background"] and told["memory_bytes"] > 10**7 and told["users"] == 0
    assert (machine.run_folder / f"server-{machine.port}.json").stat().st_mode & 0o777 == 0o600
    (row,) = json.loads(run("ps", "--json")[1])
    assert (row["port"], row["model"]) == (machine.port, "oracle")
    assert f" {machine.port} " in run("ps")[1].replace("\n", " ")
    assert "(loading the model)" in run("logs", "-n", "50")[1]

    code, said = run("stop")
    assert code == 0 and said.endswith("stopped\n")
    assert machine.is_empty()
    assert run("status")[0] == 3 and run("stop")[0] == 0


@pytest.mark.live
@pytest.mark.parametrize("program", ["start-llm", f"python3.12 {ROOT}/install_and_run.py"], ids=["installed", "clone"])
def test_what_the_start_prints_works_in_another_shell_and_folder(make: Make, program: str) -> None:
    """On a port that only this start's flag names; and without the port, since there is one server only."""
    machine = make()
    port = machine.port
    del machine.environment["MLX_PORT"]
    (machine.folder / "bin" / "start-llm").write_text(f'#!/bin/sh\nexec {sys.executable} -m start_llm "$@"\n')
    (machine.folder / "bin" / "start-llm").chmod(0o755)
    (machine.folder / "bin" / "python3.12").symlink_to(sys._base_executable)
    (machine.folder / "pi.done").touch()

    def paste(line: str) -> str:
        run = subprocess.run(
            line,
            shell=True,
            cwd=machine.folder / "bin",
            env=machine.environment,
            capture_output=True,
            text=True,
            timeout=WAIT,
        )
        assert run.returncode == 0, (line, run.stdout, run.stderr)
        return run.stdout

    said = paste(f"{program} start --port {port}")
    typed = [line.partition("    ")[0] for line in said.splitlines() if line.startswith(program)]
    assert typed == [f"{program} {words} --port {port}" for words in ("launch pi", "status", "stop")]
    told = dict(line.split(maxsplit=1) for line in said.splitlines() if line.split()[0] in {"page", "log", "settings"})
    assert httpx.get(told["page"]).headers["content-type"].startswith("text/html") and Path(told["log"]).is_file()
    assert told["settings"] == f"{machine.folder / 'home' / '.env'} (not there yet)"
    launched, status = paste(typed[0]), paste(typed[1])
    assert "bin/pi" in launched and f":{port}" in status and told["settings"] in status
    assert f":{port}" in paste(f"{program} status") and paste(f"{program} chat --json Say hello.")
    assert paste(f"{program} launch pi --print").count(f":{port}") >= 1
    try:
        assert paste(f"{program} stop").endswith("stopped\n")
    finally:
        machine.environment["MLX_PORT"] = str(port)
    assert machine.is_empty()


@pytest.mark.slow
def test_restart_keeps_the_flags_and_a_server_in_the_foreground_is_known(make: Make) -> None:
    machine = make()
    assert machine.run("start", "--context", "4096").returncode == 0
    before = machine.state() or {}
    again = machine.run("restart")
    assert again.returncode == 0, again.stderr
    after = machine.status()
    assert after["pid"] != before["pid"] and after["models"][0]["context"] == 4096
    assert machine.run("stop").returncode == 0

    serve = subprocess.Popen(machine.command("serve"), env=machine.environment, stdout=subprocess.DEVNULL)
    machine.reach(lambda state: state["phase"] == "ready")
    assert "in the foreground" in machine.run("status").stdout
    assert machine.run("stop").returncode == 0 and serve.wait(WAIT) == 0
    assert machine.is_empty()


@pytest.mark.slow
def test_a_supervised_server_speaks_json_and_ends_with_its_owner(make: Make) -> None:
    machine = make()
    process = subprocess.Popen(
        machine.command("serve", "--supervised"),
        env=machine.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None

    def event() -> dict[str, Any]:
        assert process.stdout is not None
        return dict(json.loads(process.stdout.readline()))

    assert event()["event"] == "starting"
    ready = event()
    assert ready["event"] == "ready" and ready["url"].endswith(str(machine.port)) and ready["model"] == "oracle"
    for line, expected in (('{"command": "status"}', "status"), ("{", "error"), ('{"command": "dance"}', "error")):
        process.stdin.write(line + "\n")
        process.stdin.flush()
        assert event()["event"] == expected
    process.stdin.close()
    assert process.wait(WAIT) == 0 and machine.is_empty()


def traffic(port: int, over: threading.Event) -> None:
    while not over.is_set():
        ask(port)


def kill(machine: Machine, kind: str) -> None:
    """Kills one of the three; returns when all is as it should be again."""
    before = machine.ours()[kind]
    before.send_signal(signal.SIGKILL)
    if kind != "supervisor":
        until(lambda: machine.ours().get(kind, before).pid != before.pid and ask(machine.port) == 200)
        return
    until(lambda: not machine.ours() and is_free("127.0.0.1", machine.port))  # nobody is left to start anything
    assert machine.run("status").returncode == 3
    assert machine.run("start").returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_under_traffic_leave_nothing_over(make: Make) -> None:
    """20 rounds: engine, proxy and supervisor in turn."""
    kinds = ("engine", "proxy", "supervisor")
    proxy = {"PROXY_PORT": str(free_port()), "LITELLM_MASTER_KEY": "sk-test", "PROXY_STARTUP_WAIT_SECONDS": "60"}
    machine = make(PROXY="on", **proxy)
    assert machine.run("start").returncode == 0
    over = threading.Event()
    asking = threading.Thread(target=traffic, args=(machine.port, over))
    asking.start()
    try:
        for number in range(20):
            until(lambda: set(machine.ours()) == set(kinds))
            kill(machine, kinds[number % 3])
    finally:
        over.set()
        asking.join(WAIT)
    assert machine.run("stop").returncode == 0
    until(machine.is_empty)
