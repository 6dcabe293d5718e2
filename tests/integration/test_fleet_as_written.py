"""The commands of `docs/fleet.md` as they stand there, typed on two machines that are two folders of this one.

Other than there are the model, the addresses and the ports. Not typed: `pip install`, which needs the network.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from start_llm.host.ports import free_port
from start_llm.proxy.fleet import NODE_HEADER
from tests.engine.ranks.checkpoints import write_checkpoint
from tests.integration.lifecycle import Machine
from tests.integration.processes import ROOT, WAIT
from tests.waiting import until

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]
TEXT = (ROOT / "docs" / "fleet.md").read_text("utf-8")
START_SECONDS = 600


def blocks(heading: str) -> list[str]:
    """What is typed in the part with this heading."""
    part = re.split(r"^##+ ", TEXT.partition(f" {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^```bash\n(.*?)^```", part, re.MULTILINE | re.DOTALL)


def machine(model: Path, folder: Path, **settings: str) -> Machine:
    folder.mkdir()
    made = Machine(model, folder, PROXY="on", PROXY_PORT=str(free_port()), KV_DISK_DIR="off", **settings)
    program = folder / "bin" / "start-llm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m start_llm "$@"\n')
    program.chmod(0o755)
    return made


def script(block: str, changes: Mapping[str, str]) -> list[str]:
    for there, here in changes.items():
        block = block.replace(there, here)
    return ["bash", "-e", "-o", "pipefail", "-c", block]


@contextmanager
def running(
    mac: Machine, command: list[str], end: int = signal.SIGTERM, **environment: str
) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """A command on that machine until the end. Gives what waits for it to do something, while it runs."""
    with (mac.folder / "said").open("w") as said:
        process = subprocess.Popen(command, env=mac.environment | environment, stdout=said, stderr=said, cwd=mac.folder)

    def reach(condition: Callable[[], bool]) -> None:
        def there() -> bool:
            with suppress(httpx.HTTPError):
                return condition()
            return False

        until(lambda: there() or process.poll() is not None)
        assert process.poll() is None, (mac.folder / "said").read_text()

    try:
        yield reach
    finally:
        process.send_signal(end)
        process.wait(WAIT)


@pytest.fixture
def macs(oracle_path: Callable[..., Path], tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    model = oracle_path("plain")
    first = machine(model, tmp_path / "mac-1", LITELLM_MASTER_KEY="sk-master")
    second = machine(model, tmp_path / "mac-2")
    try:
        yield first, second
    finally:
        first.end()
        second.end()


def test_two_macs(macs: tuple[Machine, Machine]) -> None:
    first, second = macs
    changes = {
        "mlx-community/Qwen3.6-27B-4bit": first.environment["MODEL_PATH"],
        "http://mac-2:8080": f"http://127.0.0.1:{second.port}",
        "--host 0.0.0.0": "--host 127.0.0.1",
        "http://localhost:4000": f"http://127.0.0.1:{first.environment['PROXY_PORT']}",
    }

    def typed(mac: Machine, block: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            script(block, changes), env=mac.environment, capture_output=True, text=True, timeout=START_SECONDS
        )

    on_the_second, on_the_first, asked = blocks("Two Macs in ten minutes")
    # Here an address takes the place of that name, so nothing else would notice that the second Mac refuses it.
    assert "export NODES=http://mac-2:8080\n" in on_the_first and "export ALLOWED_HOSTS=mac-2\n" in on_the_second
    found = typed(second, on_the_second)
    assert found.returncode == 0, found.stdout + found.stderr
    found = typed(first, on_the_first)
    assert found.returncode == 0, found.stdout + found.stderr
    rows = {line.split()[0]: line.split()[1] for line in found.stdout.splitlines() if line.startswith("127.0.0.1:")}
    assert rows == {f"127.0.0.1:{mac.port}": "ready" for mac in macs}, found.stdout
    answers: list[str] = []

    def is_answered() -> bool:  # the proxy is ready some seconds behind its server
        answers.append(typed(first, asked).stdout)
        return NODE_HEADER in answers[-1]

    until(is_answered)
    assert answers[-1].split()[1].rstrip(";") in rows


@pytest.mark.live
def test_ranks(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "plain")
    mac = machine(model, tmp_path / "mac-1")
    hosts = [{"ssh": name, "ips": ["127.0.0.1"]} for name in ("mac-1", "mac-2")]
    (mac.folder / "home").mkdir()
    (mac.folder / "home" / "hosts.json").write_text(json.dumps(hosts))  # where a clone lies
    changes = {"mlx-community/Qwen3-32B-4bit": str(model), "--hosts mac-1,mac-2": "--hosts 127.0.0.1,127.0.0.1"}
    with_names, with_file = blocks("Ranks: one model over several machines")

    def is_answered() -> bool:
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        with suppress(httpx.HTTPError):
            return httpx.post(f"http://127.0.0.1:{mac.port}/v1/chat/completions", json=body, timeout=WAIT).is_success
        return False

    try:
        with running(mac, script(with_names, changes), signal.SIGINT, PROXY="off", PROXY_PORT="0") as reach:
            reach(is_answered)
        command, environment = script(with_file, changes), mac.environment | {"PROXY": "off", "PROXY_PORT": "0"}
        found = subprocess.run(
            command, env=environment, cwd=mac.folder, capture_output=True, text=True, timeout=START_SECONDS
        )
        assert found.returncode == 0, found.stdout + found.stderr
        until(is_answered)
    finally:
        mac.end()


def test_behind_smg(macs: tuple[Machine, Machine]) -> None:
    program, (block,) = shutil.which("smg"), blocks("Behind SGLang's gateway")
    if program is None:
        pytest.skip("smg is not in PATH")
    port = free_port()
    changes = {"smg launch": f"exec {program} launch", "--port 4000": f"--port {port}"}
    for number, mac in enumerate(macs, start=1):
        found = mac.run("start", "--no-proxy")
        assert found.returncode == 0, found.stdout + found.stderr
        changes[f"http://mac-{number}:8080"] = f"http://127.0.0.1:{mac.port}"
    body = {"model": "oracle", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}

    def is_answered() -> bool:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=WAIT)
        return answer.status_code == 200 and "x-start-llm-cache" in answer.headers

    with running(macs[0], script(block, changes)) as reach:
        reach(is_answered)


def test_events(macs: tuple[Machine, Machine]) -> None:
    pytest.importorskip("zmq", reason="the extra `fleet` is not installed")
    mac, (block,) = macs[1], blocks("Events")
    lines = [line for line in block.splitlines() if not line.startswith("pip install ")]
    assert len(lines) == block.count("\n") - 1
    command = script("\n".join(lines), {":5557": f":{free_port()}"})
    url = f"http://127.0.0.1:{mac.port}/metrics"
    with running(mac, command, PROXY="off") as reach:
        reach(lambda: "start_llm_kv_events_stored_total" in httpx.get(url).text)
