"""The commands `audit`, `nodes`, `pull` and `rm`, and `models load`."""

from __future__ import annotations

import argparse
import json
import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from start_llm.cli import audit, fetched, loading
from start_llm.cli.models import main_recommend
from start_llm.cli.nodes import main
from start_llm.cli.reading import read
from start_llm.cli.running import called
from start_llm.core.errors import Conflict
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings, load_settings
from start_llm.dashboard.audit import AUDIT_FILE, Audit
from start_llm.dashboard.observer import Outcome
from start_llm.models import servers
from start_llm.models.pull import Pulled, PullError
from tests.proxy.node_stub import nodes

REPORT = CacheReport(prompt=1000, reused=900, computed=100, new=90)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    table = Audit(tmp_path / AUDIT_FILE, 30)
    for client, status in (("pi", 200), ("pi", 200), ("a\x1b[31m[bold]", 500)):
        request = ChatRequest(f"chatcmpl-0123456789{status}", "chat", "m", client=client)
        table.ended(request, Outcome(status, 2.0, 0.5, report=REPORT))
    table.close()
    return load_settings(None, start_llm_cache_dir=tmp_path)


def run(settings: Settings, *words: str) -> int:
    return called(audit.main, read(["audit", *words]), settings)


def test_the_last_requests(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(settings, "-n", "2") == 0
    heading, first, last = (line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert heading.index(" PROMPT") + 7 == first.index(" 1,000") + 6, "figures stand at the right"
    assert heading.split()[:3] == ["TIME", "ID", "CLIENT"]
    assert first.split()[2:6] == ["789200", "pi", "m", "1,000"] and "90%" in first and first.endswith("answered")
    assert "a?[31m[bold]" in last and last.endswith("failed (500)")


def test_sums_and_json(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(settings, "--by", "client", "--client", "pi") == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "pi",
        *["2", "2", "2,000", "90%", "180", "200", "0", "0.5", "s", "2.0", "s"],
    ]
    assert run(settings, "--json", "--outcome", "failed") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["status"], found["reused"]) == (500, 900)


def test_nothing_is_said_in_a_sentence(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(settings, "--client", "nobody", "--since", "all") == 0
    assert "No request is known" in capsys.readouterr().out
    assert run(settings.model_copy(update={"audit_days": 0.0}), "--client", "nobody") == 0
    assert "AUDIT_DAYS=0" in capsys.readouterr().out
    assert run(settings, "--since", "yesterday") == 2
    assert "30m, 12h, 7d" in capsys.readouterr().err


def test_ages() -> None:
    assert audit.moment("all", 1e9) == 0 and audit.moment("1.5h", 1e9) == 1e9 - 5400


ALONE = "NODES is not set: the proxy has this server alone.\n"


def show(capsys: pytest.CaptureFixture[str], *, as_json: bool = False, **given: object) -> tuple[int, str]:
    code = main(load_settings(None, **given), argparse.Namespace(json=as_json))
    return code, capsys.readouterr().out


def test_without_nodes_that_is_what_one_reads_first(capsys: pytest.CaptureFixture[str]) -> None:
    with nodes(1) as [stub]:
        port = int(stub.name.partition(":")[2])
        code, said = show(capsys, mlx_port=port)
        assert said.startswith(ALONE) and "ready" in said
        assert json.loads(show(capsys, mlx_port=port, as_json=True)[1])[0]["state"] == "ready"
    assert code == 0
    code, said = show(capsys, mlx_port=port)
    assert (code, said) == (1, f"NODES is not set, and no server answers on port {port}.\n")
    assert json.loads(show(capsys, mlx_port=port, as_json=True)[1])[0]["state"] == "gone"


def test_nodes_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with nodes(2) as stubs:
        given = {"nodes": ",".join(stub.url for stub in stubs), "nodes_self": "off"}
        code, said = show(capsys, **given)
        assert code == 0 and said.startswith("NODE ") and "NODES" not in said
        stubs[0].mode = "locked"
        code, said = show(capsys, **given)
        assert code == 1 and f"{stubs[0].name}: It does not take the key: NODES_API_KEY must be its API_KEY." in said


HEAD = "mlx-community/Qwen3.6-27B-MTP-4bit"


def pulled(name: str, monkeypatch: pytest.MonkeyPatch, refused: str = "", **given: str) -> tuple[int, list[str]]:
    """`refused`: what the hub does not have."""
    asked: list[str] = []

    def pull(repository: str, progress: Any, *, revision: str | None) -> Pulled:
        asked.append(f"{repository}@{revision}")
        if repository == refused:
            raise PullError(f"The hub has no model {repository}.")
        return Pulled(Path(), 10**9, 0, "c0ffee")

    monkeypatch.setattr(fetched, "pull", pull)
    return fetched.main_pull(load_settings(None, **given), argparse.Namespace(name=name, revision="main")), asked


def test_the_head_is_fetched_with_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = pulled("qwen3.6-27b", monkeypatch)
    assert found == (0, ["mlx-community/Qwen3.6-27B-4bit@main", f"{HEAD}@None"])
    assert capsys.readouterr().out.splitlines()[1].endswith("It drafts for qwen3.6-27b (DRAFT_MODEL=auto).")
    assert pulled("owner/other", monkeypatch) == (0, ["owner/other@main"])


@pytest.mark.parametrize("given", [{"drafts": "off"}, {"draft_model": "off"}, {"draft_model": "owner/own"}])
def test_a_head_that_would_not_draft_is_not_fetched(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert pulled("qwen3.6-27b", monkeypatch, **given) == (0, ["mlx-community/Qwen3.6-27B-4bit@main"])


def test_a_head_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert pulled("qwen3.6-27b", monkeypatch, refused=HEAD)[0] == 0
    assert capsys.readouterr().err == f"The hub has no model {HEAD}.\n"
    with pytest.raises(PullError):
        pulled("qwen3.6-27b", monkeypatch, refused="mlx-community/Qwen3.6-27B-4bit")


@pytest.mark.parametrize(
    ("at", "state", "said"),
    [
        (0, "ready", "is served on port 8123; `start-llm stop --port 8123` first."),
        (0, "stored", "is served on port 8123; `start-llm stop --port 8123` first."),
        (1, "ready", "is loaded on port 8123; `start-llm models unload model --port 8123` first."),
        (1, "stored", ""),
    ],
)
def test_what_a_server_needs_is_not_removed(at: int, state: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cards: list[dict[str, Any]] = [{"id": "other", "details": {"state": "ready", "source": "owner/other"}}]
    cards.insert(at, {"id": "model", "details": {"state": state, "source": "owner/model"}})
    removed: list[str] = []
    monkeypatch.setattr(servers, "running_ports", lambda _: [8123])
    monkeypatch.setattr(servers, "model_cards", lambda url, *_: cards if url.endswith(":8123") else None)
    monkeypatch.setattr(fetched, "removable", lambda _: Path())
    monkeypatch.setattr(fetched, "remove", lambda name: removed.append(name) or 0)
    with pytest.raises(Conflict, match=re.escape(f"owner/model {said}")) if said else nullcontext():
        assert fetched.main_rm(load_settings(None), argparse.Namespace(name="owner/model")) == 0
    assert removed == ([] if said else ["owner/model"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct comes with start_llm .*`rm -r /.*/SmolLM2-135M-Instruct-\\*`"),
        ("linked", "linked is a link to a folder of yours. `rm /.*/models/linked` takes it off the list"),
        ("put", "put is a folder of yours. `rm -r /.*/models/put` removes it"),
        ("..", "remove it yourself"),
        ("other", "other is none of the models that were fetched"),
    ],
)
def test_a_model_that_did_not_come_from_a_hub_is_said_to_be_what_it_is(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "models" / "put").mkdir(parents=True)
    (tmp_path / "models" / "linked").symlink_to(tmp_path / "models" / "put")
    settings = load_settings(None, start_llm_cache_dir=tmp_path)
    with pytest.raises(PullError, match=said):
        fetched.main_rm(settings, argparse.Namespace(name=name))
    assert (tmp_path / "models" / "linked").exists()


def test_recommend_names_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_recommend(load_settings(None), argparse.Namespace(memory=32)) == 0
    assert f"qwen3.6-27b: `start-llm pull qwen3.6-27b` fetches {HEAD} with it" in capsys.readouterr().out.replace(
        "python3.12 ", ""
    )


DONE = {"id": "tiny", "context_length": 8, "details": {"state": "ready", "weight_bytes": 7_100_000_000}}
STEPS = [
    None,
    {"step": "reading tiny, 7.1 GB", "part": 0.0},
    {"step": "reading tiny, 7.1 GB", "part": 0.5},
    {"step": "loading tiny", "part": 0.2},
    {"step": "looking what tiny can do", "part": 0.0},
    None,
]


def test_the_steps_of_the_server_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = threading.Event()

    def cards(settings: Any) -> Iterator[Any]:
        now = STEPS.pop(0)
        if not STEPS:
            seen.set()
        yield {"id": "tiny", "details": {"state": "loading"} | ({"loading": now} if now else {})}

    def post(url: str, *_: Any) -> tuple[int, Any]:
        assert seen.wait(60)
        return 200, DONE

    monkeypatch.setattr(loading, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(loading, "server_state", lambda *_: "ready")
    monkeypatch.setattr(loading, "server_cards", lambda settings: cards(settings) if STEPS else [])
    monkeypatch.setattr(loading, "ask_json", post)
    monkeypatch.setattr("start_llm.dashboard.progress.LINE_SECONDS", 0.0)
    asked = argparse.Namespace(what="load", name="tiny", off=False, json=False)
    assert loading.change(load_settings(None), asked) == 0
    said = capsys.readouterr()
    assert said.out.startswith("tiny is loaded: 7.1 GB of weights, context 8 tokens, ")
    assert said.err.splitlines() == [
        "loading tiny ...",
        "reading tiny, 7.1 GB ...",
        "reading tiny, 7.1 GB: 50%",
        "reading tiny, 7.1 GB: done (0 s)",
        "loading tiny: 20%",
        "looking what tiny can do ...",
    ]
