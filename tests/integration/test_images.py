"""An image in the history of a model that reads text only: the conversation goes on, and reuses as without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.images.pictures import b64, png
from tests.integration.live import Live
from tests.kinds import some
from tests.model_thread import on_model_thread
from tests.oracle import expected_truth, script
from tests.unique import unique

TURNS = 5
BREAKS = b64(png()[:400])
WORDS = " ".join(f"word{i}" for i in range(40))


READ = {
    "name": "Read",
    "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]},
}


def block(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def ask(server: Live, messages: list[dict[str, Any]]) -> dict[str, Any]:
    system = f"You help. {WORDS}"
    body = {"model": "claude-sonnet", "max_tokens": 600, "system": system, "tools": [READ], "messages": messages}
    response = server.post("/v1/messages", json=body)
    data = response.json()
    assert response.status_code == 200, data
    return dict(data)


def converse(server: Live, image: dict[str, Any] | None) -> tuple[int, int, list[str]]:
    """As Claude Code does it: a tool reads a picture in the second turn. (computed, new) tokens behind the first turn,
    and the lines that stand for the image in the last prompt."""
    call = '<tool_call>\n{"name": "Read", "arguments": {"file_path": "shot%d.png"}}\n</tool_call>'
    texts = [f"Step {{truth}} {WORDS}\n{call % turn}" for turn in range(TURNS)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{unique()} {script(*texts)} Look at it."}]
    known, computed, new = 0, 0, 0
    for turn in range(TURNS):
        before = server.work()
        answer = ask(server, messages)
        prompt = server.prompts[answer["id"]]
        assert expected_truth(prompt) in answer["content"][0]["text"], "the model saw another prompt"
        if turn:
            computed += server.work() - before
            new += len(prompt) - known
        known = len(prompt) + answer["usage"]["output_tokens"]
        use = next(part for part in answer["content"] if part["type"] == "tool_use")
        shown: list[Any] = [{"type": "text", "text": f"result {turn} {WORDS}"}]
        if turn == 1 and image is not None:
            shown = [image]
        messages += [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": shown}]},
        ]
    text = on_model_thread(server.app, lambda _, tokenizer: tokenizer.decode(list(prompt)))
    return computed, new, [line for line in text.split("\n") if line.startswith("[Image")]


@pytest.mark.parametrize(
    ("kind", "data"), some([("plain", BREAKS), ("hybrid", b64(png()))]), ids=["cut short", "whole"]
)
def test_an_image_never_ends_a_conversation(servers: Callable[..., Live], kind: str, data: str) -> None:
    server = servers(kind)
    computed, new, lines = converse(server, block(data))
    without, new_without, none = converse(server, None)
    (card,) = server.get("/v1/models").json()["data"]
    assert card["capabilities"]["images"] == "placeholder" and not card["capabilities"]["vision"]
    assert server.get("/health").json()["capabilities"] == card["capabilities"]
    assert len(lines) == 1 and lines[0].startswith("[Image 1: image_") and not none
    assert lines[0].endswith("not shown: this model reads text only]")
    assert computed <= 1.15 * new and without <= 1.15 * new_without, (computed, new, without, new_without)


def test_another_image_is_another_message(servers: Callable[..., Live]) -> None:
    """Two clients whose histories differ in the pixels only: neither goes on from the other's answer."""
    server, salt = servers("plain"), unique()
    text = {"type": "text", "text": f"{salt} What is this? {script('It is red.', 'Still.')}"}
    histories = [[{"role": "user", "content": [block(b64(png(seed=seed))), text]}] for seed in (1, 2)]
    prompts = []
    for messages in histories:
        answer = ask(server, messages)
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "Are you sure?"}]
        prompts.append(server.prompts[ask(server, messages)["id"]])
    assert prompts[0] != prompts[1], "the line that stands for an image carries the image's identity"
