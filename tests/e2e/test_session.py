"""One server that is started, two real agents that work on it, one that ends while the other goes on, and its end."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from start_llm.host.ports import free_port, is_free
from tests.e2e.scenarios import NOTES, SCENARIOS, typed
from tests.e2e.world import ROOT, World, begin, end, skip_unless_installed
from tests.integration.lifecycle import Machine
from tests.oracle.oracle import script
from tests.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# As it was installed elsewhere, if START_LLM_E2E_PROGRAM names it: for instance what `uv tool install .` has made.
ELSEWHERE = "START_LLM_E2E_PROGRAM" in os.environ
PROGRAM = shlex.split(os.environ.get("START_LLM_E2E_PROGRAM", f"{shlex.quote(sys.executable)} -m start_llm"))
STOP_SECONDS = 120


@dataclass(frozen=True)
class Talk:
    """How an agent is kept running and asked several times.

    Attributes:
        arguments: its own.
        said: a prompt as it is written to its standard input, which it reads to its end.
    """

    arguments: list[str]
    said: Callable[[str], str]


TALKS = {
    "pi": Talk(["--mode", "rpc"], lambda prompt: json.dumps({"type": "prompt", "message": prompt}) + "\n"),
    "aider": Talk(SCENARIOS["aider"].first("", Path())[0], typed),
}


class Installed(Machine):
    """A machine whose start_llm is `PROGRAM`, its proxy too, and whose agents are real."""

    def command(self, *words: str) -> list[str]:
        return [*PROGRAM, *words]


@dataclass
class Agent:
    """A launched agent in its own repository."""

    name: str
    repository: Path
    process: subprocess.Popen[bytes]
    output: Path

    def ask(self, words: str, *answers: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(TALKS[self.name].said(f"{words} {script(*answers)}").encode())
        self.process.stdin.flush()

    def has_written(self, name: str, text: str) -> None:
        """Waits until that file says so."""

        def there() -> bool:
            assert self.process.poll() is None, self.output.read_text(errors="replace")[-3000:]
            path = self.repository / name
            return path.exists() and path.read_text().strip() == text.strip()

        until(there)

    def leave(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(STOP_SECONDS)


def launch(machine: Installed, world: World, name: str, stack: ExitStack) -> Agent:
    repository = world.repository(name)
    shared = {key: value for key, value in machine.environment.items() if key not in {"PATH", "HOME", "PYTHONPATH"}}
    environment = shared | world.environment(name)
    same = {key: machine.environment[key] for key in ("START_LLM_CACHE_DIR", "LOG_ROOT", "PYTHONPATH")}
    environment |= same | {"PI_OFFLINE": "1"}
    output = machine.folder / f"{name}.txt"
    command = machine.command("launch", name, "--", *TALKS[name].arguments)
    process = begin(command, repository, environment, output, subprocess.PIPE)
    stack.callback(end, process)
    return Agent(name, repository, process, output)


@pytest.mark.parametrize("first", ["pi", "aider"])
def test_of_two_agents_on_one_server_either_may_end_first(first: str, oracle_folder: Path, tmp_path: Path) -> None:
    for name in TALKS:
        skip_unless_installed(name)
    proxy_port = free_port()
    path = "" if ELSEWHERE else str(ROOT)
    machine = Installed(oracle_folder, tmp_path, PROXY="on", PROXY_PORT=str(proxy_port), PYTHONPATH=path)
    world = World(tmp_path / "world", [], machine.port, machine.port)
    with ExitStack() as stack:
        stack.callback(machine.end)
        started = machine.run("start")
        assert started.returncode == 0, started.stdout + started.stderr
        server = machine.state()
        assert server is not None and "in the background" in machine.run("status").stdout

        agents = {name: launch(machine, world, name, stack) for name in TALKS}
        for name, agent in agents.items():
            agent.ask("Repair add in src/calc.py.", *SCENARIOS[name].work(agent.repository))
        for agent in agents.values():
            agent.has_written("src/calc.py", "def add(a, b):\n    return a + b\n")
        assert json.loads(machine.run("status", "--json").stdout)["users"] == 2
        (other,) = agents.keys() - {first}
        assert agents[first].leave() == 0, agents[first].output.read_text()[-3000:]

        agents[other].ask("Write it down in NOTES.md.", *SCENARIOS[other].note(agents[other].repository))
        agents[other].has_written("NOTES.md", NOTES)
        assert agents[other].leave() == 0, agents[other].output.read_text()[-3000:]

        after = machine.state()
        assert after is not None and (after["pid"], after["restarts"]) == (server["pid"], 0), "the same one all along"
        stopped = machine.run("stop")
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        assert machine.is_empty() and is_free("127.0.0.1", proxy_port)
