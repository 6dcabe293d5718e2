"""Who sets MLX's wired limit, and to what: the setting alone decides."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator

from start_llm.core.errors import NotSupported
from start_llm.engine.decode.batch import BatchRunner
from start_llm.engine.decode.wired import wire_weights
from start_llm.models.device import GIB, Device
from tests.kvcache.tiny import model


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What MLX is asked for on a machine that recommends a size, as a Mac does."""
    asked: list[int] = []

    def set_wired_limit(limit: int) -> int:
        asked.append(limit)
        return 0

    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 96 * GIB})
    return asked


def test_mlx_lms_own_generator_still_sets_it(limits: list[int]) -> None:
    """If this fails, mlx-lm has changed and `no_wired_limit` may no longer be needed, or no longer work."""
    BatchGenerator(model("llama")).close()
    assert limits == [96 * GIB, 0]


def test_our_runner_never_does(limits: list[int]) -> None:
    runner = BatchRunner(model("llama"), eos=[1], max_rows=2)
    runner.close()
    del runner
    assert limits == []


@pytest.mark.parametrize(
    ("setting", "usable", "weights", "expected"),
    [
        ("auto", 24, 15, None),  # no slow-down was reported for such a model, panics were
        ("auto", 96, 31, None),
        ("auto", 96, 80, 80),
        ("auto", 96, 95, None),  # nothing would be left to move
        ("off", 96, 80, None),
        (0, 96, 80, None),
        (20, 24, 15, 20),
    ],
)
@pytest.mark.parametrize("backend", ["metal", "cpu"])
def test_loading_sets_it_once_or_not_at_all(
    setting: str | int,
    usable: int,
    weights: int,
    expected: int | None,
    backend: str,
    limits: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mx, "get_active_memory", lambda: weights * GIB)
    asked: Any = setting * GIB if isinstance(setting, int) else setting
    device = Device("macOS", "Apple M4 Max", 128 * GIB, backend, usable * GIB)
    assert wire_weights(asked, device) == bool(limits)
    assert limits == ([] if expected is None or backend == "cpu" else [expected * GIB])


def test_a_wired_limit_beyond_metals_is_refused_with_both_numbers() -> None:
    with pytest.raises(NotSupported, match=f"WIRED_LIMIT={40 * GIB}.*{24 * GIB}"):
        wire_weights(40 * GIB, Device("macOS", "Apple M4 Max", 32 * GIB, "metal", 24 * GIB))
