from __future__ import annotations

import json
from pathlib import Path

import pytest

from start_llm.cli import audit
from start_llm.cli.reading import read
from start_llm.cli.running import called
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings, load_settings
from start_llm.dashboard.audit import AUDIT_FILE, Audit
from start_llm.dashboard.observer import Outcome

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
