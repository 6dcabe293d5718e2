"""The command `pull`: with a model comes the head that is published for it."""

from __future__ import annotations

import argparse
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from start_llm.cli import fetched
from start_llm.cli.models import main_recommend
from start_llm.core.errors import Conflict
from start_llm.core.settings import load_settings
from start_llm.models import servers
from start_llm.models.pull import Pulled, PullError

HEAD = "mlx-community/Qwen3.6-27B-MTP-4bit"


def run(name: str, monkeypatch: pytest.MonkeyPatch, refused: str = "", **given: str) -> tuple[int, list[str]]:
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
    found = run("qwen3.6-27b", monkeypatch)
    assert found == (0, ["mlx-community/Qwen3.6-27B-4bit@main", f"{HEAD}@None"])
    assert capsys.readouterr().out.splitlines()[1].endswith("It drafts for qwen3.6-27b (DRAFT_MODEL=auto).")
    assert run("owner/other", monkeypatch) == (0, ["owner/other@main"])


@pytest.mark.parametrize("given", [{"drafts": "off"}, {"draft_model": "off"}, {"draft_model": "owner/own"}])
def test_a_head_that_would_not_draft_is_not_fetched(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("qwen3.6-27b", monkeypatch, **given) == (0, ["mlx-community/Qwen3.6-27B-4bit@main"])


def test_a_head_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("qwen3.6-27b", monkeypatch, refused=HEAD)[0] == 0
    assert capsys.readouterr().err == f"The hub has no model {HEAD}.\n"
    with pytest.raises(PullError):
        run("qwen3.6-27b", monkeypatch, refused="mlx-community/Qwen3.6-27B-4bit")


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
