"""Small questions beside long prompts: who is computed first, and who is never left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest

from scripts.bench_share import beside_a_prompt
from start_llm.engine.schedule.jobs import Waiting
from start_llm.engine.schedule.scheduler import Scheduler
from start_llm.engine.schedule.urgent import URGENT_ANSWER, URGENT_TOKENS
from tests.engine.fakes import PASS, Collected, SlowRunner, ask, scheduler_of, steps, steps_until

LONG = 30_000
FIRST = 10**6  # a question's first token; a long prompt begins with a smaller one


@dataclass
class OrderedRunner(SlowRunner):
    """`order`: the first token of each chunk's prompt."""

    order: list[int] = field(default_factory=list)

    def prefill(self, cache: list[Any], tokens: Sequence[int], images: Sequence[Any] = ()) -> int:
        self.order.append(cache[0] if cache else tokens[0])
        return super().prefill(cache, tokens, images)


def question(scheduler: Scheduler, number: int, tokens: int = 800, **more: Any) -> Collected:
    return ask(scheduler, f"question {number}", [FIRST + number, *range(tokens - 1)], **{"max_tokens": 10, **more})


def long_prompt(scheduler: Scheduler, name: str = "long") -> Collected:
    return ask(scheduler, name, range(10, 10 + LONG), max_tokens=10**5)


@pytest.fixture
def runner() -> OrderedRunner:
    return OrderedRunner()


@pytest.fixture
def scheduler(runner: OrderedRunner) -> Scheduler:
    """A long prompt is on its way."""
    found = scheduler_of(runner, 0.5)
    long_prompt(found)
    steps(found, 4)
    runner.order.clear()
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_questions_that_come_together_are_answered_before_the_long_prompt_goes_on(
    count: int, scheduler: Scheduler, runner: OrderedRunner
) -> None:
    """It does not have its share first: at most the chunk beside the last first token is the long one's."""
    runner.token = 0.0017
    asked = [question(scheduler, number) for number in range(count)]
    steps_until(scheduler, lambda: all(sink.tokens for sink in asked))
    assert min(runner.order[:-1]) >= FIRST


def test_a_first_token_comes_before_a_part_of_the_next_question(scheduler: Scheduler, runner: OrderedRunner) -> None:
    first, _ = question(scheduler, 1, 600), question(scheduler, 2, 1400)
    steps_until(scheduler, lambda: first.tokens)
    assert set(runner.order[:-1]) == {FIRST + 1}, "at most the chunk beside its first token is the next one's"


def test_small_questions_share_a_pass(scheduler: Scheduler, runner: OrderedRunner) -> None:
    asked = [question(scheduler, number, 30) for number in range(4)]
    scheduler.step()
    scheduler.step()
    assert all(sink.tokens for sink in asked)


def test_a_question_does_not_wait_for_an_answer_in_progress(runner: OrderedRunner) -> None:
    """One pass of the answer follows each chunk. Then a long prompt goes on as beside the answer alone."""
    found = scheduler_of(runner, 0.5)
    said = ask(found, "answer", range(10, 1000), max_tokens=10**5)
    steps_until(found, lambda: len(said.tokens) >= 3)
    long_prompt(found)
    question(found, 1)
    done: list[tuple[int, int]] = []  # chunks and passes behind each step
    while len(runner.order) < 12:
        found.step()
        done.append((len(runner.order), len(runner.passes)))
    chunks = [after[0] - before[0] for before, after in pairwise(done)]
    assert chunks[:6] == [1] * 6 and set(runner.order[2:9]) == {FIRST + 1}
    assert chunks[7:].index(1) < 10


def keep_asking(scheduler: Scheduler, sink: Collected, most: int) -> int:
    """Until so many tokens of an answer are there: how many questions came meanwhile."""
    number = 0
    while len(sink.tokens) < most:
        while len(scheduler.requests) < 5:
            number += 1
            question(scheduler, number)
        scheduler.step()
    return number


def test_questions_without_end_leave_an_answer_in_progress_its_share(runner: OrderedRunner) -> None:
    found = scheduler_of(runner, 0.5)
    said = ask(found, "answer", range(10, 1000), max_tokens=10**5)
    steps_until(found, lambda: said.tokens)
    began = runner.now
    assert keep_asking(found, said, 1000) > 5 and runner.now - began < 3 * 1000 * PASS


def test_questions_without_end_leave_the_long_prompt_its_share(runner: OrderedRunner) -> None:
    found = scheduler_of(runner, 0.5)
    number = keep_asking(found, long_prompt(found), 1)
    long, questions = sum(first < FIRST for first in runner.order), sum(first >= FIRST for first in runner.order)
    assert number > 5 and questions > 20 and long > questions


def test_questions_that_come_four_times_a_minute_hardly_wait_for_one_another() -> None:
    """A serial machine that computes nothing else would answer 95 of 100 within 2.3 s."""
    alone = beside_a_prompt(LONG, 0.0017, 0, 1)[0]
    runs = [beside_a_prompt(LONG, 0.0017, 4, seed) for seed in range(20)]
    waited = sorted(seconds for _, each in runs for seconds in each)
    assert len(waited) > 60 and waited[int(len(waited) * 0.95)] < 2.8
    assert mean(prompt for prompt, _ in runs) < 1.25 * alone


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "one_shot", "goes_first"),
    [
        (800, 10, False, True),
        (800, 10**5, True, True),
        (800, 10**5, False, False),
        (URGENT_TOKENS + 1, URGENT_ANSWER, False, True),
        (URGENT_TOKENS + 2, URGENT_ANSWER, False, False),
        (800, URGENT_ANSWER + 1, False, False),
    ],
)
def test_what_is_short_and_wants_little_or_stands_beside_is_a_question(
    scheduler: Scheduler, runner: OrderedRunner, tokens: int, max_tokens: int, one_shot: bool, goes_first: bool
) -> None:
    question(scheduler, 1, tokens, max_tokens=max_tokens, one_shot=one_shot)
    steps(scheduler, 4)
    assert (runner.order[0] == FIRST + 1) == goes_first


def test_what_is_stored_does_not_count(runner: OrderedRunner) -> None:
    """A classifier with a long system text that it sends each time."""
    found = scheduler_of(runner, 0.5)
    system = [FIRST, *range(8000)]
    ask(found, "first", system, max_tokens=1)
    steps_until(found, lambda: not found.busy)
    long_prompt(found)
    found.step()
    runner.order.clear()
    ask(found, "again", [*system, *range(100, 900)], max_tokens=10)
    steps(found, 3)
    assert runner.order[0] == FIRST


def test_a_question_is_admitted_before_prompts_that_wait_but_not_for_ever(runner: OrderedRunner) -> None:
    found = scheduler_of(runner, 0.5)
    found._most_running = 1
    question(found, 0)
    for number in range(2):
        long_prompt(found, f"long {number}")
    found.step()
    question(found, 1)
    steps_until(found, lambda: len(found.requests) <= 2)
    assert all(isinstance(job.state, Waiting) for job in found.requests), "both questions were answered before"
    found._prompts.urgent.took(100.0, urgent=True)
    question(found, 2)
    found.step()
    assert [job.work.id for job in found.requests if not isinstance(job.state, Waiting)] == ["long 0"]


def test_where_questions_came_chunks_are_smaller_for_a_while(runner: OrderedRunner) -> None:
    found = scheduler_of(runner, 0.5)
    question(found, 1)
    steps_until(found, lambda: not found.busy)
    longest = []
    for number in range(2):
        runner.chunks.clear()
        ask(found, f"long {number}", range(10 + number, LONG), max_tokens=10**5)
        steps(found, 20)
        longest.append(max(runner.chunks))
        found.cancel(f"long {number}")
        found.step()
        runner.now += 3600
    assert longest[0] < 1.1 < 1.5 < longest[1]
