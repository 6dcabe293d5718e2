"""Work in idle gaps: what a template drops is not paid for in the turn; who cannot be guessed is not guessed for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from start_llm.engine.thread import EngineThread
from tests.integration.asking import CALL
from tests.integration.live import TOOLS, WAIT, Live, echoed, live
from tests.model_thread import on_model_thread
from tests.oracle import expected_truth, script
from tests.unique import unique

THOUGHT = " ".join(f"first I weigh point {i} of the matter" for i in range(20))
ANSWER = " ".join(f"The answer has part {i} in it." for i in range(25))


@contextmanager
def server(path: Path, cache: Path, reanchor: str) -> Iterator[tuple[Live, list[int]]]:
    """A server, and the lengths of the guesses that it sent to the engine."""
    guesses: list[int] = []
    prefill_idle = EngineThread.prefill_idle

    def seen(engine: EngineThread, prompt: Any, *whose: Any, model: str = "") -> None:
        guesses.append(len(prompt.tokens))
        prefill_idle(engine, prompt, *whose, model=model)

    with patch.object(EngineThread, "prefill_idle", seen), live(path, cache, reanchor=reanchor) as running:
        yield running, guesses


def settled(running: Live) -> int:
    """Waits until the model thread has nothing left to do; prompt tokens that it computed so far."""
    deadline = time.monotonic() + WAIT
    recorder = running.app.pool._registry.default.handle.recorder
    assert recorder is not None
    recorder.flush()
    while running.app.engine.call(lambda scheduler: scheduler.idle_prefill.waiting or scheduler.busy, WAIT):
        assert time.monotonic() < deadline, "the idle work does not end"
    return running.work()


def turn(running: Live, messages: list[dict[str, Any]], **more: Any) -> tuple[dict[str, Any], int]:
    """An answer, and the prompt tokens computed for it while the client waited."""
    before = settled(running)
    answer = running.chat(messages, **more)
    return answer, running.work() - before


def talk(running: Live, tool: bool) -> tuple[int, int]:
    """An answer with reasoning, then one more question: (computed for that, tokens of what is new in it)."""
    thoughts = f"<think>\n{THOUGHT}\n</think>\n\n"
    raw = [f"{thoughts}{CALL}"] * tool + [f"{thoughts}{ANSWER}", "It is {truth}"]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"You are {unique()}."},
        {"role": "user", "content": f"{script(*raw)} go"},
    ]
    if tool:
        answer, _ = turn(running, messages, tools=TOOLS)
        messages.append(echoed(answer["message"], "strip"))
        (call,) = answer["message"]["tool_calls"]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a = 1"})
    answer, _ = turn(running, messages, tools=TOOLS)
    assert answer["message"]["content"] == ANSWER
    assert answer["message"]["reasoning_content"].strip() == THOUGHT
    messages += [
        echoed(answer["message"], "strip"),
        {"role": "user", "content": f"[[script]]It is {{truth}}[[end]] {'and now ' * 30}"},
    ]
    answer, computed = turn(running, messages, tools=TOOLS)
    prompt = running.prompt_of(answer)
    assert answer["message"]["content"] == f"It is {expected_truth(prompt)}"
    text = on_model_thread(running.app, lambda _, wrapper: wrapper.decode(list(prompt)))
    assert "I weigh point" not in text.split("[[end]]", 1)[1], "this template drops old reasoning"
    place = text.rindex("<|im_start|>user")
    new = on_model_thread(running.app, lambda _, wrapper: len(wrapper.encode(text[place:], add_special_tokens=False)))
    return computed, new


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.thorough), "hybrid"])
def test_dropped_reasoning_costs_nothing_in_the_turn_if_there_was_idle_time(
    oracle_path: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    with server(oracle_path(kind, "qwen3"), tmp_path, "on") as (running, guesses):
        for tool in (False, True):
            computed, new = talk(running, tool)
            assert computed <= new + 16, (tool, computed, new)
        assert guesses
        figures = running.get("/metrics").text
        assert "start_llm_prompt_guesses_right " in figures


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.thorough), "hybrid"])
def test_without_reanchoring_the_answer_is_computed_once_more(
    oracle_path: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    with server(oracle_path(kind, "qwen3"), tmp_path, "off") as (running, guesses):
        answer = on_model_thread(running.app, lambda _, wrapper: len(wrapper.encode(ANSWER, add_special_tokens=False)))
        computed, new = talk(running, False)
        assert computed >= new + answer
        assert guesses == []


@pytest.mark.thorough
def test_answers_and_guesses_of_two_owners_with_one_session_name_stay_two_conversations(
    oracle_path: Callable[..., Path], tmp_path: Path
) -> None:
    with server(oracle_path("plain", "qwen3"), tmp_path, "on") as (running, guesses):
        for user in ("ann", "bob"):
            raw = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
            messages = [{"role": "user", "content": f"{script(raw)} I am {unique()}"}]
            turn(running, messages, tools=TOOLS, user=user, session_id="main")
        settled(running)
        assert guesses
        assert {name for name, *_ in running.app.engine.stored().conversations} == {"main"}
        assert len({number for *_, number in running.app.engine.stored().conversations}) == 2
    logs = [path.name for path in (tmp_path / "logs").glob("*/session-main-*")]
    assert len(logs) == 2, "each has a log of its own"
