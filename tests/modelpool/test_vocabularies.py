"""Models with the same files share a tokenizer; what was used last is kept for a while."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from start_llm.modelpool import vocabularies
from start_llm.modelpool.vocabularies import KEPT, Vocabularies
from tests.models.large import make_large


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found: list[Path] = []
    read = vocabularies.read_tokenizer

    def seen(folder: Path, eos: Any) -> Any:
        found.append(folder)
        return read(folder, eos)

    monkeypatch.setattr(vocabularies, "read_tokenizer", seen)
    return found


def test_the_same_files_are_read_once(tmp_path: Path, reads: list[Path]) -> None:
    one, same = make_large(tmp_path / "one", 500), make_large(tmp_path / "same", 500)
    kept = Vocabularies()
    first = kept.read(one, 2)
    assert kept.read(one, 2) is first and kept.read(same, 2) is first and reads == [one]
    assert kept.read(one, [2, 5]) is not first, "it ends at other tokens"
    (one / "chat_template.jinja").write_text("{{ messages }}")
    changed = kept.read(one, 2)
    assert changed is not first and changed.wrapper.chat_template == "{{ messages }}"


def test_only_the_last_ones_are_kept_and_those_that_are_in_use(tmp_path: Path, reads: list[Path]) -> None:
    folders = [make_large(tmp_path / str(size), size) for size in range(500, 502 + KEPT)]
    kept = Vocabularies()
    used = kept.read(folders[0], 2)
    for folder in folders[1:]:
        kept.read(folder, 2)
    gc.collect()
    assert kept.read(folders[0], 2) is used, "a model holds it"
    count = len(reads)
    kept.read(folders[-1], 2)
    assert len(reads) == count, "it was the last one"
    kept.read(folders[1], 2)
    assert len(reads) == count + 1, "nobody holds it, and others came since"


def test_who_has_a_tokenizer_of_its_own_has_grammars_of_its_own(tmp_path: Path) -> None:
    folder, kept = make_large(tmp_path / "one", 500), Vocabularies()
    known = kept.read(folder, 2)
    assert kept.of(known.wrapper) is known
    other = vocabularies.read_tokenizer(folder, 2)
    assert kept.of(other).wrapper is other and kept.of(other) is not known
