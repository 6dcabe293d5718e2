from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from start_llm.cli.reading import read
from start_llm.cli.running import called
from start_llm.clients import CLIENTS
from start_llm.clients.agent import Endpoint, LaunchPlan
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings, load_settings
from start_llm.dashboard.audit import AUDIT_FILE, Audit
from start_llm.dashboard.observer import Outcome
from start_llm.host.home import home
from start_llm.host.ports import free_port
from start_llm.launch import cli
from start_llm.launch.cli import client_environment
from start_llm.service import control
from start_llm.service.control import changed_settings
from start_llm.service.place import Place, ServerState
from tests.launch.stub import make_client, serving


def main(words: list[str], settings: Settings) -> int:
    return called(cli.main, read(["launch", *words]), settings)


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that runs."""
    with serving() as number:
        yield number


def settings(folder: Path, **values: object) -> Settings:
    return load_settings(None, start_llm_cache_dir=folder / "cache", log_root=folder / "logs", **values)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every client is installed, and writes to this file how it was run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for command in ("pi", "claude", "codex", "openclaw"):
        make_client(folder, command)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("START_LLM_TEST_OUT", str(tmp_path / "out"))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-of-the-vendor")
    return tmp_path / "out"


def lines(out: Path) -> list[str]:
    return out.read_text().splitlines()


@pytest.mark.live
def test_a_client_runs_against_the_running_server(
    port: int, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pi", "--", "-p", "two words", "--print"], settings(tmp_path, mlx_port=port)) == 7
    said = lines(out)
    arguments = [line.removeprefix("ARG=") for line in said if line.startswith("ARG=")]
    assert arguments == ["--provider", "start_llm", "--model", "served-name", "-p", "two words", "--print"]
    assert f"CWD={tmp_path}" in said
    config = tmp_path / "cache" / "launch" / "pi" / "models.json"
    provider = json.loads(config.read_text())["providers"]["start_llm"]
    assert provider["baseUrl"] == f"http://127.0.0.1:{port}/v1" and provider["models"][0]["contextWindow"] == 50_000
    assert provider["models"][0]["input"] == ["text", "image"], "the server's card says that the model sees"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600 and stat.S_IMODE(config.parent.stat().st_mode) == 0o700


@pytest.mark.live
def test_a_server_that_was_killed_does_not_keep_the_next_one_alive(port: int, tmp_path: Path, out: Path) -> None:
    given = settings(tmp_path, mlx_port=port)
    Place(given).keep()
    assert main(["pi"], given) == 7
    assert not Place(given).is_kept
    lock = Place(given).lock
    assert lock.take()  # one that runs stays as it was asked for
    Place(given).write(ServerState(os.getpid(), 0.0, phase="ready"))
    Place(given).keep()
    assert main(["pi"], given) == 7 and Place(given).is_kept
    lock.drop()


@pytest.mark.live
def test_the_vendors_key_does_not_reach_the_client(port: int, tmp_path: Path, out: Path) -> None:
    assert main(["claude"], settings(tmp_path, mlx_port=port, api_key="mine")) == 7
    said = lines(out)
    assert not any(line.startswith("ANTHROPIC_API_KEY=") for line in said)
    assert "ANTHROPIC_DEFAULT_HAIKU_MODEL=claude-haiku-4-5" in said, "the server has another model for it"
    assert "ANTHROPIC_AUTH_TOKEN=mine" in said and f"ANTHROPIC_BASE_URL=http://127.0.0.1:{port}" in said


ADAPTED = {"source": "owner/served", "adapter": "titles"}


@pytest.mark.live
@pytest.mark.parametrize(
    ("served", "given", "told"),
    [
        ({"small": {"source": "owner/served"}}, {}, "ANTHROPIC_DEFAULT_HAIKU_MODEL=served-name"),
        ({"small": {"source": "owner/other-name"}}, {}, "ANTHROPIC_DEFAULT_HAIKU_MODEL=claude-haiku-4-5"),
        ({"small": ADAPTED}, {}, "ANTHROPIC_DEFAULT_HAIKU_MODEL=claude-haiku-4-5"),
        ({"scale": 4.0}, {}, "CLAUDE_CODE_AUTO_COMPACT_WINDOW=200000"),
        ({}, {"context_scale": 2.0}, "CLAUDE_CODE_AUTO_COMPACT_WINDOW=50000"),
    ],
)
def test_claude_code_is_told_what_the_server_that_runs_says(
    tmp_path: Path, out: Path, served: dict[str, Any], given: dict[str, float], told: str
) -> None:
    """Of its small model, and by what it multiplies counts: whatever the settings of this process say."""
    with serving(**served) as port:
        assert main(["claude"], settings(tmp_path, mlx_port=port, **given)) == 7
    assert told in lines(out)


@pytest.mark.live
def test_through_the_proxy(tmp_path: Path, out: Path) -> None:
    with serving() as port, serving() as proxy_port:
        given = settings(tmp_path, mlx_port=port, proxy_port=proxy_port, litellm_master_key="sk-m")
        assert main(["claude", "--via-proxy"], given) == 7
    said = lines(out)
    assert "ANTHROPIC_AUTH_TOKEN=sk-m" in said and f"ANTHROPIC_BASE_URL=http://127.0.0.1:{proxy_port}" in said


@pytest.mark.live
def test_a_server_that_does_not_come_up_is_told_with_its_last_words(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pi"], settings(tmp_path, mlx_port=0, model_path=str(tmp_path / "nothing"))) == 1
    said = capsys.readouterr().err
    assert said.startswith("starting the server on port ") and str(tmp_path / "logs") in said.splitlines()[0]
    assert "no such folder" in said and "a setting is wrong" in said and not out.exists()


@pytest.mark.live
def test_a_flag_that_asks_for_another_model_than_the_one_that_runs_is_refused(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as port:
        assert main(["pi", "--model", "a/b"], settings(tmp_path, mlx_port=port)) == 1
        said = capsys.readouterr().err
        assert "serves served-name, not a/b" in said and "start-llm stop" in said and "--port" in said
        assert not out.exists()
        assert main(["pi", "--model", "served-name", "--context", "60000"], settings(tmp_path, mlx_port=port)) == 7
        assert "50,000 tokens, not 60,000" in capsys.readouterr().err
        assert main(["pi", "--model", "owner/other-name"], settings(tmp_path, mlx_port=port)) == 7
    assert "ARG=other-name" in lines(out), "one that the server has beside its main one is asked for by name"


def test_something_else_on_the_port_is_an_error(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ask_json", lambda *_, **__: (404, None))
    assert main(["pi"], settings(tmp_path, mlx_port=8080)) == 1
    assert "MLX_PORT=8080" in capsys.readouterr().err and not out.exists()


def test_a_missing_client_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["openclaw"], settings(tmp_path, mlx_port=1)) == 127
    said = capsys.readouterr().out
    assert "npm install -g openclaw" in said and "Node >=24" in said


def test_print_starts_nothing_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["pi", "--print"], settings(tmp_path, mlx_port=port, model_path="org/big")) == 0
    said = capsys.readouterr().out
    assert f"http://127.0.0.1:{port}/v1" in said and "export PI_SKIP_VERSION_CHECK=1" in said
    assert said.splitlines()[-1] == "pi --provider start_llm --model big"
    assert said.splitlines()[0].startswith(f"# No server answers at http://127.0.0.1:{port}")
    assert not (tmp_path / "cache").exists()


@pytest.mark.live
def test_a_model_without_room_for_the_first_prompt_is_told(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all(client.first_prompt for client in CLIENTS.values())
    with serving(context=8_192) as port:
        assert main(["claude"], settings(tmp_path, mlx_port=port)) == 7
        said = capsys.readouterr().err
        assert main(["pi"], settings(tmp_path, mlx_port=port)) == 7
    assert "12,000 tokens" in said and "8,192" in said and "start-llm recommend" in said
    assert capsys.readouterr().err == ""


def test_printing_needs_the_proxys_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pi", "--via-proxy", "--print"], settings(tmp_path, mlx_port=1)) == 1
    assert "LITELLM_MASTER_KEY" in capsys.readouterr().err
    given = settings(tmp_path, mlx_port=1, litellm_master_key="sk-m")
    assert main(["pi", "--via-proxy", "--print"], given) == 0
    assert "export START_LLM_KEY=sk-m\n" in capsys.readouterr().out


@pytest.mark.live
def test_the_printed_text_keeps_loopback_from_the_users_proxy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pi", "--print"], settings(tmp_path, mlx_port=1)) == 0
    said = capsys.readouterr().out
    assert "--model SmolLM2-135M-Instruct" in said and '"contextWindow": 8192' in said, "the embedded model"
    (line,) = [line for line in said.splitlines() if "NO_PROXY" in line]
    told = subprocess.check_output(
        ["sh", "-c", f"{line}; echo $NO_PROXY $no_proxy"], env={"NO_PROXY": "intern"}, text=True
    )
    assert told.split() == ["intern,127.0.0.1,localhost", "127.0.0.1,localhost"]


@pytest.mark.live
def test_a_file_that_the_client_goes_on_with_is_written_once(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "cache" / "launch" / "claude" / ".claude.json"
    with serving() as port:
        assert main(["claude"], settings(tmp_path, mlx_port=port)) == 7
        assert json.loads(kept.read_text()) == {"hasCompletedOnboarding": True}
        kept.write_text("its own")
        assert main(["claude"], settings(tmp_path, mlx_port=port)) == 7
        capsys.readouterr()
        assert main(["claude", "--print"], settings(tmp_path, mlx_port=port)) == 0
    assert kept.read_text() == "its own"
    subprocess.run(["sh", "-c", capsys.readouterr().out.replace("\nclaude\n", "\n")], check=True)
    assert kept.read_text() == "its own"


@pytest.mark.live
def test_a_secret_is_made_once_and_is_its_owners_only(port: int, tmp_path: Path, out: Path) -> None:
    told = []
    for _ in range(2):
        assert main(["openclaw"], settings(tmp_path, mlx_port=port)) == 7
        told += [line for line in lines(out) if line.startswith("OPENCLAW_GATEWAY_TOKEN=")]
    kept = tmp_path / "cache" / "launch" / "openclaw" / "gateway-token"
    assert told == [f"OPENCLAW_GATEWAY_TOKEN={kept.read_text()}"] * 2 and len(kept.read_text()) == 48
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert kept.read_text() not in (kept.parent / "openclaw.json").read_text()


@pytest.mark.live
def test_the_printed_text_makes_a_secret_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["openclaw", "--print"], settings(tmp_path / "a folder", mlx_port=1)) == 0
    text = capsys.readouterr().out.removesuffix("openclaw\n") + "echo $OPENCLAW_GATEWAY_TOKEN\n"
    told = {subprocess.run(["sh", "-c", text], capture_output=True, check=True).stdout for _ in range(2)}
    kept = tmp_path / "a folder" / "cache" / "launch" / "openclaw" / "gateway-token"
    assert told == {f"{kept.read_text()}\n".encode()} and len(kept.read_text()) == 48
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.mark.live
@pytest.mark.parametrize("name", CLIENTS)
def test_the_printed_text_writes_nothing_that_others_can_read(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--print"], settings(tmp_path, mlx_port=1, api_key="sk-secret")) == 0
    *lines, command = capsys.readouterr().out.splitlines()
    assert command.startswith(name)
    for _ in range(2):  # the second time over files that were readable
        told = subprocess.check_output(["sh", "-c", "\n".join(["umask 022", *lines, "umask"])], text=True)
        assert int(told, 8) == 0o022, "the client writes the user's files as the user wants them"
        made = list((tmp_path / "cache").rglob("*"))
        assert {stat.S_IMODE(path.stat().st_mode) for path in made} <= {0o600, 0o700}
        for path in made:
            if path.is_file() and "sk-secret" in path.read_text():
                path.chmod(0o644)


def test_the_environment_loses_what_is_for_this_python_only() -> None:
    given = {"LD_PRELOAD": f"{sys.prefix}/lib/shim.so:/opt/theirs.so", "A": "1", "B": "2", "NO_PROXY": "x"}
    made = client_environment(given, LaunchPlan(env={"C": "3"}, defaults={"B": "0", "D": "4"}, unset=("A",)))
    assert made == {
        "LD_PRELOAD": "/opt/theirs.so",
        "B": "2",
        "C": "3",
        "D": "4",
        "NO_PROXY": "x,127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    assert "LD_PRELOAD" not in client_environment({"LD_PRELOAD": f"{sys.prefix}/lib/shim.so"}, LaunchPlan())


def test_settings_that_were_given_reach_a_started_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    given = load_settings(None, model_path="model", kv_bits="off", log_root="logs", default_thinking=False)
    assert changed_settings(given) == {
        "MODEL_PATH": os.path.join(os.getcwd(), "model"),
        "KV_BITS": "off",
        "LOG_ROOT": str(home() / "logs"),  # where `serve` has it
        "DEFAULT_THINKING": "False",
    }


def test_the_first_prompts_cost_is_said_where_the_machine_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Audit(tmp_path / AUDIT_FILE, 30)
    for model, computed, first in (("m", 1000, 4.0), ("m", 100, 9.0), ("other", 1000, 1.0)):
        request = ChatRequest("chatcmpl-0123456789ab", "chat", model, client="pi")
        report = CacheReport(prompt=computed, reused=0, computed=computed, new=computed)
        table.ended(request, Outcome(200, first + 1, first, report=report))
    table.close()
    endpoint = Endpoint(url="http://x", key="k", model="m", context=90_000, answer=1000)
    cli.warn_of_time(CLIENTS["opencode"], endpoint, tmp_path / AUDIT_FILE)
    assert "about 10,000 tokens, 40 s on this machine" in capsys.readouterr().err
    cli.warn_of_time(replace(CLIENTS["opencode"], first_prompt=100_000), endpoint, tmp_path / AUDIT_FILE)
    assert "about 100,000 tokens, 7 minutes on this machine" in capsys.readouterr().err
    cli.warn_of_time(CLIENTS["opencode"], endpoint, tmp_path / "nothing")
    assert capsys.readouterr().err == ""
