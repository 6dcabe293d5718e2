"""The architectures of both libraries through the whole engine; docs/architectures.md tells of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.architectures import PAGE, WAYS, tried
from tests.models.architectures import all_names
from tests.models.decode_everywhere import try_architecture
from tests.models.vlm_types import CONFIGS

HANDFUL = ("llama", "qwen3_next", "gemma3_text", "deepseek_v41", "gemma2")
"""Attention, recurrent state, windows, pools; two that cannot be batched."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "deepseek_v41" else []) for name in HANDFUL]
)
@pytest.mark.thorough
def test_the_same_tokens_however_they_come_about(name: str) -> None:
    found = try_architecture(name)
    assert {way: found[way] for way in WAYS} == dict.fromkeys(WAYS, "equal")
    assert bool(found["batches"]) == (name in {"deepseek_v41", "gemma2"})
    assert not found["reuse"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*all_names(), *CONFIGS])
def test_every_architecture_does_as_the_page_says(name: str) -> None:
    found = tried(name)
    if "refused" in found:
        assert f"\n- `{name}`: " in PAGE.read_text("utf-8")
    else:
        line = next(line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {name} |"))
        cells = [cell.strip() for cell in line.split("|")][3:]
        assert all(cell == found[way] for way, cell in zip(WAYS, cells, strict=False))


def test_the_page_names_every_architecture() -> None:
    text = Path(PAGE).read_text("utf-8")
    assert [
        name for name in (*all_names(), *CONFIGS) if f"| {name} |" not in text and f"- `{name}`: " not in text
    ] == []
    assert text.count(" | equal | equal | equal | equal | equal | ") >= 80
    assert "|  |" not in text.partition("## What stored KV takes")[0], "a tiny model without layers shows nothing"
