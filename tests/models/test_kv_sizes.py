"""What stored KV of models with pools, indexes, windows and states takes; docs/architectures.md has the table."""

from __future__ import annotations

import pytest

from tests.models.kv_sizes import NEW_TYPES, conversation, sizes

QUICK = ("deepseek_v41", "kimi_k3")
IN_CI = ("hy_v4", "deepseek_v4", "qwen4_exp", "glm5_next")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough if name in IN_CI else pytest.mark.slow)
        for name in NEW_TYPES
    ],
)
def test_a_checkpoint_takes_as_much_wherever_it_stands_and_a_token_what_its_columns_say(name: str) -> None:
    found = sizes(name, (256, 512))
    assert len(set(found["checkpoint"])) == 1
    assert found["token"] == [found["columns"]] * 2


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name in QUICK else pytest.mark.slow) for name in NEW_TYPES],
)
def test_a_conversation_with_forks_computes_what_is_new(name: str) -> None:
    found = conversation(name)
    assert 0 < found["computed"] <= 1.05 * found["new"]
