"""Folders changed at random: each is refused with a reason or served, in bounded time, and memory comes back."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from start_llm.core.errors import StartLLMError
from start_llm.core.settings import load_settings
from start_llm.engine.probe import probe_model
from start_llm.models import inspection
from start_llm.models.background import at_once
from start_llm.models.catalog import describe
from start_llm.models.inspection import _inspect as inspect_in_child
from tests.models.forked import Forked
from tests.models.loading import load_model
from tests.models.lora import build_base

VALUES = (
    *(None, True, -1, 0, 1, 3, 7, 2**15, 10**7, 2**31, 2**63, 10**300, -(2**40), 0.5, 1e308),
    *("", "x" * 10_000, "../..", "\ud800"),
    *([], [1] * 1000, {}, {"a": {"b": []}}, [[[]]], ["full_attention"] * 5000, {"type": "yarn"}),
)
TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10 ** 12 }}",
    "{{ messages[10 ** 30] }}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "{{ raise_exception('no') }}",
    "{% if",
    "{{ ''.__class__.__mro__ }}",
    "(" * 10_000,
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "\x00",
)
SMALL = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHTS = "model.safetensors"


def change_value(data: Any, chance: random.Random) -> None:
    """Gives something in the JSON value another value, or takes it away."""
    places: list[tuple[Any, Any]] = []
    parts = [data]
    while parts and len(places) < 5000:
        part = parts.pop()
        keys = list(part) if isinstance(part, dict) else list(range(min(len(part), 50)))
        places += [(part, key) for key in keys]
        parts += [part[key] for key in keys if isinstance(part[key], dict | list)]
    part, key = chance.choice(places)
    if chance.random() < 0.2:
        del part[key]
    else:
        part[key] = chance.choice(VALUES)


def change_bytes(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    kind = chance.randrange(4)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + chance.randbytes(4) + data[at + 4 :]
    if kind == 2:
        return data[:at] + data[max(0, at - 200) :]
    return data[:at] + chance.choice((b"[", b"{", b'"', b"\x00", b"9" * 5000, b"[" * 5000)) + data[at:]


def mutate(folder: Path, chance: random.Random) -> str:
    """What was changed."""
    name = chance.choice((*SMALL, WEIGHTS, WEIGHTS))
    path = folder / name
    if chance.random() < 0.03:
        path.unlink()
    elif name == "chat_template.jinja" and chance.random() < 0.7:
        path.write_text(chance.choice(TEMPLATES))
    elif name == WEIGHTS:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length]
        if chance.random() < 0.6:
            tensors = json.loads(header)
            change_value(tensors, chance)
            header = json.dumps(tensors).encode()
        else:
            header = change_bytes(header, chance)
        said = chance.choice((0, 2**63 - 1, len(header) + 1)) if chance.random() < 0.1 else len(header)
        path.write_bytes(said.to_bytes(8, "little") + header + data[8 + length :])
    elif path.suffix == ".json" and chance.random() < 0.7:
        content = json.loads(path.read_text())
        change_value(content, chance)
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(change_bytes(path.read_bytes(), chance))
    return name


def resident_mib() -> int:
    return inspection._resident_bytes(os.getpid()) >> 20


def served(folder: Path) -> str:
    """What becomes of a folder: ``listed`` with a problem, ``refused``, or ``served``."""
    listed = describe(str(folder), folder).problem
    cache = folder.parent / "cache"
    settings = load_settings(None, model_path=str(folder), start_llm_cache_dir=cache, kv_bits=None, model_probe="off")
    try:
        loaded = load_model(settings)
        at_once(probe_model(settings, loaded, lambda line: None, alone=False))
    except StartLLMError as error:
        assert error.message and "\n" not in error.message[:1], error
        return "listed" if listed else "refused"
    assert not listed
    return "served"


@pytest.mark.parametrize("count", [6, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])])
def test_changed_folders_harm_nobody(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_inspect", inspect_in_child)
    monkeypatch.setattr(inspection, "_start", Forked)
    monkeypatch.setattr(inspection, "MOST_BYTES", 1 << 30)
    monkeypatch.setattr(inspection, "STAGE_SECONDS", {"tokenizer": 10.0, "chat template": 1.0, "model": 10.0})
    base = build_base(tmp_path / "base")
    assert served(base) == "served"
    chance, found, slowest, before = random.Random(20), Counter[str](), 0.0, resident_mib()
    for number in range(count):
        folder = Path(shutil.copytree(base, base.with_name("changed")))
        what = mutate(folder, chance)
        began = time.process_time()
        try:
            found[served(folder)] += 1
        except BaseException as error:
            raise AssertionError(f"folder {number}: {what}") from error
        slowest = max(slowest, time.process_time() - began)
        shutil.rmtree(folder)
        mx.clear_cache()
    gc.collect()
    assert sum(found.values()) == count and slowest < 20 and resident_mib() - before < 300
    if count > 100:
        assert min(found["listed"], found["refused"], found["served"]) > count // 20
