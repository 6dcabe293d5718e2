"""Images over HTTP, on tiny vision models: what is reused, what is refused, and that the server goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from start_llm.core.prompt import FIRST_IMAGE_ID
from tests.engine.vision_zoo import CONFIGS
from tests.images.corpus import CASES
from tests.images.pictures import data_url, png
from tests.integration.live import Live, live
from tests.model_thread import on_model_thread
from tests.oracle import make_tokenizer
from tests.unique import unique

SLOW = pytest.mark.slow
FAMILIES = [family if family == "qwen3_5" else pytest.param(family, marks=SLOW) for family in CONFIGS]
PLAIN = {str(make_tokenizer().encode(" the").ids[0]): 100}
"""Random weights write bytes that are no text; this keeps answers to one word, again and again."""
Seeing = Callable[[str], Live]
Json = dict[str, Any]


def words(text: str) -> Json:
    return {"type": "text", "text": text}


def image(seed: int, size: tuple[int, int] = (96, 64)) -> Json:
    return {"type": "image_url", "image_url": {"url": data_url(png(*size, seed))}}


def user(*parts: Json) -> Json:
    return {"role": "user", "content": list(parts)}


def encodings(server: Live) -> int:
    return int(on_model_thread(server.app, lambda model, _: model.encoded))


def ask(server: Live, messages: list[Json], **more: Any) -> httpx.Response:
    body = {"model": "default", "messages": messages, "max_tokens": 10, "temperature": 0, **more}
    return server.post("/v1/chat/completions", json=body)


class Talk:
    """A conversation. `computed` and `new` count the prompt tokens of all turns behind the first."""

    def __init__(self, salt: str = "") -> None:
        text = " ".join(f"rule {n} of {salt or unique()}" for n in range(20))
        self.messages: list[Json] = [{"role": "system", "content": text}]
        self.computed = self.new = self.known = 0

    def turn(self, server: Live, *parts: Json) -> Json:
        self.messages.append(user(*parts))
        answer = server.chat(self.messages, max_tokens=10, temperature=0, logit_bias=PLAIN)
        if self.known:
            self.computed += answer["report"]["computed"]
            self.new += len(server.prompt_of(answer)) - self.known
        self.known = len(server.prompt_of(answer)) + answer["report"]["generated"]
        self.messages.append({"role": "assistant", "content": answer["message"]["content"]})
        return answer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_costs_what_is_new_in_it(family: str, seeing: Seeing) -> None:
    server, talk = seeing(family), Talk()
    first, second = image(101), image(102)  # no other test of this server shows them
    before = encodings(server)
    talk.turn(server, words("What is this?"), first)
    talk.turn(server, words("And what colour has it?"))
    answer = talk.turn(server, second, words("And this one?"), first)
    shown = [token for token in server.prompt_of(answer) if token >= FIRST_IMAGE_ID]
    assert len(shown) % 3 == 0 and shown[: len(shown) // 3] == shown[-len(shown) // 3 :], "the first one comes again"
    assert talk.computed <= 1.15 * talk.new, (talk.computed, talk.new)
    assert encodings(server) - before == 2
    assert server.figure("vlm_retreat") == 0


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("qwen3_5", marks=SLOW)])
@pytest.mark.thorough
def test_ten_turns_with_three_images_and_a_restart(
    family: str, vision_path: Callable[[str], Path], tmp_path: Path
) -> None:
    talk, encoded_in_all = Talk(), 0
    for turns in (range(1, 6), range(6, 11)):
        with live(vision_path(family), tmp_path, kv_disk_dir="on") as server:
            for turn in turns:
                pictures = [image(turn)] if turn in (1, 4, 7) else []
                talk.turn(server, words(f"This is question {turn} of this conversation."), *pictures)
            encoded_in_all += encodings(server)
    assert encoded_in_all == 3
    assert talk.computed <= 1.15 * talk.new, (talk.computed, talk.new)


def test_another_image_of_the_same_size_shares_nothing_behind_it(seeing: Seeing) -> None:
    server, salt = seeing("qwen3_5"), unique()
    reports = []
    for seed in (1, 2, 1):
        answer = server.chat([user(words(f"{salt} look " * 20), image(seed), words("What is it?"))], max_tokens=4)
        prompt = server.prompt_of(answer)
        reports.append((answer["report"], next(at for at, token in enumerate(prompt) if token >= FIRST_IMAGE_ID)))
    (_, _), (second, start), (third, _) = reports
    assert second["reused"] <= start and third["reused"] > start
    assert server.figure("vlm_retreat") == 0


def test_images_in_tool_results_and_other_dialects(seeing: Seeing) -> None:
    server = seeing("qwen3_vl")
    (card,) = server.get("/v1/models").json()["data"]
    assert card["capabilities"]["vision"] is True and card["capabilities"]["images"] == "shown"
    source = {"type": "base64", "media_type": "image/png", "data": data_url(png()).partition(",")[2]}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": source}]}
    use = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"file_path": "a.png"}}
    body: Json = {
        "model": "claude-x",
        "max_tokens": 4,
        "tools": [{"name": "Read", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "Look at a.png"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
    }
    answer = server.post("/v1/messages", json=body).json()
    assert "id" in answer, answer
    assert any(token >= FIRST_IMAGE_ID for token in server.prompts[answer["id"]])
    item = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(png())}]}
    body = {"model": "default", "max_output_tokens": 4, "input": [item], "store": False}
    answer = server.post("/v1/responses", json=body).json()
    assert "id" in answer, answer
    assert any(token >= FIRST_IMAGE_ID for token in server.prompts[answer["id"]])


@pytest.mark.thorough
def test_the_corpus(seeing: Seeing) -> None:
    """Every bad or odd image has its status, and the server answers the next request."""
    server = seeing("qwen3_vl")
    found = {}
    for case in CASES:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{case.source}"}}
        response = ask(server, [user(words("What is this?"), part)], max_tokens=2)
        found[case.name] = response.status_code
        if case.status != 200:
            error = response.json()["error"]
            assert error["param"] == "messages[0].content[1].image_url.url"
            assert "image 1 of the request" in error["message"] and case.problem in error["message"]
    assert found == {case.name: case.status for case in CASES}
    assert ask(server, [user(words("Are you there?"))]).status_code == 200


def test_limits_count_new_images_only(seeing: Seeing) -> None:
    server = seeing("qwen3_vl")
    many = [image(seed, (32, 32)) for seed in range(6)]
    refused = ask(server, [user(*many)])
    assert refused.status_code == 413 and refused.json()["error"]["param"] == "messages[0].content[5].image_url.url"
    history = [user(*many), {"role": "assistant", "content": "I see six."}, user(words("Which is red?"), *many[:5])]
    assert ask(server, history, max_tokens=2).status_code == 200


def test_a_bad_image_in_the_history_does_not_end_the_conversation(seeing: Seeing) -> None:
    server = seeing("qwen3_vl")
    broken = {"type": "image_url", "image_url": {"url": data_url(png()[:300])}}
    web = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    path = {"type": "image_url", "image_url": {"url": "/etc/passwd"}}
    for part in (broken, web, path):
        refused = ask(server, [user(words("Look"), part)])
        assert refused.status_code == 400, refused.json()
        said = [user(words("Look"), part), {"role": "assistant", "content": "No."}, user(words("Go on"), image(1))]
        answer = server.chat(said, max_tokens=2)
        shown = [token for token in server.prompt_of(answer) if token < FIRST_IMAGE_ID]
        text = on_model_thread(server.app, partial(_decoded, shown))
        assert "[Image 1: " in text and "not shown]" in text


def _decoded(tokens: list[int], model: Any, tokenizer: Any) -> str:
    return str(tokenizer.decode(tokens))


def test_off_is_a_text_model(vision_path: Callable[[str], Path], tmp_path: Path) -> None:
    with live(vision_path("qwen3_5"), tmp_path, vision="off") as server:
        answer = server.chat([user(words("Look"), image(1))], max_tokens=2)
        assert all(token < FIRST_IMAGE_ID for token in server.prompt_of(answer))
        (card,) = server.get("/v1/models").json()["data"]
        assert card["capabilities"]["vision"] is False
