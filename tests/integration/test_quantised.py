"""KV_BITS: a prompt that was quantised while it was computed gives the same probabilities when it is sent again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from start_llm.engine import runtime
from tests.integration.live import Live, live

BEGIN = 200
LONG = "Repeat this: " + " ".join(f"word {n} of the text," for n in range(90))


def logprobs(server: Live, text: str) -> tuple[list[tuple[str, float]], dict[str, Any]]:
    more = {"max_tokens": 24, "logprobs": True, "drafts": False}
    answer = server.chat([{"role": "user", "content": text}], **more)
    told = answer["body"]["choices"][0]["logprobs"]["content"]
    return [(entry["token"], entry["logprob"]) for entry in told], answer["report"]


@pytest.mark.slow
@pytest.mark.smol
def test_a_repeat_has_the_same_probabilities(smol_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "QUANTISED_FROM", BEGIN)
    with live(smol_path, tmp_path, kv_bits=8, prefill_step_size=64) as server:
        cold, first = logprobs(server, LONG)
        again, second = logprobs(server, LONG)
    assert first["reused"] == 0 and second["reused"] >= first["prompt"] - 2 and first["prompt"] > 2 * BEGIN
    assert [token for token, _ in again] == [token for token, _ in cold]
    assert [value for _, value in again] == pytest.approx([value for _, value in cold], abs=1e-4)
