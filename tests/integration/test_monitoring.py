"""The dashboard and the alert rules in ``monitoring/`` ask for figures that a server has."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.live import live

FOLDER = Path(__file__).parents[2] / "monitoring"
WORDS = {"start_llm"}  # the job


def names(text: str) -> set[str]:
    """The metrics that expressions of PromQL name."""
    return set(re.findall(r"\b(start_llm_\w+)", text)) - WORDS


def kinds(text: str) -> set[str]:
    return set(re.findall(r'kind="(\w+)"', text))


@pytest.fixture(scope="module")
def figures(oracle_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with live(oracle_path("plain"), tmp_path_factory.mktemp("cache"), kv_disk_dir="auto") as server:
        server.chat([{"role": "user", "content": "hello"}], max_tokens=2)
        yield server.get("/metrics").text


def expressions(file: str) -> str:
    text = (FOLDER / file).read_text()
    if file.endswith(".json"):
        return "\n".join(target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"])
    return text


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yml"])
def test_each_figure_is_one_that_a_server_has(figures: str, file: str) -> None:
    text = expressions(file)
    # A family without a sample yet (misses) has its TYPE line only.
    there = set(re.findall(r"^(?:# TYPE )?(start_llm_\w+)", figures, re.MULTILINE))
    assert len(names(text)) >= 5
    assert names(text) - there == set()
    assert kinds(text) - kinds(figures) == set()


@pytest.mark.parametrize("fault", ["", "expr: sum(("])
def test_prometheus_reads_the_rules(tmp_path: Path, fault: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool")
    rules = tmp_path / "alerts.yml"
    rules.write_text((FOLDER / "alerts.yml").read_text().replace("expr: sum(", fault or "expr: sum("))
    run = subprocess.run([promtool, "check", "rules", rules], capture_output=True, check=False, timeout=60)
    assert (run.returncode != 0) == bool(fault), run.stderr


def test_prometheus_reads_the_metrics(figures: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool")
    command = [promtool, "check", "metrics"]
    run = subprocess.run(command, input=figures, capture_output=True, text=True, check=False, timeout=60)
    # The names that routers read are vLLM's, which are not as Prometheus would have them.
    assert [line for line in run.stderr.splitlines() if not re.match(r"vllm:\w+ .*':'", line)] == []
    assert "vllm:num_requests_running" in figures and run.returncode in (0, 3)
