"""Transcripts on a whole server, beside a model that decodes. By the SDK: `tests/integration/test_sdk.py`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlx.utils import tree_flatten

from start_llm.audio import service
from start_llm.audio import transcription as hearing
from start_llm.audio.samples import look_at
from tests.audio.tiny import tone, wav
from tests.embeddings.test_serving import OTHER, decode_beside
from tests.integration.live import WAIT, Live, live
from tests.oracle import build_oracle
from tests.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough, pytest.mark.live]
NAME = "tiny-whisper"


@pytest.fixture(scope="module")
def served(whisper_path: Path, voice_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("served")
    other = shutil.copytree(whisper_path, folder / "cache" / "models" / "other-whisper")
    with (other / "pytorch_model.bin").open("wb") as file:
        file.truncate(1 << 33)  # what nothing here reads
    oracle = build_oracle(folder / "oracle", "plain")
    named = {"transcription_model": str(whisper_path), "speech_model": str(voice_path)}
    with live(oracle, folder / "cache", max_loaded_models=2, pinned_models="oracle", **named) as server:
        yield server


def ask(server: Live, seconds: float = 1.0, **fields: Any) -> httpx.Response:
    files = {"file": ("sound.wav", wav(tone(seconds)))}
    data = {"model": "whisper-1", "language": "de", "temperature": "0.2", **fields}
    return server.post("/v1/audio/transcriptions", files=files, data=data)


def post(server: Live, path: str, **body: Any) -> httpx.Response:
    return server.post(f"/v1/{path}", json=body)


def listed(server: Live, name: str = NAME) -> Any:
    return server.get(f"/v1/models/{name}").json()


def test_a_model_of_the_pool_comes_and_goes(served: Live) -> None:
    card = listed(served)
    assert (card["details"]["kind"], card["details"]["task"]) == ("audio", "transcription")
    assert ask(served).json()["text"]
    assert listed(served)["details"]["state"] == "ready"
    assert listed(served, "other-whisper")["details"]["state"] == "stored"
    assert ask(served, model="other-whisper").status_code == 200  # by its name, without a setting
    assert listed(served)["details"]["state"] == "stored"  # there is room for one beside the main model
    unloaded = post(served, "models/unload", model="other-whisper")
    assert unloaded.json()["details"]["state"] == "stored"
    assert post(served, "models/load", model=NAME).json()["details"]["state"] == "ready"
    assert post(served, "models/pin", model=NAME, pinned=False).json()["details"]["pinned"] is False


def test_its_weights_are_of_the_one_budget(served: Live) -> None:
    """Only those that are read: a repository often has the same weights for several libraries."""
    shared = served.app._builder.shared
    for name in (NAME, "other-whisper", "tiny-voice"):
        assert post(served, "models/unload", model=name).status_code == 200
    before = shared.weight_bytes
    assert 1_000_000 < listed(served, "other-whisper")["details"]["weight_bytes"] < 1 << 24
    assert post(served, "models/load", model="other-whisper").status_code == 200
    (entry,) = (each for each in served.app.pool._registry.entries() if each.known.task and each.handle)
    arrays = sum(array.nbytes for _, array in tree_flatten(entry.handle._model.parameters()))
    assert shared.weight_bytes - before == arrays == listed(served, "other-whisper")["details"]["weight_bytes"]
    assert post(served, "models/unload", model="other-whisper").status_code == 200
    assert shared.weight_bytes == before


def test_models_of_another_kind_are_400_and_named(served: Live) -> None:
    main = served.get("/v1/models").json()["data"][0]["id"]
    wrong = ask(served, model=main)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "model")
    assert "is a language model" in wrong.json()["error"]["message"]
    chat = post(served, "chat/completions", model=NAME, messages=[{"role": "user", "content": "Hello"}])
    assert chat.status_code == 400
    assert "is an audio model (transcription)" in chat.json()["error"]["message"]
    assert ask(served, model="nobody-knows-it").status_code == 404
    assert ask(served, language="klingon").json()["error"]["param"] == "language"


def test_a_row_that_decodes_waits_for_one_step_at_most(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    attempt = hearing.Transcriber._attempt

    def attempted(self: hearing.Transcriber, *given: Any) -> Any:
        steps = attempt(self, *given)
        while True:
            order.append(OTHER)
            try:
                done = next(steps)
            except StopIteration as end:
                return end.value
            yield done

    assert post(served, "models/load", model=NAME).status_code == 200
    monkeypatch.setattr(service, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(hearing.Transcriber, "_attempt", attempted)
    decode_beside(served, order, monkeypatch, lambda: ask(served), least=5)


def test_a_client_that_goes_gives_the_model_free(served: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = hearing.Transcriber._attempt
    begun = []

    def endless(self: hearing.Transcriber, *given: Any) -> Any:
        begun.append(True)
        while True:
            yield 0.0
            time.sleep(0.01)

    assert post(served, "models/load", model=NAME).status_code == 200
    monkeypatch.setattr(hearing.Transcriber, "_attempt", endless)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{served.url}/v1/audio/transcriptions",
            files={"file": ("a.wav", wav(tone(1)))},
            data={"language": "de"},
            timeout=httpx.Timeout(WAIT, read=2.0),
        )
    monkeypatch.setattr(hearing.Transcriber, "_attempt", attempt)
    until(lambda: post(served, "models/unload", model=NAME).status_code == 200)
    assert served.app.audio._memory.take(service.RECORDED.most, 0.0)  # nothing of it holds memory
    served.app.audio._memory.give_back(service.RECORDED.most)
    assert ask(served).status_code == 200


def test_it_is_logged_and_counted(served: Live) -> None:
    before = served.app.audio.figures()["transcribed_seconds"]
    answer = ask(served, 1.5)
    assert served.app.audio.figures()["transcribed_seconds"] - before == 1.5
    assert "start_llm_transcribed_seconds" in served.get("/metrics").text
    recent = served.get("/v1/cache/requests").json()["requests"]
    mine = next(entry for entry in recent if entry["id"] == answer.headers["x-request-id"])
    assert (mine["dialect"], mine["model"], mine["status"]) == ("transcription", NAME, 200)


def test_speech_by_a_model_of_the_pool(served: Live) -> None:
    before = served.app.audio.figures()["spoken_seconds"]
    answer = post(served, "audio/speech", model="tts-1", input="Hello there.", voice="alloy", response_format="wav")
    assert answer.status_code == 200, answer.text
    recording = look_at(answer.content, "file")
    assert served.app.audio.figures()["spoken_seconds"] > before
    assert recording.rate == 32000
    assert listed(served, "tiny-voice")["details"]["task"] == "speech"
    wrong = post(served, "audio/speech", model=NAME, input="Hello")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "wrong_kind")
    assert post(served, "models/unload", model="tiny-voice").json()["details"]["state"] == "stored"
