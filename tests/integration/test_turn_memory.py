"""What a whole server takes for a turn that continues a conversation: the process' own high-water mark."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.processes import figures, process
from tests.models.lora import build_base
from tests.waiting import until

MOST = 1.45
SIZES = {"num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 512}
"""Little to compute and much to keep: 196,608 bytes of KV a token."""


def memory_of(pid: int, name: str) -> int:
    """Bytes. `name`: of a line of the process' status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def turn(url: str, messages: list[dict[str, Any]]) -> None:
    body = {"model": "default", "messages": messages}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600).json()
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


def used_after(url: str, before: float) -> float:
    """Bytes of KV once a turn is stored, which adds to them; figures are a second old at most."""
    return until(lambda: (held := figures(url)["start_llm_kv_used_bytes"]) > before and held)


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is read, and set back, in /proc")
@pytest.mark.timeout(900)
@pytest.mark.thorough
@pytest.mark.slow
def test_a_continuing_turn_takes_its_kv_once_by_the_high_water_mark_of_the_process(tmp_path: Path) -> None:
    model = build_base(tmp_path / "model", **SIZES, max_position_embeddings=32_768)
    gc.collect()
    settings = {"KV_DISK_DIR": "off", "DRAFTS": "off", "DEFAULT_MAX_TOKENS": "8", "PREFILL_STEP_SIZE": "256"}
    with process(model, tmp_path, **settings) as (url, child):
        turn(url, [{"role": "user", "content": "hello"}])  # what is made at the first request is no KV
        messages: list[dict[str, Any]] = [{"role": "user", "content": "word " * 1500}]
        used = used_after(url, 0)
        before = memory_of(child.pid, "VmRSS") - used
        ratios = []
        for number in range(4):
            Path(f"/proc/{child.pid}/clear_refs").write_text("5")
            turn(url, messages)
            used = used_after(url, used)
            ratios.append((memory_of(child.pid, "VmHWM") - before) / used)
            messages.append({"role": "user", "content": f"and {number} " * 10})
        print("high-water mark by KV, turn by turn:", [round(ratio, 3) for ratio in ratios])
        assert used >= 250 * 2**20
        assert max(ratios[1:]) <= MOST
