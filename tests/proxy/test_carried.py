"""What is folded into places that LiteLLM passes on. That they are: `test_dialects`, and `integration/test_sdk`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from start_llm.core.modelmap import ADAPTER_SIGN
from start_llm.proxy.carried import SIGN, Carried
from tests.proxy.test_gate import Behind

NAMES = {"mine": "default", "tiny": "tiny", "openai/tiny": "tiny"}


def through(path: str, *pieces: bytes, gone: bool = False) -> tuple[bytes, dict[bytes, bytes]] | None:
    """The body, and the headers, that come through; ``None``: nothing does."""
    behind = Behind()
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": piece, "more_body": gone or piece is not pieces[-1]} for piece in pieces
    ]
    messages.append({"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None: ...

    headers = [(b"content-length", str(sum(map(len, pieces))).encode()), (b"x-more", b"1")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(Carried(behind, behind=NAMES)(scope, receive, send))
    return (behind.bodies[0], dict(behind.scopes[0]["headers"])) if behind.bodies else None


def folded(path: str, body: dict[str, Any]) -> dict[str, Any]:
    come = through(path, json.dumps(body).encode())
    assert come is not None and come[1][b"content-length"] == str(len(come[0])).encode() and come[1][b"x-more"] == b"1"
    return dict(json.loads(come[0]))


def test_the_sign_is_the_servers() -> None:
    assert SIGN == ADAPTER_SIGN


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages", "messages/count_tokens", "responses"])
@pytest.mark.parametrize("more", [{"adapter": "a"}, {"extra_body": {"adapter": "a"}}])
@pytest.mark.parametrize(("model", "behind"), [*NAMES.items(), ("x", "x")])
def test_an_adapter_goes_with_the_models_name(path: str, more: dict[str, Any], model: str, behind: str) -> None:
    found = folded(f"/v1/{path}", {"model": model, "max_tokens": 5, **more})
    assert found.pop("extra_body", {}) == {}
    assert found == {"model": f"{behind}+a", "max_tokens": 5}


def test_own_fields_of_responses_go_in_a_place_that_is_unfolded() -> None:
    plain, own = {"model": "tiny", "input": "hi", "tools": []}, {"min_p": 0.1, "top_k": 5}
    body = plain | own | {"extra_body": {"session_id": "s"}}
    expected = plain | {"extra_body": own | {"session_id": "s"}}
    assert folded("/responses", body) == expected
    assert folded("/v1/messages", body) == body, "there is no such place"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "tiny",  "input": "an \\"adapter\\" in a text"}',
        b'{"model": "tiny",  "adapter": null}',
        b'{"model": 5,  "adapter": "a"}',
        b'["adapter"]',
        b'{"adapter": ',
        b'{"adapter": ' + b"[" * 200_000,
        b"",
    ],
)
def test_everything_else_is_passed_on_to_the_byte(raw: bytes) -> None:
    come = through("/v1/messages", raw)
    assert come is not None and come[0] == raw


def test_a_body_in_pieces_and_one_that_ends_early() -> None:
    whole = json.dumps({"model": "tiny", "adapter": "a"}).encode()
    come = through("/v1/messages", whole[:5], whole[5:20], whole[20:])
    assert come is not None and json.loads(come[0]) == {"model": "tiny+a"}
    assert through("/v1/messages", whole[:5], gone=True) is None
