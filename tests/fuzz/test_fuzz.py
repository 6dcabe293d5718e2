"""Random requests to every route: whatever is sent, the answer is an answer or a clear refusal.

``python -m pytest tests/fuzz/test_fuzz.py --slow -n 0 -k many`` sends 100,000, in parts that can be run one by one
(``-k part-7-``). A part sends the same requests at each run.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from unittest.mock import Mock

import pytest

from start_llm.api import table
from start_llm.api.common.parts import IMAGE_TYPES, TEXT_TYPES
from start_llm.api.openai.chat import read_chat
from start_llm.api.openai.responses_tools import PASSED_OVER, SERVED
from start_llm.core.errors import Internal
from start_llm.core.extras import is_installed
from tests.embeddings.tiny import build_encoder
from tests.fuzz import bodies
from tests.fuzz.requests import BODIES, OFTEN, PATHS, SELDOM, SOMETIMES, Request, request
from tests.fuzz.tape import Tape
from tests.fuzz.world import World, world
from tests.kinds import rounds, some
from tests.oracle import build_oracle

FEW, MANY, IN_ONE_TEST = 2_000, 100_000, 5_000
TAPE = 350
"""Bytes that a request is made of. Hypothesis took as long to draw them as the server to answer."""


ALLOWED = {501, 503, 507}
MOST_SECONDS = 5.0
"""That a request may compute, and that it may wait for anything but a processor."""
GIVEN_UP_SECONDS = 120.0
"""That a grammar may go on computing after its request was given up: so many schemas as are allowed cost less."""
TRIES = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a request: by the clock, and on processors (all threads of this process)."""

    wall: float
    computed: float

    def too_much(self, most: float) -> bool:
        """Beside busy neighbours what is computed takes longer by the clock, and that says nothing of the server."""
        if self.wall < most:
            return False
        return self.computed > most or self.wall - self.computed * _stretch() > most


def _stretch() -> float:
    """How much longer a computation takes now than it would alone."""
    began, until = time.monotonic(), time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    return max(1.0, (time.monotonic() - began) / 0.1)


def check(served: World, request: Request, most_seconds: float = MOST_SECONDS) -> int:
    """One request; its status. Raises AssertionError for everything that a client must never see."""
    served.say(request.said)
    for _ in range(TRIES):
        let_end()
        began, computed = time.monotonic(), time.process_time()
        status, sent = served.ask(request)
        cost = Cost(time.monotonic() - began, time.process_time() - computed)
        if not cost.too_much(most_seconds):
            break
    else:  # each time, and alone: it was no neighbour's doing
        raise AssertionError(f"over {most_seconds:.0f} s: {cost}")
    assert status and (status < 500 or status in ALLOWED), (status, sent)
    assert not served.noise.found, served.noise.found
    if status == 200 and request.path.startswith(("/v1/", "/api/")) and "audio" not in request.path and sent:
        for value in values(sent):
            json.loads(value, parse_constant=Mock(side_effect=AssertionError("NaN is not JSON")))
    return status


def let_end() -> None:
    """Waits for grammars of earlier requests that were given up: what they compute is not the next request's."""
    for thread in threading.enumerate():
        if thread.name == "grammar":
            computed = time.process_time()
            while thread.is_alive():
                thread.join(0.1)
                assert time.process_time() - computed < GIVEN_UP_SECONDS, "a grammar that was given up has no end"


def values(sent: bytes) -> list[bytes]:
    """The JSON texts of an answer, streamed or not."""
    if not sent.startswith((b"data:", b"event:", b":")):
        return sent.splitlines()  # one, or Ollama's stream of them
    lines = [line.removeprefix(b"data: ") for line in sent.split(b"\n") if line.startswith(b"data: ")]
    return [line for line in lines if line != b"[DONE]"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server with two models, and an encoder where there is one."""
    folder = tmp_path_factory.mktemp("fuzz")
    build_oracle(folder / "cache" / "models" / "oracle-two", "hybrid")
    encoder = {"embedding_model": str(build_encoder(folder / "tiny-encoder"))} if is_installed("mlx_embeddings") else {}
    with world(build_oracle(folder / "model"), folder / "cache", **encoder) as made:
        for path in ("/v1/embeddings", "/v1/models/load"):  # what is imported at the first use takes its time once
            body = b'{"model": "oracle-two"}' if "load" in path else b'{"input": "Hi"}'
            made.ask(Request("POST", path, body, {}, "127.0.0.1"))
        yield made


def test_every_route_is_asked(served: World) -> None:
    routes = [route for route in served.app._server.routes._routes if route.lane != "feed"]
    posted = {route.pattern for route in routes if "POST" in route.handlers}
    assert posted == set(BODIES) == {*OFTEN, *SOMETIMES, *SELDOM}
    read = {route.pattern.replace("{*}", "{}") for route in routes} - posted
    assert read <= set(PATHS)


def test_every_type_that_is_known_is_sent() -> None:
    assert {*bodies.ELSEWHERE} == PASSED_OVER and {*bodies.TOOL_TYPES} >= SERVED
    assert {*bodies.BLOCKS} >= table.BLOCKS and {*bodies.IMAGES} == IMAGE_TYPES and {*bodies.PARTS} >= TEXT_TYPES


def fuzz(served: World, count: int, most_seconds: float, seed: str) -> Counter[int]:
    """How often each status was seen in `count` random requests, always the same ones for a seed."""
    seen: Counter[int] = Counter()
    random = Random(seed)
    for _ in range(count):
        made = request(Tape(random.randbytes(TAPE)))
        try:
            seen[check(served, made, most_seconds)] += 1
        except Exception as error:
            raise AssertionError(f"{made}: {error!r}") from error
    return seen


def test_random_requests(served: World) -> None:
    few = rounds(FEW)
    seen = fuzz(served, few, 4 * MOST_SECONDS, "few")
    assert seen[200] > few // 5 and seen[400] > few // 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "number", range(MANY // IN_ONE_TEST), ids=[f"part-{number}-" for number in range(MANY // IN_ONE_TEST)]
)
def test_many_random_requests(number: int, served: World, capsys: pytest.CaptureFixture[str]) -> None:
    seen = fuzz(served, IN_ONE_TEST, MOST_SECONDS, f"part {number}")
    with capsys.disabled():
        print(f"\npart {number}: {sum(seen.values())} requests, by status {dict(sorted(seen.items()))}")
    assert sum(seen.values()) >= IN_ONE_TEST
    assert seen[200] > IN_ONE_TEST // 5 and seen[400] > IN_ONE_TEST // 5


# --- would it find something? ---


def _burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "an error that nobody foresaw": (Mock(side_effect=KeyError("a field")), "a field"),
    "an error of the server": (Mock(side_effect=Internal("It failed.")), "500"),
    "an error in the log": (lambda: logging.getLogger("start_llm.api").error("It failed."), "It failed."),
    "a request that computes for too long": (lambda: _burn(0.7), "over"),
    "a request that waits for too long": (lambda: time.sleep(1.0), "over"),
}


@pytest.mark.parametrize("name", some(FAULTS))
def test_a_fault_is_found(name: str, served: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, says = FAULTS[name]
    monkeypatch.setattr(table, "read_chat", lambda *given: fault() or read_chat(*given))
    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    try:
        with pytest.raises(Exception, match=says):
            check(served, Request("POST", "/v1/chat/completions", body, {}, "127.0.0.1"), 0.5)
    finally:
        served.noise.found.clear()
