"""Nodes on the oracle and what stands in front of them, each a process of its own; for `bench_nodes`.

`proxies`: this project's. `session_affinity`: LiteLLM alone, with its own setting of that name. `smg`: SGLang's
gateway, where the program `smg` is found. It knows nothing of what is asked, and measures nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from start_llm.core.service import ModelCard
from start_llm.core.settings import load_settings
from start_llm.engine.loop import FIGURES_SECONDS
from start_llm.host.ports import free_port
from start_llm.proxy.launcher import LiteLLMProxy
from tests.oracle.build import build_oracle

KEY = "sk-bench"
READY_SECONDS = 400.0
STILL_SECONDS = 3 * FIGURES_SECONDS
SMG_SETTINGS = ("--policy", "cache_aware", "--cache-threshold", "0.5")
_COMPUTED = re.compile(r"^start_llm_tokens_prefilled_total (\S+)$", re.MULTILINE)


class NodeProcess:
    """A server on the oracle, in a process of its own, which can be killed, frozen and started again."""

    def __init__(self, model: Path, folder: Path, variables: Mapping[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = f"127.0.0.1:{self.port}"
        self._folder = folder
        folder.mkdir()
        self._variables = {
            **os.environ,
            "MODEL_PATH": str(model),
            "TRUST_REMOTE_CODE": "true",
            "START_LLM_CACHE_DIR": str(folder),
            "MLX_PORT": str(self.port),
            "PROXY": "off",
            "REANCHOR": "off",
            "KV_DISK_DIR": "off",
            "LOG_ROOT": str(folder / "logs"),
            "DEFAULT_TEMPERATURE": "0",
            "LOG_JSON": "true",
            **variables,
        }
        self.start()

    def start(self) -> None:
        with (self._folder / "said").open("a") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "start_llm", "serve"],
                cwd=Path(__file__).resolve().parent.parent,
                env=self._variables,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def answers(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=20).status_code == 200
        return False

    def wait(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self.answers():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError((self._folder / "said").read_text()[-2000:])
            time.sleep(0.2)

    def computed(self) -> int:
        """Prompt tokens since its start."""
        found = _COMPUTED.search(httpx.get(f"{self.url}/metrics", timeout=60).text)
        return int(float(found[1])) if found else 0

    def model(self) -> str:
        """The name of its main model."""
        return str(httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"])

    def answered(self) -> int:
        """Requests since its start."""
        found = re.findall(
            r"^start_llm_requests_total\{.*\} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE
        )
        return round(sum(map(float, found)))

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


def all_computed(nodes: Sequence[NodeProcess]) -> list[int]:
    """Prompt tokens of each node since its start, when they stand still: what a node shows is up to a second old."""
    found: list[int] = []
    while (now := [node.computed() for node in nodes]) != found:
        found = now
        time.sleep(STILL_SECONDS)
    return found


@contextmanager
def node_processes(count: int, folder: Path, **variables: str) -> Iterator[list[NodeProcess]]:
    """Nodes that answer. `variables`: of their environment."""
    model = build_oracle(folder / "oracle", "plain")
    made = [NodeProcess(model, folder / f"node-{number}", variables) for number in range(count)]
    try:
        for node in made:
            node.wait()
        yield made
    finally:
        for node in made:
            node.stop()


@contextmanager
def proxies(nodes: Sequence[NodeProcess], count: int, folder: Path) -> Iterator[list[str]]:
    """The addresses of `count` proxies of this project in front of the nodes."""
    settings = load_settings(
        None,
        proxy_port=0,
        start_llm_cache_dir=folder / "proxy",
        nodes=",".join(node.url for node in nodes),
        nodes_self="off",
        litellm_master_key=KEY,
        sse_ping_seconds=1.0,
    )
    card = ModelCard("oracle", 1, 200_000)
    made = [
        LiteLLMProxy(
            settings, server_url="http://127.0.0.1:9", model_id="oracle", card=card, log_path=folder / f"proxy-{number}"
        )
        for number in range(count)
    ]
    try:
        for proxy in made:
            proxy.start()
        for proxy in made:
            if not proxy.wait_ready(READY_SECONDS):
                raise RuntimeError(proxy.log_tail())
        yield [proxy.url for proxy in made]
    finally:
        for proxy in made:
            proxy.stop()


@contextmanager
def _running(command: list[str], log: Path, ready: str, says: str = "") -> Iterator[None]:
    """A program, from when it `says` that at the address `ready` until the end."""
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, cwd=log.parent)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            with suppress(httpx.HTTPError):
                answer = httpx.get(ready, timeout=20)
                if answer.status_code == 200 and says in answer.text:
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(log.read_text()[-2000:])
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def session_affinity(nodes: Sequence[NodeProcess], folder: Path) -> Iterator[list[str]]:
    """The address of a LiteLLM that keeps a session at its deployment, and knows nothing else of nodes."""
    entries = [
        {
            "model_name": "default",
            "litellm_params": {"model": "hosted_vllm/default", "api_base": f"{node.url}/v1", "api_key": "none"},
            "model_info": {"id": node.name, "supported_endpoints": ["/v1/chat/completions", "/v1/messages"]},
        }
        for node in nodes
    ]
    config = {
        "model_list": entries,
        "router_settings": {"optional_pre_call_checks": ["session_affinity"]},
        "general_settings": {"master_key": KEY},
    }
    path, port = folder / "affinity.yaml", free_port()
    path.write_text(json.dumps(config))
    litellm = str(Path(sys.executable).parent / "litellm")
    command = ["env", "LITELLM_LOCAL_MODEL_COST_MAP=True", litellm, "--config", str(path)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with _running(command, folder / "affinity.log", f"http://127.0.0.1:{port}/health/readiness"):
        yield [f"http://127.0.0.1:{port}"]


@contextmanager
def smg(nodes: Sequence[NodeProcess], folder: Path) -> Iterator[list[str]]:
    """The address of SGLang's gateway, as `docs/fleet.md` starts it."""
    port = free_port()
    command = [shutil.which("smg") or "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *(node.url for node in nodes), *SMG_SETTINGS]
    with _running(command, folder / "smg.log", f"http://127.0.0.1:{port}/v1/models", nodes[0].model()):
        yield [f"http://127.0.0.1:{port}"]
