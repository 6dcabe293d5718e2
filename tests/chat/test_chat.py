"""The stream of one request, and of several answers as one where the model searches among deferred tools, on fakes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from start_llm.chat.search import MOST_ANSWERS, MOST_PATTERN, InvalidSearch, SearchingStream, find
from start_llm.chat.stream import ChatStream
from start_llm.chat.work import RequestWork
from start_llm.core import events as ev
from start_llm.core.errors import QueueFull
from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.core.prompt import Prompt
from start_llm.core.report import CacheReport, Miss
from start_llm.core.request import ChatRequest, ToolSearch
from start_llm.parsing.choice import ChoiceParser, Ending
from start_llm.parsing.registry import output_style
from start_llm.parsing.stream import OutputParser
from start_llm.prompt.tree import Rendering
from tests.api.fakes import FakeStream, hold
from tests.prompt.client import Client, pipeline, say

TOOLS = (Tool("get", "", {"type": "object"}), Tool("put", "", {"type": "object"}))
CALL = '<tool_call>\n{"name": "%s", "arguments": {"x": "a"}}\n</tool_call>'


def begun(parallel: bool = True, poll: float = 60.0, stop: tuple[str, ...] = ()) -> tuple[ChatStream, Any, Any]:
    """A request that was submitted, the engine, and its only choice."""
    request = ChatRequest("r", "chat", "m", tools=TOOLS, parallel_tool_calls=parallel)
    cancelled: list[str] = []
    status = SimpleNamespace(state="busy", detail="")
    engine = SimpleNamespace(cancelled=cancelled, cancel=cancelled.append, status=lambda: status)
    service = Mock()
    letters = SimpleNamespace(feed=chr, finish=str)  # a token is a letter's code point
    style = output_style(tool_parser="hermes_json", reasoning_parser="think_tag")
    model = SimpleNamespace(pipeline=service, recorder=service, style=style, detokenizer=lambda: None)
    prepared = SimpleNamespace(request=request, prompt=Prompt((1, 2)), session=None, rendering=Rendering("", 0))
    work = RequestWork(request, model, prepared, None, 100)  # type: ignore[arg-type]
    stream = ChatStream(engine, service, work, poll)  # type: ignore[arg-type]
    parser = OutputParser(style, tools=TOOLS, stop=stop)
    choice = ChoiceParser(0, parser, letters, "r#0", single_call=not parallel)  # type: ignore[arg-type]
    stream._choices = [choice]
    return stream, engine, choice


def stream_of(
    text: str, *, parallel: bool, end: str = "stop", poll: float = 60.0, stop: tuple[str, ...] = ()
) -> tuple[list[ev.Event], Any, Any]:
    """All events of an answer, the engine, and the choice."""
    stream, engine, choice = begun(parallel, poll, stop)
    for letter in text:
        stream._queue.put((choice, "r#0", ev.Sampled(ord(letter))))
    done = ev.EngineDone(end, tuple(map(ord, text)), CacheReport())  # type: ignore[arg-type]
    stream._queue.put((choice, "r#0", done))
    return list(stream), engine, choice


def calls(events: list[ev.Event]) -> list[str]:
    return [event.name for event in events if isinstance(event, ev.ToolCallFinished)]


@pytest.mark.parametrize(
    ("parallel", "names", "told"),
    [
        (True, ["get", "put"], ["get", "put"]),
        (True, ["get", "get"], ["get", "get"]),
        (False, ["get"], ["get"]),
        (False, ["get", "get"], ["get"]),
    ],
)
def test_several_calls_come_where_they_are_allowed(parallel: bool, names: list[str], told: list[str]) -> None:
    """Equal ones, too. The tokens of what the client is not told are not kept."""
    text = "\n".join(CALL % name for name in names)
    events, engine, choice = stream_of(text, parallel=parallel)
    assert calls(events) == told
    assert (choice.tokens, engine.cancelled) == ((tuple(map(ord, text)), []) if told == names else ((), ["r#0"]))


def test_without_parallel_calls_a_second_one_ends_the_answer() -> None:
    text = "Now. " + CALL % "get" + "\n" + CALL % "put" + "more"
    events, engine, choice = stream_of(text, parallel=False, end="cancelled")
    assert calls(events) == ["get"]
    assert "".join(event.text for event in events if isinstance(event, ev.TextDelta)) == "Now."
    assert engine.cancelled == ["r#0"] and choice.tokens == ()
    assert [call.name for call in choice.message().tool_calls] == ["get"], "remembered is what the client was told"
    assert [event.finish_reason for event in events if isinstance(event, ev.ChoiceDone)] == ["tool_calls"]
    assert isinstance(events[-1], ev.Done)


def test_a_second_call_that_shows_only_at_the_end_of_the_text_is_cut_as_well() -> None:
    """The client is not told of it: its tokens must not stand in the next prompt."""
    first = '<tool_call>{"name": "get", "arguments": {"n": 1}}</tool_call>'
    events, _, choice = stream_of(first + "\n" + first[: first.index("1}") + 1] + "2", parallel=False)
    assert calls(events) == ["get"] and [call.arguments for call in choice.message().tool_calls] == ['{"n": 1}']
    assert choice.tokens == ()


def test_tokens_of_what_the_client_was_not_told_are_not_kept() -> None:
    events, engine, choice = stream_of("Now." + CALL % "get" + "\nIt says hello.", parallel=True)
    assert calls(events) == ["get"] and choice.tokens == () and engine.cancelled == []
    assert "".join(event.text for event in events if isinstance(event, ev.TextDelta)) == "Now."
    assert [event.finish_reason for event in events if isinstance(event, ev.ChoiceDone)] == ["tool_calls"]


def test_an_answer_ends_where_the_model_plays_the_user() -> None:
    text = "Hello.<|im_end|>\n<|im_start|>user\nAnd you?"
    events, engine, choice = stream_of(text, parallel=True, end="cancelled")
    assert "".join(event.text for event in events if isinstance(event, ev.TextDelta)) == "Hello."
    assert set(engine.cancelled) == {"r#0"} and choice.tokens == ()
    assert [(e.finish_reason, e.stop_sequence) for e in events if isinstance(e, ev.ChoiceDone)] == [("stop", None)]


def test_tokens_that_show_nothing_yet_are_covered_by_signs_of_life() -> None:
    events, _, _ = stream_of("<tool_ca", parallel=True, poll=0.0)
    assert (
        sum(isinstance(event, ev.Progress) for event in events) >= len("<tool_ca") - 1
    )  # the first token is one itself
    events, _, _ = stream_of("<tool_ca", parallel=True)
    assert not any(isinstance(event, ev.Progress) for event in events)


def test_an_answer_that_the_watchdog_cuts_says_so() -> None:
    events, _, choice = stream_of("Some words", parallel=True, end="deadline")
    assert [event.finish_reason for event in events if isinstance(event, ev.ChoiceDone)] == ["length"]
    assert choice.ending is Ending.WATCHDOG
    done = events[-1]
    assert isinstance(done, ev.Done) and done.report.cut == "watchdog" and done.report.as_dict()["cut"] == "watchdog"


@pytest.mark.parametrize("text", ["", "<think>\nLet me see", "<tool_call>\n"])
def test_an_answer_that_is_cut_before_there_is_anything_is_an_error(text: str) -> None:
    events, _, _ = stream_of(text, parallel=True, end="deadline")
    failed = events[-1]
    assert isinstance(failed, ev.Failed) and failed.error.status == 504 and failed.error.code == "watchdog"
    assert not any(isinstance(event, ev.ChoiceDone | ev.Done) for event in events)


def test_a_call_that_is_cut_has_been_seen() -> None:
    begun = CALL[: CALL.index("{") + len('{"name": "get", "arguments": {"x": "a')].replace("%s", "get")
    events, _, _ = stream_of(begun, parallel=True, end="deadline")
    assert any(isinstance(event, ev.ToolCallStarted) for event in events)
    assert isinstance(events[-1], ev.Done) and events[-1].report.cut == "watchdog"


@pytest.mark.parametrize("leaves", [False, True])
def test_drafts_of_a_work_that_was_given_up_count_even_if_the_client_leaves(leaves: bool) -> None:
    stream, _, choice = begun()
    stream._answering, choice.work_id = True, "r#0+"
    for work in ("r#0", "r#0+"):
        stream._queue.put(
            (choice, work, ev.EngineDone("cancelled", (), CacheReport(forwards=3, drafted=5, accepted=2)))
        )
    if not leaves:
        list(stream)
    report = stream.last_report(5.0)
    assert (report.forwards, report.drafted, report.accepted) == (6, 10, 4)


def test_max_tokens_may_cut_an_answer_to_nothing() -> None:
    events, _, _ = stream_of("<think>\nLet me see", parallel=True, end="length")
    assert [event.finish_reason for event in events if isinstance(event, ev.ChoiceDone)] == ["length"]
    assert isinstance(events[-1], ev.Done) and "cut" not in events[-1].report.as_dict()


def test_a_stop_string_that_shows_at_the_end_of_the_text_keeps_no_tokens() -> None:
    events, _, choice = stream_of("One. STOP", parallel=True, stop=("STOP",))
    assert choice.ending is Ending.STOP_STRING and choice.tokens == ()
    assert [(e.finish_reason, e.stop_sequence) for e in events if isinstance(e, ev.ChoiceDone)] == [("stop", "STOP")]


def test_a_miss_where_the_turn_was_served_before_is_a_lost_state() -> None:
    """The record of a turn outlives its KV, over a restart for one; nothing has diverged there."""
    client = Client("chatml", pipeline("chatml"))
    client.ask(Message("user", "Go"))
    spoken = len(client.answer(say("I look.", bash={"command": "ls"})))
    prepared = client.ask(Message("user", "More " + "words " * 100))

    def reason(token: int, given: str) -> str:
        length = len(prepared.prompt.tokens)
        report = CacheReport(prompt=length, computed=length, new=0, miss=Miss(given, token))
        miss = client.pipe.explain(report, replace(prepared, new=0)).miss
        assert miss is not None and miss.token == token
        return miss.reason

    assert prepared.rendering.taken == spoken
    assert reason(6, "diverged") == reason(0, "first_turn") == "evicted"
    assert reason(spoken, "diverged") == "diverged"
    assert reason(6, "no_checkpoint") == "no_checkpoint"


def test_what_only_the_prompt_side_knows_of_a_miss_is_told() -> None:
    """The place and what to send; a state that is gone is told first."""
    client = Client("chatml", pipeline("chatml"))
    client.ask(Message("system", "You help.\nCustomer: Alicia"), Message("user", "Go"))
    client.answer(say("A long answer. " * 40, None))
    client.messages[0] = Message("system", "You help.\nCustomer: Robert")
    prepared = client.ask(Message("user", "More"))
    length = len(prepared.prompt.tokens)

    def miss(given: str, computed: int) -> Miss | None:
        report = CacheReport(prompt=length, computed=computed, miss=Miss(given, 7))
        return client.pipe.explain(report, prepared).miss

    told = miss("no_checkpoint", length)
    assert told is not None and (told.reason, told.token, told.field) == ("unproved", 7, "system")
    assert told.remedy == "send session_id in all turns" and told.found
    lost = miss("evicted", length)
    assert lost is not None and lost.reason == "evicted"
    assert miss("diverged", prepared.new) is None


def schema(**about: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": what} for name, what in about.items()},
    }


DEFERRED = (
    Tool("words"),
    Tool("pattern"),
    Tool("git__listOpenIssues", "Lists what is open in a repository.", schema(label="of the issues")),
    Tool("git__create_pull_request", "Opens a pull request of the branch.", schema(title="its title")),
    Tool("weather", "Forecasts of the weather.", schema(city="where", days="how many days ahead")),
    Tool("mail__send", "Sends a letter of the user's.", {"properties": 5}),
)
SEARCH = ToolSearch({"words": "query", "pattern": "pattern"}, DEFERRED)


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
    many = (*(Tool(f"tool_{n}", "word " * 20_000) for n in range(200)), DEFERRED[4])
    call = ToolCall("c", "words", json.dumps({"query": "weather forecasts"}))
    began = time.process_time()
    assert find(ToolSearch({"words": "query"}, many), frozenset(), call) == ("weather",)
    assert time.process_time() - began < 20


# --- several answers as one ---

REQUEST = ChatRequest("r", "messages", "m", (Message("user", "Go."),), DEFERRED[:2], search=SEARCH, max_tokens=100)


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
