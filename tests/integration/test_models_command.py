"""The command `models` and the running server: what is loaded, loading, unloading, pinning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm.__main__ import main
from start_llm.host.ports import free_port
from tests.integration.live import Live, live
from tests.integration.pooled import BUDGET_FOR_TWO
from tests.oracle import build_oracle

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the three models lie, the main one among them."""
    folder = tmp_path_factory.mktemp("cache")
    for kind in ("plain", "hybrid", "windowed"):
        build_oracle(folder / "models" / f"oracle-{kind}", kind)
    return folder


@pytest.fixture(scope="module")
def serving(cache: Path) -> Iterator[Live]:
    settings = {"pool_memory_bytes": BUDGET_FOR_TWO, "kv_disk_dir": "auto", "pool_wait_seconds": 0}
    with live(cache / "models" / "oracle-plain", cache, **settings) as made:
        yield made


@pytest.fixture
def server(serving: Live) -> Live:
    """As after its start: the main model is loaded, and nothing is pinned."""
    for name in ("oracle-plain", "oracle-hybrid", "oracle-windowed"):
        serving.app.pool.pin(name, False)
    for name in ("oracle-hybrid", "oracle-windowed"):
        serving.app.pool.unload(name)
    return serving


@pytest.fixture
def command(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Runs ``start-llm models WORDS``; gives its exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "400")  # the names are paths, which are long where tests run side by side
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path))
    monkeypatch.setenv("START_LLM_CACHE_DIR", str(cache))
    monkeypatch.setenv("MODEL_MAP", "claude-haiku-*=oracle-hybrid")

    def run(server: Live | None, *words: str) -> tuple[int, str, str]:
        port = free_port() if server is None else server.app.port
        capsys.readouterr()
        code = main(["models", *words, "--port", str(port)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def states(command: Command, server: Live) -> dict[str, dict[str, Any]]:
    code, out, _ = command(server, "--json")
    assert code == 0
    return {Path(model["name"]).name: model["server"] for model in json.loads(out)}


def test_in_and_out_of_a_running_server(command: Command, server: Live) -> None:
    assert states(command, server)["oracle-hybrid"]["state"] == "stored"
    code, out, err = command(server, "load", "oracle-hybrid")
    assert code == 0 and err.startswith("loading oracle-hybrid ...\n") and out.startswith("oracle-hybrid is loaded: ")
    server.chat([{"role": "user", "content": "Hello."}], model="oracle-hybrid")
    found = states(command, server)
    assert {name: model["state"] for name, model in found.items()} == {
        "oracle-plain": "ready",
        "oracle-hybrid": "ready",
        "oracle-windowed": "stored",
    }
    assert found["oracle-hybrid"]["kv_bytes"] > 0 and found["oracle-hybrid"]["weight_bytes"] > 0

    assert command(server, "pin", "oracle-hybrid")[1] == "oracle-hybrid is pinned: once it is loaded, it stays.\n"
    _, listed, _ = command(server)
    heading, *lines = listed.splitlines()
    assert heading.split() == ["NAME", "SIZE", "CONTEXT", "STATE", "KV", "CAN"]
    assert any("oracle-hybrid" in line and "ready, pinned" in line and line.count("B  ") == 2 for line in lines)
    assert any("oracle-windowed" in line and "stored" in line for line in lines)
    assert lines[-1] == "MODEL_MAP    claude-haiku-* means oracle-hybrid"

    lease = server.app.pool.open("oracle-plain")
    code, _, err = command(server, "unload", "oracle-plain")
    lease.close()
    assert code == 1 and "oracle-plain is in use (requests at work or waiting: 1); end them first." in err

    assert command(server, "pin", "oracle-plain")[0] == 0
    code, _, err = command(server, "load", "oracle-windowed")
    assert code == 1 and "POOL_MEMORY_BYTES" in err and "models unload NAME` makes room." in err

    code, out, _ = command(server, "pin", "oracle-hybrid", "--off", "--json")
    assert code == 0 and json.loads(out)["details"]["pinned"] is False
    assert command(server, "unload", "oracle-hybrid")[1] == "oracle-hybrid is not loaded any more.\n"
    assert states(command, server)["oracle-hybrid"]["state"] == "stored"
    assert "It is not loaded; " in command(server, "pin", "oracle-hybrid")[1]
    for name in ("oracle-hybrid", "oracle-plain"):
        assert "is not pinned" in command(server, "pin", name, "--off")[1]


def test_a_name_that_is_none(command: Command, server: Live, cache: Path) -> None:
    code, _, err = command(server, "load", "oracle-hybird")
    assert code == 1 and "this server serves 'oracle-plain'" in err and "Did you mean oracle-hybrid" in err
    code, _, err = command(server, "load", "owner/something-else-7b")
    assert code == 1 and err.endswith("pull owner/something-else-7b` fetches it.\n")
    folder = cache / "of mine" / "oracle-hybrid"  # its name is one of the server's: it is another folder all the same
    build_oracle(folder, "hybrid")
    code, _, err = command(server, "load", str(folder))
    assert code == 1 and f"ln -s '{folder}' {cache / 'models'}/\n" in err and "models load oracle-hybrid --port" in err
    code, _, err = command(server, "load", str(cache))
    assert code == 1 and err.endswith(f"{cache} is no model: there is no config.json in it.\n")
    code, _, err = command(server, "load")
    assert code == 2 and "NAME is missing" in err
    code, _, err = command(server, "load", "oracle-hybrid", "--off")
    assert code == 2 and "--off belongs to pin" in err


def test_without_a_server(command: Command) -> None:
    code, out, _ = command(None)
    assert code == 0 and out.splitlines()[0].split() == ["NAME", "SIZE", "CONTEXT", "CAN"]
    assert all(model is None for model in (entry["server"] for entry in json.loads(command(None, "--json")[1])))
    code, _, err = command(None, "load", "oracle-plain")
    assert code == 3 and "No server answers on port" in err and "start oracle-plain --port" in err
    code, _, err = command(None, "unload", "oracle-plain")
    assert code == 3 and err.endswith("Nothing is loaded there.\n")
