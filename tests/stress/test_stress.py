"""200 clients, many of them bad: the server serves on, answers /health at once, and holds no more than before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracle import build_oracle
from tests.stress.load import error_inside
from tests.stress.run import Limits, stress
from tests.stress.watch import Health, growth

pytestmark = pytest.mark.thorough


@pytest.mark.live
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("clients", "seconds"), [(60, 3), pytest.param(200, 600, marks=pytest.mark.slow)])
def test_a_storm_of_clients(tmp_path: Path, clients: int, seconds: int) -> None:
    result = stress(build_oracle(tmp_path / "model", "plain"), tmp_path, clients, seconds)
    # In a few seconds what is bounded is not full yet, and a busy neighbour weighs more.
    limits = Limits(health=20.0, memory=0.5, descriptors=1.0)
    if seconds > 60:
        limits = Limits()
    assert not result.faults(limits), result.text()
    assert max(result.samples.descriptors) < 350 and max(result.samples.threads) < 60
    assert sum(result.tally.statuses.values()) > clients


def test_growth_is_seen() -> None:
    assert growth([100] * 40) == 0
    assert growth([0] * 20 + [100] * 10 + [120] * 10) == pytest.approx(0.2)


def test_errors_inside_of_streams_are_seen() -> None:
    told = b'data: {"error":{"message":"x","type":"server_error","param":null,"code":null}}\n\n'
    assert error_inside(b"data: {}\n\n" + told) == "server_error"
    told = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"x"}}\n\n'
    assert error_inside(told) == "overloaded_error"
    assert error_inside(b'data: {"text":"error"}\n\ndata: [DONE]\n\n') is None


def test_what_is_the_servers_own_doing_is_seen() -> None:
    quiet, busy = [0.0] * 100, [0.1] * 100
    held = Health(took=[1.0] * 100, worked=[0.5] * 100, late=busy, wrong=[])
    assert not held.is_within(0.2)
    others = Health(took=[1.0] * 100, worked=[0.01] * 100, late=busy, wrong=[])
    assert others.is_within(0.2)
    asleep = Health(took=[1.0] * 100, worked=[0.01] * 100, late=quiet, wrong=[])
    assert not asleep.is_within(0.2)
