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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_costs_what_is_new_in_it(family: str, seeing: Seeing) -> None:
    server = seeing(family)
    (card,) = server.get("/v1/models").json()["data"]
    assert card["capabilities"]["vision"] is True and card["capabilities"]["images"] == "shown"
    first, second = image(101), image(102)  # no other test of this server shows them
    before, computed, new, known = encodings(server), 0, 0, 0
    messages: list[Json] = [{"role": "system", "content": f"{unique()} " * 40}]
    for parts in (
        (words("What is this?"), first),
        (words("And what colour has it?"),),
        (second, words("And this one?"), first),
    ):
        messages.append(user(*parts))
        answer = server.chat(messages, max_tokens=10, temperature=0, logit_bias=PLAIN)
        prompt, report = server.prompt_of(answer), answer["report"]
        computed, new = (computed + report["computed"], new + len(prompt) - known) if known else (0, 0)
        known = len(prompt) + report["generated"]
        messages.append({"role": "assistant", "content": answer["message"]["content"]})
    shown = [token for token in prompt if token >= FIRST_IMAGE_ID]
    assert len(shown) % 3 == 0 and shown[: len(shown) // 3] == shown[-len(shown) // 3 :], "the first one comes again"
    assert computed <= 1.15 * new, (computed, new)
    assert encodings(server) - before == 2
    assert server.figure("vlm_retreat") == 0


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
