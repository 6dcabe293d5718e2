"""Embeddings on a whole server, beside a model that decodes. By the SDK: `tests/integration/test_sdk.py`."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from start_llm.embeddings import compute as engine
from start_llm.engine.schedule.scheduler import Scheduler
from tests.embeddings.tiny import texts
from tests.integration.live import Live, live
from tests.oracle import build_oracle, script

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("needs_library"), pytest.mark.thorough]


@pytest.fixture(scope="module")
def served(encoder_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("served")
    with live(build_oracle(folder / "oracle", "plain"), folder / "cache", embedding_model=str(encoder_path)) as server:
        yield server


OTHER = "other work"


def decode_beside(
    served: Live, order: list[str], monkeypatch: pytest.MonkeyPatch, ask: Callable[[], httpx.Response], least: int
) -> None:
    """Asks while a row decodes: between two pieces of the other work there is a step of the model that decodes.

    `order`: what the thread does; whoever calls sees to it that each piece adds `OTHER`. `least`: so many are needed.
    """
    step = Scheduler.step

    def stepped(self: Scheduler) -> None:
        if OTHER not in order:
            time.sleep(0.05)  # the other work comes while it decodes, however busy the machine is
        order.append("step")
        step(self)

    monkeypatch.setattr(Scheduler, "step", stepped)
    answer = served.openai.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": script("word " * 400)}],
        stream=True,
        extra_body={"drafts": False},  # with drafts it is over in a second
    )
    next(answer)
    assert ask().status_code == 200
    assert "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices).count("word") >= 399
    first, last = order.index(OTHER), len(order) - order[::-1].index("step")
    assert order.count(OTHER) > least and "step" in order[first:last]
    assert all(pair != (OTHER, OTHER) for pair in pairwise(order[first:last]))


def test_a_row_that_decodes_waits_for_one_batch_at_most(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    encode = engine.Encoder.encode

    def encoded(self: engine.Encoder, rows: Any) -> Any:
        order.append(OTHER)
        return encode(self, rows)

    served.openai.embeddings.create(model="tiny-encoder", input="loads it")
    monkeypatch.setattr(engine, "MOST", 64)
    monkeypatch.setattr(engine, "FIRST", 64)
    monkeypatch.setattr(engine.Encoder, "encode", encoded)
    body = {"input": texts(60), "truncate": True}
    decode_beside(served, order, monkeypatch, lambda: served.post("/v1/embeddings", json=body), least=20)


def test_what_is_embedded_is_counted(served: Live) -> None:
    before = served.app.encoders.figures()
    body = {"input": ["a", "b"], "encoding_format": "base64"}
    data = served.post("/v1/embeddings", json=body)
    assert len(base64.b64decode(data.json()["data"][0]["embedding"])) == 4 * 32
    after = served.app.encoders.figures()
    assert after["embedded_texts"] - before["embedded_texts"] == 2
    assert "start_llm_embedded_tokens" in served.get("/metrics").text


def test_the_weights_are_counted_before_they_are_loaded(served: Live, encoder_path: Path) -> None:
    weights = (encoder_path / "model.safetensors").stat().st_size
    assert served.app.encoders.prepare(lambda step, part: None) == weights
    listed = served.get("/v1/models").json()["data"][-1]
    assert listed["id"] == "tiny-encoder"
    assert listed["details"]["weight_bytes"] == weights
