"""What `doctor` says of the machines that compute one model together."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from start_llm.cli import hosts
from start_llm.cli.hosts import check_hosts, describe
from start_llm.core.settings import Settings

NAMES = ("mac-1", "well", "old", "other", "none", "gone", "odd")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([{"ssh": name, "ips": ["10.0.0.1"]} for name in NAMES]))
    return Settings(_env_file=None, hostfile=file, model_path=str(folder))  # type: ignore[call-arg]


@pytest.mark.live
def test_each_host_gets_a_line(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    here = describe(settings.model_path)
    old = here | {"versions": here["versions"] | {"mlx": "0.1"}}
    answers: dict[str, Any] = {"well": here, "old": old, "other": here | {"model": "x"}, "none": here | {"model": None}}
    programs = {name: f"print({json.dumps(answer)!r})" for name, answer in answers.items()}
    programs |= {"gone": "raise SystemExit('ssh: connect to host gone: No route to host')"}
    programs |= {"odd": "import sys; sys.stdout.buffer.write(b'\\xff\\n'); sys.stderr.buffer.write(b'\\xfe here\\n')"}
    asked: list[tuple[str, ...]] = []

    def command(host: Any, *arguments: str) -> list[str]:
        asked.append(arguments)
        return [sys.executable, "-c", programs[host.name]]

    monkeypatch.setattr(hosts, "host_command", command)
    found = {finding.subject: finding for finding in check_hosts(settings)}
    assert asked == [("describe", "--source", settings.model_path)] * 6
    assert found["well"].verdict == "ok" and "same versions, same model" in found["well"].text
    assert found["old"].verdict == "bad" and found["old"].text.endswith("other versions than here: mlx 0.1")
    assert found["other"].verdict == "bad" and "other ones" in found["other"].text
    assert found["none"].verdict == "ok" and "not there" in found["none"].text
    assert found["gone"].verdict == "bad" and "No route to host" in found["gone"].text
    assert found["odd"].verdict == "bad" and found["odd"].text == "does not answer: \ufffd here"


@pytest.mark.live
def test_a_silent_host_is_not_waited_for_long(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "host_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(hosts, "HOST_SECONDS", 0.2)
    assert {finding.text for finding in check_hosts(settings)} == {"does not answer in 0.2 s"}


@pytest.mark.live
def test_without_ssh_each_host_gets_a_line_too(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "host_command", lambda *_: ["/there/is/no/ssh"])
    found = list(check_hosts(settings))
    assert len(found) == len(NAMES) - 1
    assert all(each.verdict == "bad" and "cannot be asked: [Errno 2]" in each.text for each in found)


def test_without_hosts_nobody_is_asked() -> None:
    assert list(check_hosts(Settings(_env_file=None))) == []  # type: ignore[call-arg]


def test_a_host_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (finding,) = check_hosts(Settings(_env_file=None, hostfile=tmp_path / "none"))  # type: ignore[call-arg]
    assert finding.verdict == "bad" and "HOSTFILE=" in finding.text
