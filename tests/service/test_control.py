"""What is said of a start that nobody waits for any more, and of a server that says odd things."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from start_llm.core.settings import Settings, load_settings
from start_llm.host.mac import MacFacts
from start_llm.models.device import GIB, Device
from start_llm.service import commands, control
from start_llm.service.place import Place


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(None, start_llm_cache_dir=tmp_path, log_root=tmp_path, mlx_port=1)


def test_who_interrupts_a_start_is_told_that_it_goes_on(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "is_free", lambda *_: True)
    monkeypatch.setattr(control, "spawn", lambda *_: SimpleNamespace(poll=lambda: None))
    monkeypatch.setattr(control, "_answers_before", interrupted)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        control.bring_up(settings, Place(settings), {}, said.append)
    assert said[-1].startswith("the server goes on starting; ") and said[-1].endswith(" stop --port 1` ends it")


def test_what_is_added_to_a_log_is_passed_on_with_its_indentation(tmp_path: Path) -> None:
    """`logs -f` shows tracebacks by it. Of a bar that is drawn again and again, the last state."""
    log = tmp_path / "log"
    log.write_bytes(b"told before\n")
    said: list[str] = []
    follower = control.Follower(log, said.append, log.stat().st_size)
    with log.open("ab") as file:
        file.write(b'Traceback:\n  File "a.py", line 1\n    x\n\n10%\r20%\n  ends with CR LF\r\nhal')
    follower.look()
    with log.open("ab") as file:
        file.write(b"f\n")
    follower.look()
    assert said == ["Traceback:", '  File "a.py", line 1', "    x", "20%", "  ends with CR LF", "half"]


def test_a_log_is_shown_without_what_a_terminal_obeys(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LiteLLM quotes names that clients send, and transformers what stands in a model's files."""
    log = tmp_path / "proxy.log"
    log.write_text("no model \x1b]52;c;QQ==\x07\x9b1mx\n")

    def comes(_: float) -> None:
        if log.read_text().count("\n") > 1:
            raise KeyboardInterrupt
        with log.open("a") as file:
            file.write("a bar \x1b[2J\r\rnor \x1bc this\n")

    monkeypatch.setattr(commands.time, "sleep", comes)
    with pytest.raises(KeyboardInterrupt):
        commands.main_logs(settings, argparse.Namespace(proxy_log=True, lines=5, follow=True))
    assert capsys.readouterr().out == "no model ]52;c;QQ==1mx\nnor c this\n"


def test_status_shows_what_a_server_says_without_what_a_terminal_obeys(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    health = {"state": "busy", "detail": "loading \x1b[2J\x9b1mx"}
    monkeypatch.setattr(commands, "ask_json", lambda *_, **__: (200, health))
    monkeypatch.setattr(commands, "model_cards", lambda *_: [{"id": "a\x1b]0;b\x07", "context_length": 8}])
    assert commands.main_status(settings, argparse.Namespace(json=False)) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["model", "a]0;b  (context 8 tokens)"] in lines and ["now", "loading [2J1mx"] in lines


def test_ps_shows_each_model_that_is_loaded(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = [
        {"id": name, "details": {"state": state, "weight_bytes": size, "kv_bytes": 83 * 10**6}}
        for name, state, size in (("main", "ready", 540), ("off", "stored", 1), ("bad", "failed", 1))
    ]
    cards.append({"id": "second", "details": {"state": "loading", "weight_bytes": 7.1e9}})
    monkeypatch.setattr(commands, "ask_json", lambda *_, **__: (200, {"state": "ready", "running": 2}))
    monkeypatch.setattr(commands, "model_cards", lambda *_: cards)
    monkeypatch.setattr(commands, "running_ports", lambda _: [8081])
    assert commands.main_ps(settings, argparse.Namespace(json=False)) == 0
    _, main, second = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main == ["8081", "main", "ready", "540", "B", "83.0", "MB", "2", "0", "0", "0", "B", "0", "s"]
    assert second == ["second", "loading", "7.1", "GB", "0", "B"]


def test_status_tells_of_the_machine_and_what_to_do(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("START_LLM_HOME", str(tmp_path))
    settings = load_settings(None, start_llm_cache_dir=tmp_path / "not yet", mlx_port=1)
    monkeypatch.setattr(commands, "ask_json", lambda *_, **__: (200, {"state": "ready"}))
    monkeypatch.setattr(commands, "model_cards", lambda *_: [])
    assert commands.main_status(settings, argparse.Namespace(json=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"settings     {tmp_path / '.env'} (not there yet)"
    (line,) = [line for line in lines if line.startswith("machine ")]
    assert " GB of memory and " in line and line.endswith("B of disk are free")

    mac = Device("macOS", "Apple M5 Max", 128 * GIB, "metal", 96 * GIB)
    monkeypatch.setattr(commands, "inspect_device", lambda _: mac)
    monkeypatch.setattr(commands, "read_mac", lambda: MacFacts("26.1", True, 98304, "macosx_15_0"))
    monkeypatch.setattr(commands, "free_disk", lambda folder: (folder, GIB))
    known = commands.machine(settings)
    assert known["machine"].startswith(
        "Apple M5 Max, macOS 26.1, the GPU may use 103.1 GB (iogpu.wired_limit_mb=98304); "
    )
    power, kernels, disk = known["notes"]
    assert "low power mode is on" in power and "neural accelerators" in kernels and "KV_DISK_DIR" in disk
