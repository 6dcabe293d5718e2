"""Folders that were made to do harm: each is refused with a reason, in bounded time, and the server goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any
from unittest.mock import Mock

import pytest

from start_llm.core.errors import NotSupported
from start_llm.core.settings import Settings, load_settings
from start_llm.models import inspection, inspection_child
from start_llm.models.catalog import describe
from start_llm.models.inspection import _inspect as inspect_in_child
from start_llm.models.inspection import _start as start_child
from start_llm.models.inspection import inspect_once
from start_llm.models.probe_table import PROBES
from tests.models.forked import Forked
from tests.models.loading import load_model
from tests.models.lora import build_base


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "tiny"))


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders are inspected as in service, on children that start at once; their names are counted."""
    inspected: list[str] = []

    def counted(source: str, *more: Any) -> Any:
        inspected.append(source)
        return inspect_in_child(source, *more)

    monkeypatch.setattr(inspection, "_inspect", counted)
    monkeypatch.setattr(inspection, "_start", Forked)
    return inspected


def settings_for(folder: Path, **more: Any) -> Settings:
    return load_settings(None, model_path=str(folder), start_llm_cache_dir=folder.parent / "cache", **more)


def load(folder: Path, **more: Any) -> Any:
    return load_model(settings_for(folder, **more))


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(folder: Path) -> str:
    """The listing's reason; the load ends with a reason, too."""
    problem = describe(str(folder), folder).problem
    with pytest.raises(NotSupported):
        load(folder)
    return problem


@pytest.mark.live
def test_a_sound_folder_is_inspected_once_and_what_is_found_is_used(
    folder: Path, children: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_start", start_child)
    first, second = load(folder), load(folder)
    assert children == [str(folder)] and list((folder.parent / "cache" / PROBES).glob("*.json"))
    assert first.capabilities.traits is not None and first.capabilities.traits.tools
    assert second.capabilities.facts == first.capabilities.facts
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert not load(folder).capabilities.traits.tools and len(children) == 2, "another template is another folder"


def test_code_that_is_trusted_is_not_limited(folder: Path, children: list[str]) -> None:
    """A folder that brings none is inspected as ever."""
    trusts = settings_for(folder, trust_remote_code=True)
    assert inspect_once(trusts, "tiny", folder) is not None and children == ["tiny"]
    children.clear()
    change(folder, model_file="model.py")
    assert inspect_once(trusts, "tiny", folder) is None and not children
    with pytest.raises(NotSupported, match="TRUST_REMOTE_CODE"):
        inspect_once(settings_for(folder), "tiny", folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_json_without_end(name: str, folder: Path, children: list[str]) -> None:
    path = folder / name
    deep = 100_000  # Python 3.12.1 gives up at 1,500, 3.12.3 at 10,000
    path.write_text('{"a":' * deep + "1" + "}" * deep)
    began = time.process_time()
    if name == "config.json":
        assert "nested too deeply" in refused(folder)
    elif name == "generation_config.json":  # mlx-lm reads it for the end token
        assert describe(str(folder), folder).problem == "" and children == []
        with pytest.raises(NotSupported, match="RecursionError"):
            load(folder)
    else:
        assert describe(str(folder), folder).problem == ""
        assert load(folder) is not None
    path.write_bytes(b" " * (17 << 20))
    if name == "config.json":
        assert "has more than 16,777,216 bytes" in refused(folder)
    assert time.process_time() - began < 20


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "n_layer", "num_experts"])
@pytest.mark.parametrize("value", [10**7, 10**300, [1, 10**7]])
def test_counts_that_the_weights_cannot_be_of(name: str, value: Any, folder: Path, children: list[str]) -> None:
    change(folder, text_config={name: value}) if isinstance(value, list) else change(folder, **{name: value})
    assert f"its config.json says {name}=1e+" in refused(folder)
    assert children == []


def test_shapes_that_are_not_the_weights(folder: Path, children: list[str]) -> None:
    change(folder, hidden_size=2**28)
    with pytest.raises(NotSupported, match="mlx-lm cannot load"):
        load(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [True, 4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16, 32]},
        [],
    ],
)
def test_a_header_that_contradicts_itself(entry: Any, folder: Path) -> None:
    header = json.dumps({"w": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert "is no safetensors file" in refused(folder)


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
EATER = (
    "{% set kept = namespace(all=[]) %}"
    "{% for a in range(99999) %}{% set kept.all = kept.all + ['a' * 10 ** 8 ~ a] %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [(LOOP, "its chat template takes more than 1 s of computing"), (EATER, "takes more than 1.1 GB of memory")],
)
def test_a_template_that_never_ends(
    template: str, reason: str, folder: Path, children: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "MOST_BYTES", 1 << 30)
    seconds = 1.0 if template == LOOP else 60.0
    monkeypatch.setattr(inspection, "STAGE_SECONDS", inspection.STAGE_SECONDS | {"chat template": seconds})
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(NotSupported, match=reason):
        load(folder)
    assert children == [str(folder)]


def test_a_tokenizer_that_is_none(folder: Path, children: list[str]) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:-200])
    with pytest.raises(NotSupported, match="its tokenizer cannot be read"):
        load(folder)


@pytest.mark.live
def test_a_disk_that_hangs(folder: Path) -> None:
    with pytest.raises(NotSupported, match="its process was not read within 0 s"):
        inspect_in_child(str(folder), folder, False, 0.0)


@pytest.mark.live
@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("os.abort()", "its process ends the process that reads it \\(SIGABRT\\)"),
        ('print(\'{"stage": "model"}\', flush=True); os.kill(os.getpid(), 11)', "its model ends the process .*SIGSEGV"),
        ("os._exit(3)", "exit code 3"),
    ],
)
def test_a_model_that_ends_its_process(
    ending: str, reason: str, folder: Path, children: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As phi3small does when it is made."""

    def start(arguments: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", f"import os; {ending}"], stdout=output)

    monkeypatch.setattr(inspection, "_start", start)
    with pytest.raises(NotSupported, match=reason):
        load(folder)


def test_only_a_librarys_own_error_makes_a_model_that_sees_a_text_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anything else is told: it was passed over without a word."""

    class NoLibraryError(Exception):
        pass

    loads = Mock(side_effect=[ValueError("no such shape"), NoLibraryError, None])
    monkeypatch.setattr(inspection_child, "read_with_vision", loads)
    assert not inspection_child._loads_with_vision(folder)
    with pytest.raises(NoLibraryError):
        inspection_child._loads_with_vision(folder)
    assert inspection_child._loads_with_vision(folder)
