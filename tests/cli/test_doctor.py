from __future__ import annotations

import inspect
import json
import platform
import subprocess
from pathlib import Path

import pytest

from start_llm.cli import doctor
from start_llm.cli.doctor import Finding, Probe
from start_llm.core.report import CacheReport, Miss
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from start_llm.dashboard.audit import Audit
from start_llm.dashboard.observer import Outcome
from start_llm.host.mac import MacFacts
from start_llm.models.device import GIB, Accelerator, Device
from start_llm.proxy.access import READY_BODY
from tests.launch.stub import serving
from tests.web import Handler, running

CPU = Device("Linux", "Some CPU", 16 * GIB, "cpu", 12 * GIB)
MAC = Device("macOS", "Apple M4 Pro", 48 * GIB, "metal", 36 * GIB)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(_env_file=None, start_llm_cache_dir=tmp_path, mlx_port=0, proxy_port=0, model_path=None)  # type: ignore[call-arg]


def subjects(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def test_every_part_gets_a_line_and_all_is_well(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "probe_mlx", lambda: Probe(Accelerator("cpu"), 150.0))
    assert doctor.main(settings) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "All well."
    for subject in ("Python", "packages", "back end", "chip", "memory", "server port", "proxy port", "model", "disk"):
        (line,) = [line for line in lines if line[6:].startswith(f"{subject} ")]
        assert line[:4].strip() in {"ok", "note"}
    assert platform.python_version() in lines[0]


@pytest.mark.live
def test_a_broken_mlx_is_said_and_the_rest_still_looked_at(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "PROBE", "raise ImportError('libmlx.so: no such file')")
    assert doctor.main(settings) == 1
    said = capsys.readouterr().out
    assert "MLX does not work: ImportError: libmlx.so: no such file" in said
    assert "disk" in said
    assert said.endswith("Not well: back end.\n")


def test_what_a_host_says_is_shown_without_what_a_terminal_obeys(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "probe_mlx", lambda: Probe(None))
    monkeypatch.setattr(doctor, "examine", lambda *_: [Finding("mac-2", "bad", "does not answer: \x1b[2J\x9b1m[b]x")])
    assert doctor.main(settings) == 1
    assert capsys.readouterr().out.startswith("bad   mac-2              does not answer: [2J1m[b]x\n")


@pytest.mark.live
def test_the_probe_asks_the_real_mlx() -> None:
    probe = doctor.probe_mlx()
    assert probe.error == ""
    assert probe.accelerator is not None
    assert probe.accelerator.backend in {"metal", "cuda", "cpu"}
    assert probe.gflops > 0


def test_a_hanging_mlx_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "no answer" in doctor.probe_mlx().error


@pytest.mark.parametrize(("gflops", "verdict"), [(5.0, "note"), (150.0, "ok")])
def test_a_slow_cpu_back_end_is_noted(settings: Settings, gflops: float, verdict: str) -> None:
    assert subjects(list(doctor.check_machine(settings, CPU, gflops)))["back end"].verdict == verdict


def test_a_slow_figure_comes_with_its_reason() -> None:
    shim = {"LD_PRELOAD": "/x/libstart_llm_blas.so"}
    assert "C compiler (cc)" in doctor.why_slow({}, load=9.0, cores=2)
    assert "load 9.0 on 2 cores" in doctor.why_slow(shim, load=9.0, cores=2)
    assert "no more" in doctor.why_slow(shim, load=0.5, cores=2)


def test_apple_silicon_gets_a_recommendation(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_mac", lambda: MacFacts("15.0", True, 0))
    found = subjects(list(doctor.check_machine(settings, MAC, 5000.0)))
    assert "qwen3.6-35b: mlx-community/Qwen3.6-35B-A3B-4bit" in found["model for it"].text
    assert "model for it" not in subjects(list(doctor.check_machine(settings, CPU, 150.0)))
    assert "51.5 GB" in found["memory"].text
    lines = [each for each in doctor.check_machine(settings, MAC, 5000.0) if each.subject == "Mac"]
    assert [each.verdict for each in lines] == ["ok", "note", "ok"]


def test_a_server_that_runs_already_is_no_fault(settings: Settings) -> None:
    with serving() as number:
        assert doctor.answers("127.0.0.1", number, "/health", "state")
        assert not doctor.answers("127.0.0.1", number, "/health", "proxy_of")
        found = subjects(
            list(doctor.examine(settings.model_copy(update={"mlx_port": number, "proxy_port": number}), Probe(None)))
        )
    assert found["server port"] == Finding("server port", "ok", f"{number}, start_llm runs there now")
    taken = found["proxy port"]
    assert taken.verdict == "note" and "PROXY_PORT" in taken.text and str(number) in taken.text
    assert doctor.check_port("server port", "MLX_PORT", "127.0.0.1", number).verdict == "ok"
    assert not doctor.answers("127.0.0.1", number, "/health", "state")


@pytest.mark.parametrize("status", [200, 401])
def test_the_arrays_of_a_running_server_are_told(status: int) -> None:
    class Metrics(Handler):
        def do_GET(self) -> None:
            lines = b"start_llm_kv_bytes 7.0\nstart_llm_kv_arrays 12345.0\n"
            right = (status, self.headers["authorization"], self.path) == (200, "Bearer k", "/metrics")
            self.answer(status, lines if right else {})

    with running(Metrics) as port:
        told = list(doctor.check_arrays("127.0.0.1", port, "k"))
    expected = [Finding("stored KV", "ok", "12,345 arrays (start_llm_kv_arrays)")]
    assert told == (expected if status == 200 else [])
    assert list(doctor.check_arrays("127.0.0.1", port, None)) == []


def test_its_own_proxy_is_no_fault(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"/health/readiness": json.loads(READY_BODY)}
    monkeypatch.setattr(doctor, "ask_json", lambda url, **_: (200, told.get(url.partition("4001")[2])))
    found = subjects(list(doctor.examine(settings.model_copy(update={"proxy_port": 4001}), Probe(None))))
    assert found["proxy port"] == Finding("proxy port", "ok", "4001, start_llm's LiteLLM proxy runs there now")


def test_reuse_of_the_last_day_and_why_it_is_low(tmp_path: Path) -> None:
    path = tmp_path / "audit.sqlite3"
    assert list(doctor.check_reuse(path)) == []

    def ask(*reports: CacheReport) -> Finding:
        audit = Audit(path, 1)
        for report in reports:
            audit.ended(ChatRequest("id", "chat", "m"), Outcome(200, 1.0, report=report))
        audit.close()
        (finding,) = doctor.check_reuse(path)
        return finding

    good = ask(CacheReport(prompt=1000, reused=900, computed=100, new=100))
    assert good == Finding("reuse", "ok", "last day: 90% of 1,000 prompt tokens; 100 were computed, 100 were new")
    low = ask(CacheReport(prompt=9000, reused=0, computed=9000, new=50, miss=Miss("evicted", 0)))
    assert low.verdict == "note" and "CACHE_MEMORY_BYTES" in low.text and low.text.startswith("last day: 9% of 10,000")


def test_every_reason_has_words() -> None:
    text = inspect.getsource(Miss)
    assert all(f"``{reason}``" in text for reason in doctor.MISSES)


def test_packages_are_compared_with_the_pins(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# head\npytest==0.1\nno-such-thing==1.0\nother==1 ; sys_platform == 'win32'\n")
    finding = doctor.check_packages(requirements)
    assert finding.verdict == "bad"
    assert "no-such-thing is missing" in finding.text
    assert "is not ==0.1" in finding.text
    assert "other" not in finding.text


@pytest.mark.parametrize(
    ("path", "verdict", "says"),
    [
        (None, "note", "not here yet"),
        ("./nowhere", "bad", "no config.json"),
        ("not a name", "bad", "neither a folder nor"),
        ("owner/surely-not-downloaded", "note", "downloads it"),
    ],
)
def test_a_model_that_is_not_here(settings: Settings, path: str | None, verdict: str, says: str) -> None:
    finding = doctor.check_model(settings.model_copy(update={"model_path": path}))
    assert finding.verdict == verdict
    assert says in finding.text


def test_a_model_that_is_here_and_one_without_a_chat_template(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "SmolLM2-135M-Instruct-f32-v1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    asked = settings.model_copy(update={"model_path": str(folder)})
    for each in (settings, asked):
        finding = doctor.check_model(each)
        assert (finding.verdict, str(folder) in finding.text) == ("ok", True)
    (folder / "tokenizer_config.json").write_text("{}")
    finding = doctor.check_model(asked)
    assert finding.verdict == "note" and "plain ChatML" in finding.text
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    assert doctor.check_model(asked).verdict == "ok"


def test_keys_that_others_may_read_are_noted(tmp_path: Path) -> None:
    assert list(doctor.check_env_file(tmp_path / ".env")) == []
    (file := tmp_path / ".env").write_text("API_KEY=k\n")
    for mode, verdicts in ((0o640, ["note"]), (0o604, ["note"]), (0o600, [])):
        file.chmod(mode)
        assert [found.verdict for found in doctor.check_env_file(file)] == verdicts


def test_disk_looks_at_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    finding = doctor.check_disk(tmp_path / "not" / "yet")
    assert finding.verdict in {"ok", "note"}
    assert str(tmp_path) in finding.text


def test_the_disk_of_stored_kv_is_looked_at_where_it_is_another_folder(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "check_disk", lambda folder, *_: doctor.Finding("disk", "ok", str(folder)))
    elsewhere = tmp_path.parent / "kv"
    for place, folders in (("auto", [tmp_path]), ("off", [tmp_path]), (str(elsewhere), [tmp_path, elsewhere])):
        found = list(doctor.examine(settings.model_copy(update={"kv_disk_dir": place}), Probe(None)))
        assert [f.text for f in found if f.subject == "disk"] == [str(folder) for folder in folders]
