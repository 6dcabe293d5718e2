"""Random requests of every dialect: whatever is sent, the answer is an answer or a clear refusal.

``python -m pytest tests/fuzz/test_fuzz.py --slow -n 0 -k many`` sends 100,000, in parts that can be run one by one
(``-k part-7-``). A part sends the same requests at each run.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.bodies import request
from tests.fuzz.world import World, world
from tests.oracle import build_oracle

ALLOWED = {501, 503, 507}
FEW, MANY, IN_ONE_TEST = 2_000, 100_000, 5_000
MOST_SECONDS = 5.0
"""Under `--slow`, where the machine should have nothing else to do; else four times as many."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("fuzz")
    with world(build_oracle(folder / "model"), folder / "cache") as made:
        yield made


def check(served: World, path: str, body: bytes, said: str, most_seconds: float) -> int:
    """One request; its status. Fails for everything that a client must never see."""
    served.say(said)
    for _ in range(3):
        began = time.monotonic()
        status, sent = served.ask(path, body)
        if time.monotonic() - began < most_seconds:
            break
    else:  # each time: it was no neighbour's doing
        raise AssertionError(f"over {most_seconds:.0f} s")
    assert status < 500 or status in ALLOWED, (status, sent)
    assert served.noise.found == []
    if status == 200:
        for value in values(sent):
            json.loads(value, parse_constant=_no_constant)
    return status


def values(sent: bytes) -> list[bytes]:
    """The JSON texts of an answer, streamed or not."""
    if not sent.startswith((b"data:", b"event:", b":")):
        return [sent]
    lines = [line.removeprefix(b"data: ") for line in sent.split(b"\n") if line.startswith(b"data: ")]
    return [line for line in lines if line != b"[DONE]"]


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def fuzz(served: World, count: int, most_seconds: float, number: int | None = None) -> Counter[int]:
    """How often each status was seen in `count` random requests: the same ones each time, or those of a seed."""
    seen: Counter[int] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=number is None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=100, max_size=300).map(request))
    def run(made: tuple[str, bytes, str]) -> None:
        seen[check(served, *made, most_seconds)] += 1

    (run if number is None else seed(number)(run))()
    return seen


def test_random_requests(served: World) -> None:
    seen = fuzz(served, FEW, 4 * MOST_SECONDS)
    assert seen[200] > FEW // 5 and seen[400] > FEW // 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "number", range(MANY // IN_ONE_TEST), ids=[f"part-{number}-" for number in range(MANY // IN_ONE_TEST)]
)
def test_many_random_requests(number: int, served: World, capsys: pytest.CaptureFixture[str]) -> None:
    seen = fuzz(served, IN_ONE_TEST, MOST_SECONDS, number)
    with capsys.disabled():
        print(f"\npart {number}: {sum(seen.values())} requests, by status {dict(sorted(seen.items()))}")
    assert sum(seen.values()) >= IN_ONE_TEST
    assert seen[200] > IN_ONE_TEST // 5 and seen[400] > IN_ONE_TEST // 5
