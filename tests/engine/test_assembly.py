"""Loaded models with the same files share a tokenizer, and the last ones stay."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from start_llm.engine import assembly
from start_llm.engine.assembly import Vocabularies
from tests.models.large import make_large


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found, read = list[Path](), assembly.read_tokenizer
    monkeypatch.setattr(assembly, "read_tokenizer", lambda folder: (found.append(folder), read(folder))[1])
    return found


def test_the_same_files_are_read_once(tmp_path: Path, reads: list[Path]) -> None:
    one, same = make_large(tmp_path / "one", 500), make_large(tmp_path / "same", 500)
    kept = Vocabularies()
    first = kept.of(one)
    assert kept.of(one) is first and kept.of(same) is first and reads == [one]
    (same / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    (same / "config.json").write_text('{"model_type": "llama"}')
    assert kept.of(same).wrapper.eos_token_ids > first.wrapper.eos_token_ids, "it ends at other tokens, too"
    (one / "chat_template.jinja").write_text("{{ messages }}")
    changed = kept.of(one)
    assert changed is not first and changed.wrapper.chat_template == "{{ messages }}"


def test_those_are_kept_that_are_in_use_and_the_last_two(tmp_path: Path, reads: list[Path]) -> None:
    used, *others = [make_large(tmp_path / str(count), count) for count in (500, 501, 502, 503)]
    kept = Vocabularies()
    held = kept.of(used)
    for folder in (*others, *others[1:]):
        kept.of(folder)
        gc.collect()
    assert reads == [used, *others], "a model that comes back within two others is not read again"
    kept.of(others[0])
    assert reads == [used, *others, others[0]], "nobody holds it"
    assert kept.of(used) is held, "a model holds it"
