"""Searches among deferred tools: what they find, and several answers as those of one request."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from start_llm.chat.search import MOST_ANSWERS, MOST_PATTERN, InvalidSearch, SearchingStream, find
from start_llm.core import events as ev
from start_llm.core.errors import QueueFull
from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest, ToolSearch
from tests.api.fakes import FakeStream, hold


def schema(**about: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": what} for name, what in about.items()},
    }


TOOLS = (
    Tool("words"),
    Tool("pattern"),
    Tool("git__listOpenIssues", "Lists what is open in a repository.", schema(label="of the issues")),
    Tool("git__create_pull_request", "Opens a pull request of the branch.", schema(title="its title")),
    Tool("weather", "Forecasts of the weather.", schema(city="where", days="how many days ahead")),
    Tool("mail__send", "Sends a letter of the user's.", {"properties": 5}),
)
SEARCH = ToolSearch({"words": "query", "pattern": "pattern"}, TOOLS)


def found(name: str, wanted: Any, known: frozenset[str] = frozenset({"words", "pattern"}), **more: Any) -> list[str]:
    return [*find(SEARCH, known, ToolCall("c", name, json.dumps({SEARCH.fields[name]: wanted} | more)))]


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("open issues", "git__listOpenIssues"),
        ("forecasting", "weather"),
        ("the title of pull requests", "git__create_pull_request"),
        ("days", "weather"),
        ('mail "send" OR NEAR(', "mail__send"),
    ],
)
def test_words_find_what_fits_best(query: str, best: str) -> None:
    assert found("words", query)[0] == best


def test_patterns_find_by_name_first() -> None:
    assert found("pattern", "^GIT__") == ["git__listOpenIssues", "git__create_pull_request"]
    assert found("pattern", "weather|letter") == ["weather", "mail__send"]
    assert found("pattern", ".", limit=1) == ["git__listOpenIssues"]
    assert found("pattern", "weather", frozenset({"weather"})) == [], "it is known"
    assert found("words", "nothing like that") == found("words", "!?") == found("pattern", "\ud800") == []


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("words", "no JSON"), ("words", "[]"), ("words", '{"query": 5}'), ("words", '{"query": " "}'),
        ("pattern", '{"query": "x"}'), ("pattern", '{"pattern": "("}'),
        ("pattern", '{"pattern": "((a{1000}){1000}){1000}"}'),
        ("pattern", json.dumps({"pattern": "a" * (MOST_PATTERN + 1)})),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_is_told(name: str, arguments: str) -> None:
    with pytest.raises(InvalidSearch):
        find(SEARCH, frozenset(), ToolCall("c", name, arguments))


def test_a_pattern_that_backtracks_costs_nothing() -> None:
    many = tuple(Tool(f"t{n}", "a" * 3_000 + "!") for n in range(50))
    call = ToolCall("c", "pattern", json.dumps({"pattern": "(a+)+$"}))
    assert find(ToolSearch({"pattern": "pattern"}, many), frozenset(), call) == ()


def test_a_search_among_megabytes_is_quick() -> None:
    many = (*(Tool(f"tool_{n}", "word " * 20_000) for n in range(200)), TOOLS[4])
    call = ToolCall("c", "words", json.dumps({"query": "weather forecasts"}))
    began = time.process_time()
    assert find(ToolSearch({"words": "query"}, many), frozenset(), call) == ("weather",)
    assert time.process_time() - began < 20


# --- several answers as one ---

REQUEST = ChatRequest("r", "messages", "m", (Message("user", "Go."),), TOOLS[:2], search=SEARCH, max_tokens=100)


def says(text: str, *calls: tuple[str, str], finish: str = "stop") -> list[ev.Event]:
    report = CacheReport(prompt=50, reused=40, computed=10, new=10, generated=7)
    finish = "tool_calls" if calls else finish
    made = [ev.ToolCallFinished(n, f"{text}{n}", name, given) for n, (name, given) in enumerate(calls)]
    done = ev.Done(ev.Usage(50, 7, 40), report)
    return [ev.Started(report), ev.FirstToken(), ev.TextDelta(text), *made, ev.ChoiceDone(finish), done]  # type: ignore[arg-type]


ASKS = ("words", '{"query": "weather"}')


class Model:
    """Plays one script after the other; a last one again and again."""

    def __init__(self, *scripts: Any) -> None:
        self.scripts, self.requests, self.streams = list(scripts), list[ChatRequest](), list[FakeStream]()
        self.told: dict[str, CacheReport] = {}
        self.before: Callable[[], None] = lambda: None

    def begin(self, request: ChatRequest) -> FakeStream:
        self.before()
        self.requests.append(request)
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if isinstance(script, Exception):
            raise script
        self.streams.append(FakeStream(script))
        return self.streams[-1]

    def stream(self) -> SearchingStream:
        return SearchingStream(self.begin, REQUEST, SEARCH, self.told.__setitem__)


def of(kind: type, events: list[ev.Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_what_was_found_is_known_to_the_next_answer() -> None:
    model = Model(says("I look.", ASKS), says("Sunny."))
    events = list(model.stream())
    assert [event.results for event in of(ev.Searched, events)] == [(("I look.0", ("weather",), ""),)]
    assert len(of(ev.Started, events)) == len(of(ev.FirstToken, events)) == len(of(ev.ChoiceDone, events)) == 1
    second = model.requests[1]
    assert [tool.name for tool in second.tools] == ["words", "pattern", "weather"] and second.max_tokens == 93
    assert second.messages[1:] == (
        Message("assistant", "I look.", tool_calls=(ToolCall("I look.0", *ASKS),)),
        Message("tool", "Tools now available: weather", tool_call_id="I look.0"),
    )
    assert events[-1].usage == ev.Usage(100, 14, 80) and events[-1].report == model.told["r"]  # type: ignore[union-attr]
    assert model.told["r"].computed == 20


def test_calls_of_the_client_s_tools_end_the_answer() -> None:
    model = Model(says("Both.", ASKS, ("weather", "{}")))
    events = list(model.stream())
    assert len(model.requests) == 1 and of(ev.ChoiceDone, events)[0].finish_reason == "tool_calls"
    assert of(ev.Searched, events)[0].results[0][1] == ("weather",), "what was searched is answered even so"


def test_a_model_that_searches_without_end_is_ended() -> None:
    events = list((model := Model(says("Again.", ASKS))).stream())
    assert len(model.requests) == MOST_ANSWERS and of(ev.ChoiceDone, events)[0].finish_reason == "length"
    model = Model(says("x", ASKS))
    stream = SearchingStream(
        model.begin, ChatRequest("r", "messages", "m", max_tokens=7), SEARCH, model.told.__setitem__
    )
    assert of(ev.ChoiceDone, list(stream))[0].finish_reason == "length" and len(model.requests) == 1


def test_a_cut_answer_ends_there() -> None:
    cut = says("I", ("words", '{"que'))
    cut[-2] = ev.ChoiceDone("length")
    model = Model(cut)
    events = list(model.stream())
    assert len(model.requests) == 1 and of(ev.Searched, events)[0].results[0][2].startswith("`query`")


def test_an_answer_that_is_refused_fails_the_request_and_its_cost_is_told() -> None:
    stream = (model := Model(says("I look.", ASKS), QueueFull("full"))).stream()
    assert isinstance(list(stream)[-1], ev.Failed)
    stream.close()
    report = stream.last_report(0.0)
    assert report is not None and report.computed == model.told["r"].computed == 10, "counted once"


def test_closing_ends_the_answer_that_runs() -> None:
    model = Model([*says("x")[:2], hold, ev.TextDelta("never")])
    stream = model.stream()
    next(stream)
    stream.close()
    assert list(stream) == [] and model.streams[0].closed.is_set()
    assert (report := stream.last_report(0.0)) is not None and report.computed == 10


def test_an_answer_that_begins_while_it_is_closed_is_closed() -> None:
    model = Model(says("I look.", ASKS), [hold])
    stream = model.stream()
    for event in stream:
        if isinstance(event, ev.Searched):
            model.before = stream.close
            break
    assert list(stream) == [] and [each.closed.is_set() for each in model.streams] == [True, True]
