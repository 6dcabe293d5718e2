"""Agents that have a small model beside the large one, on one server: an oracle each, or SmolLM2 beside the oracle.

Claude Code goes on up to four times with an answer that was cut, and a real model of this size never ends one: that
costs one minute or six, by chance. So its helper asks a second oracle, and SmolLM2 with ``--slow``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm.models.catalog import EMBEDDED_NAME
from tests.e2e.counting import NewTokens
from tests.e2e.scenarios import AIDER, AIDER_COMMIT, CLAUDE, call, hidden
from tests.e2e.world import Run, World, make_world, skip_unless_installed
from tests.oracle import build_oracle
from tests.oracle.oracle import script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

MOST_COMPUTED = 1.2
NOTE = 75
"""Tokens that an update note may take."""
LARGE, SMALL, WEAK = "oracle", "small-oracle", EMBEDDED_NAME
HELPER = {"description": "Answers a short question.", "prompt": "You answer in one word.", "tools": ["Read"]}


@pytest.fixture(scope="module", params=[SMALL, pytest.param(WEAK, marks=pytest.mark.slow)])
def small(request: pytest.FixtureRequest) -> str:
    """What `claude-haiku-*` means."""
    return str(request.param)


@pytest.fixture(scope="module")
def two_models(
    tmp_path_factory: pytest.TempPathFactory, oracle_folder: Path, smol_path: Path, small: str
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("two")
    models = folder / "cache" / "models"
    models.mkdir(parents=True)
    build_oracle(models / SMALL, "hybrid")
    (models / WEAK).symlink_to(smol_path)
    # An answer of SmolLM2 may never end by itself.
    settings = {"MODEL_MAP": f"claude-haiku-*={small}", "DEFAULT_MAX_TOKENS": "300"}
    with make_world(folder, oracle_folder, more=settings) as world:
        world.more = {"DEFAULT_MAX_TOKENS": "300"}
        yield world


class Turns:
    """The requests of an agent, by the model that answered them."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.repository = world, name, world.repository(name)
        self.counter = NewTokens.of_the_oracle()

    def run(self, arguments: list[str], text: str, seconds: float) -> tuple[Run, dict[str, list[tuple[Any, Any]]]]:
        run = self.world.launch(self.name, self.repository, arguments, text, seconds)
        assert run.code == 0, run.output[-3000:]
        assert [entry["status"] for entry in run.sent if entry["status"] != 200] == [], run.output[-3000:]
        asked = [entry for entry in run.sent if "count_tokens" not in entry["path"]]
        by_model: dict[str, list[tuple[Any, Any]]] = {LARGE: [], SMALL: [], WEAK: []}
        for sent, served in zip(asked, run.served, strict=True):
            by_model[served["model"]].append((sent["body"], served))
        return run, by_model

    def ratio(self, pairs: list[tuple[Any, Any]]) -> tuple[int, int]:
        """(computed, new) tokens."""
        return sum(served["computed"] for _, served in pairs), sum(self.counter.count(body) for body, _ in pairs)


def test_claude_codes_small_model(two_models: World, small: str, table: list[str]) -> None:
    skip_unless_installed("claude")
    turns = Turns(two_models, "claude")

    def ask(answer: str) -> str:
        question = f"What is 2 + 2? {script(answer)}"
        words = call("Agent", description="Ask", prompt=question, subagent_type="looker", run_in_background=False)
        return "I ask a helper.\n" + hidden(words)

    prompt = "Ask the looker. " + script(ask("Four, says the small one."), "The helper has answered.")
    helper = ["--agents", json.dumps({"looker": HELPER | {"model": "haiku"}})]
    arguments, text = CLAUDE.first(prompt, Path())
    _, first = turns.run([*helper, *arguments], text, 600)
    assert {body["model"] for body, _ in first[small]} == {"claude-haiku-4-5"}, "the launcher says which name is mapped"
    assert all(served["completion"] > 0 for _, served in first[small])
    if small == SMALL:
        assert "Four, says the small one." in json.dumps(first[LARGE][-1][0]["messages"][-1])
    assert {body["model"] for body, _ in first[LARGE]} == {LARGE} and len(first[LARGE]) == 2
    turns.ratio(first[LARGE][:1])
    after = turns.ratio(first[LARGE][1:])

    prompt = "And again. " + script(ask("Still four."), "The helper has answered again.")
    arguments, text = CLAUDE.again(prompt, Path())
    _, second = turns.run([*helper, *arguments], text, 600)
    assert second[small] and len(second[LARGE]) == 2
    if small == SMALL:
        assert "Still four." in json.dumps(second[LARGE][-1][0]["messages"][-1])
    going_on = turns.ratio(second[LARGE])
    table.append(f"claude, {small} beside: {after[0]}/{after[1]}, second turn {going_on[0]}/{going_on[1]}")
    for computed, new in (after, going_on):
        assert computed <= MOST_COMPUTED * new


def test_aiders_weak_model(two_models: World, table: list[str]) -> None:
    skip_unless_installed("aider")
    turns = Turns(two_models, "aider")
    weak = ["--weak-model", f"openai/{WEAK}"]
    arguments, _ = AIDER.first("", Path())
    arguments = [word for word in arguments if word not in AIDER_COMMIT]
    asks = [
        "Repair add in src/calc.py and try it. " + script(*AIDER.work(turns.repository)),
        "Write it down in NOTES.md. " + script(*AIDER.note(turns.repository)),
    ]
    text = "".join(AIDER.first(ask, Path())[1] for ask in asks)
    _, told = turns.run([*weak, *arguments], text, 600)
    assert len(told[LARGE]) == 2, "one for each turn"
    assert len(told[WEAK]) >= 2 and {body["model"] for body, _ in told[WEAK]} == {WEAK}, "a commit message for each"
    assert (turns.repository / "src" / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    turns.ratio(told[LARGE][:1])
    computed, new = turns.ratio(told[LARGE][1:])
    table.append(f"aider, weak model beside: second turn {computed}/{new}")
    assert computed <= new + NOTE
