"""``/v1/embeddings``: bodies in, bodies out, around a scripted encoder."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from start_llm.api.server import ApiServer
from start_llm.core.events import Progress
from start_llm.core.media import Computation, Encoded, Text
from start_llm.core.service import ModelCard
from tests.api.conftest import Raw, Serve
from tests.waiting import until

ANGLES = {"north": 0.0, "north by east": 0.2, "east": 1.2, "south": 3.0}


def encoded(texts: Sequence[Text], cut: int, held: threading.Event) -> Computation[Encoded]:
    angles = [ANGLES.get(str(text), len(text) / 7) for text in texts]
    vectors = np.array([[np.cos(angle), np.sin(angle)] for angle in angles], np.float32)
    result = Encoded(vectors, 3 * len(texts), cut)
    while not held.wait(0.01):
        yield Progress(1, result.tokens)
    yield Progress(result.tokens, result.tokens)
    return result


class FakeEncoders:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.cut = 0
        self.held = threading.Event()
        self.held.set()
        self.begun = threading.Event()

    def named(self, asked: str) -> str:
        return "tiny-encoder"

    def encode(
        self, texts: Sequence[Text], param: str, *, truncate: bool, dimensions: int | None
    ) -> Computation[Encoded]:
        self.asked.append({"texts": list(texts), "param": param, "truncate": truncate, "dimensions": dimensions})
        self.begun.set()
        return encoded(texts, self.cut, self.held)

    def cards(self) -> tuple[ModelCard, ...]:
        return (ModelCard("tiny-encoder", 1_700_000_000, 512, tools=False, details={"kind": "embedding"}),)


@pytest.fixture
def encoders() -> FakeEncoders:
    return FakeEncoders()


@pytest.fixture
def server(encoders: FakeEncoders, serve: Serve) -> Iterator[ApiServer]:
    yield serve({"encoders": encoders})
    encoders.held.set()


def ended(server: ApiServer) -> dict[str, Any]:
    """What is told of the last request, once it has ended."""
    return until(lambda: httpx.get(f"{server.url}/v1/cache/requests").json()["requests"])[0]  # type: ignore[no-any-return]


@pytest.fixture
def post(server: ApiServer) -> Callable[..., httpx.Response]:
    return lambda path, body: httpx.post(f"{server.url}/v1/{path}", json=body)


Post = Callable[..., httpx.Response]


def test_embeddings(post: Post, encoders: FakeEncoders, server: ApiServer) -> None:
    answer = post("embeddings", {"model": "x", "input": ["north", "south"], "dimensions": 2})
    body = answer.json()
    assert [item["index"] for item in body["data"]] == [0, 1]
    assert body["data"][0] == {"object": "embedding", "index": 0, "embedding": [1.0, 0.0]}
    assert body["object"] == "list"
    assert body["model"] == "tiny-encoder"
    assert body["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    assert encoders.asked == [{"texts": ["north", "south"], "param": "input", "truncate": False, "dimensions": 2}]
    assert answer.headers["x-request-id"].startswith("embd-")
    told = ended(server)
    assert (told["dialect"], told["model"], told["status"]) == ("embeddings", "tiny-encoder", 200)


def test_base64_is_little_endian_float32(post: Post) -> None:
    body = post("embeddings", {"input": "south", "encoding_format": "base64"}).json()
    vector = np.frombuffer(base64.b64decode(body["data"][0]["embedding"]), "<f4")
    assert np.abs(vector - [np.cos(3.0), np.sin(3.0)]).max() < 1e-6


@pytest.mark.parametrize(
    ("given", "read"),
    [("a", ["a"]), ([1, 2], [(1, 2)]), ([[1], [2, 3]], [(1,), (2, 3)]), (["a", [4]], ["a", (4,)])],
)
def test_every_form_of_input(post: Post, encoders: FakeEncoders, given: Any, read: Any) -> None:
    assert post("embeddings", {"input": given}).status_code == 200
    assert encoders.asked[0]["texts"] == read


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "required"),
        ({"input": ""}, "input", "an empty text has no embedding"),
        ({"input": []}, "input", "a string or a list of token ids that is not empty"),
        ({"input": ["a", ""]}, "input[1]", "an empty text"),
        ({"input": ["a", 5]}, "input[1]", "a string or a list of token ids"),
        ({"input": [[]]}, "input[0]", "not empty"),
        ({"input": [1, -2]}, "input", "token ids"),
        ({"input": {"a": 1}}, "input", "a string or a list"),
        ({"input": ["a"] * 2049}, "input", "at most 2,048 texts"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
        ({"input": "a", "model": 5}, "model", "string"),
    ],
)
def test_a_bad_request_for_embeddings_names_its_field(post: Post, body: Any, param: str, said: str) -> None:
    answer = post("embeddings", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_client_that_goes_ends_its_work(server: ApiServer, encoders: FakeEncoders) -> None:
    encoders.held.clear()
    raw = Raw(server.port).post("/v1/embeddings", {"input": ["a"] * 100})
    assert encoders.begun.wait(60)
    raw.close()
    assert ended(server)["status"] == 499


def test_models_lists_the_encoder_behind_the_model(server: ApiServer) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "tiny-encoder"]
    assert httpx.get(f"{server.url}/v1/models/tiny-encoder").json()["details"]["kind"] == "embedding"
