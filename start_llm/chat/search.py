"""Tools that the model finds by a search: what it searches is answered here, within its request.

    answer that calls the search ──► what was found, as its result ──► the next answer, which knows the found tools

Each answer is a generation of its own, so its KV and its turn are kept as of any other; to the client all are one.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from contextlib import closing
from dataclasses import astuple, replace

import re2

from start_llm.core import events as ev
from start_llm.core.errors import StartLLMError
from start_llm.core.jsontext import object_in
from start_llm.core.messages import Message, Tool, ToolCall
from start_llm.core.report import CacheReport
from start_llm.core.request import ChatRequest, ToolSearch, found_text
from start_llm.core.service import EventStream

MOST_FOUND, MOST_ANSWERS = 5, 10
"""Tools that one search brings unless it says more; answers that one request may be made of."""
MOST_PATTERN, SECONDS, MOST_ABOUT = 200, 1.0, 4_000
"""Characters of a regular expression, and how long it may take over all tools; what is looked at of a description."""
NAME_WEIGHT, WEAK = 4.0, 0.2
"""How much more a word in a tool's name counts than one in its description. Tools that have less than this part of the
best one's score share words with it that all have."""


class InvalidSearch(Exception):
    """A call of the search that says nothing to search for; its words are for the model."""


def find(search: ToolSearch, known: Set[str], call: ToolCall) -> tuple[str, ...]:
    """Names of the tools that fit best, of those that are not known yet. Raises InvalidSearch."""
    field, given = search.fields[call.name], object_in(call.arguments)
    wanted, limit = given.get(field), given.get("limit")
    if not isinstance(wanted, str) or not wanted.strip():
        raise InvalidSearch(f"`{field}` must be a string that is not empty.")
    most = min(limit, 2 * MOST_FOUND) if type(limit) is int and limit > 0 else MOST_FOUND
    hidden = [tool for tool in search.tools if tool.name not in known]
    ranked = _by_words(wanted, hidden) if field == "query" else _by_pattern(wanted, hidden)
    return tuple(tool.name for tool in ranked[:most])


def _about(tool: Tool) -> str:
    """The description, and names and descriptions of the arguments."""
    properties = tool.parameters.get("properties")
    about = [tool.description]
    for name, schema in properties.items() if isinstance(properties, dict) else ():
        said = schema.get("description") if isinstance(schema, dict) else None
        about += [name, said if isinstance(said, str) else ""]
    return "\n".join(about)[:MOST_ABOUT]


def _words(text: str) -> str:
    """With words apart that a name joins (`listOpenIssues`), and without what no encoding has."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text.encode(errors="replace").decode())


def _by_words(query: str, tools: list[Tool]) -> list[Tool]:
    """By SQLite's BM25, the best first."""
    words = re.findall(r"\w+", _words(query))
    with closing(sqlite3.connect(":memory:")) as base:
        base.execute("CREATE VIRTUAL TABLE tools USING fts5(name, about, tokenize = 'porter unicode61')")
        rows = ((n, _words(tool.name), _words(_about(tool))) for n, tool in enumerate(tools))
        base.executemany("INSERT INTO tools(rowid, name, about) VALUES (?, ?, ?)", rows)
        any_word = " OR ".join(f'"{word}"' for word in words[:MOST_PATTERN])
        scored = f"SELECT rowid, -bm25(tools, {NAME_WEIGHT}, 1.0) FROM tools WHERE tools MATCH ? ORDER BY 2 DESC, 1"
        found = base.execute(scored, (any_word or '""',)).fetchall()
    return [tools[row] for row, score in found if score >= found[0][1] * WEAK]


def _by_pattern(pattern: str, tools: list[Tool]) -> list[Tool]:
    """Those whose name the pattern finds, then those whose description it does. RE2 takes no more time than text."""
    if len(pattern) > MOST_PATTERN:
        raise InvalidSearch(f"`pattern` may have {MOST_PATTERN} characters.")
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    options.case_sensitive = False
    try:
        compiled = re2.compile(pattern, options=options)
    except re2.error:
        raise InvalidSearch("`pattern` is no regular expression that this server knows.") from None
    named: list[Tool] = []
    described: list[Tool] = []
    until = time.monotonic() + SECONDS
    for tool in tools:
        if time.monotonic() > until:
            raise InvalidSearch("`pattern` takes too long.")
        if compiled.search(tool.name):
            named.append(tool)
        elif compiled.search(_about(tool).encode(errors="replace").decode()):
            described.append(tool)
    return named + described


class SearchingStream(EventStream):
    """Implements `core.service.EventStream`: the answers of one request that may search, as one answer.

    Iterated by one thread; `close` may come from another.
    """

    def __init__(
        self,
        begin: Callable[[ChatRequest], EventStream],
        request: ChatRequest,
        search: ToolSearch,
        remember: Callable[[str, CacheReport], None],
    ) -> None:
        """`begin` as `Service.chat`; raises what it raises. `remember`: is told what all answers cost together."""
        self._begin = begin
        self._request = request
        self._search = search
        self._remember = remember
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._stream = begin(request)
        # on the answers so far, and whether the one that ran last is among them
        self._spent: CacheReport | None = None
        self._is_counted = False
        self._events = self._run()

    def __next__(self) -> ev.Event:
        return next(self._events)

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._stream.close()

    def last_report(self, patience: float) -> CacheReport | None:
        last = None if self._is_counted else self._stream.last_report(patience)
        return self._spent if last is None else self._all(last)

    def _all(self, report: CacheReport) -> CacheReport:
        report = report if self._spent is None else self._spent.plus(report)
        self._remember(self._request.id, report)
        return report

    def _answer(self) -> Generator[ev.Event, None, tuple[list[ev.Event], ev.ChoiceDone, ev.Done | None]]:
        """Passes one answer of the model on. Returns what it said, and how it ended; ``None``: it has no end."""
        said, end, done = list[ev.Event](), ev.ChoiceDone("stop"), None
        for event in self._stream:
            if isinstance(event, ev.Done):
                done = event
            elif isinstance(event, ev.ChoiceDone):
                end = event
            elif self._spent is None or not isinstance(event, ev.Started | ev.FirstToken):
                said.append(event)
                yield event
        return said, end, done

    def _run(self) -> Iterator[ev.Event]:
        usage = ev.Usage(0, 0, 0)
        for left in reversed(range(MOST_ANSWERS)):
            said, end, done = yield from self._answer()
            if done is None:
                return
            usage = ev.Usage(*map(sum, zip(astuple(usage), astuple(done.usage), strict=True)))
            self._spent, self._is_counted = self._all(done.report), True
            calls = [ToolCall(e.id, e.name, e.arguments) for e in said if isinstance(e, ev.ToolCallFinished)]
            searches = [call for call in calls if call.name in self._search.fields]
            if searches:
                searched = self._answered(searches)
                yield searched
                self._request = self._behind(said, calls, searched, done.usage.completion)
            if not searches or len(searches) < len(calls) or end.finish_reason != "tool_calls":
                yield end
                break
            if not left or self._request.max_tokens == 0:
                yield replace(end, finish_reason="length")
                break
            try:
                self._go_on()
            except StartLLMError as error:
                yield ev.Failed(error)
                return
        yield ev.Done(usage, self._spent or CacheReport())

    def _answered(self, calls: Sequence[ToolCall]) -> ev.Searched:
        known = {tool.name for tool in self._request.tools}
        results = []
        for call in calls:
            names, problem = tuple[str, ...](), ""
            try:
                names = find(self._search, known, call)
            except InvalidSearch as error:
                problem = str(error)
            results.append((call.id, names, problem))
        return ev.Searched(tuple(results))

    def _behind(
        self, said: Sequence[ev.Event], calls: Sequence[ToolCall], searched: ev.Searched, tokens: int
    ) -> ChatRequest:
        """The request as it goes on: as a client would send it that had searched by itself."""
        request = self._request
        text = "".join(event.text for event in said if isinstance(event, ev.TextDelta))
        thoughts = "".join(event.text for event in said if isinstance(event, ev.ReasoningDelta))
        answer = Message("assistant", request.begun + text, reasoning=thoughts or None, tool_calls=tuple(calls))
        results = (Message("tool", found_text(names, why), tool_call_id=id) for id, names, why in searched.results)
        found = {name for _, names, _ in searched.results for name in names}
        known = found | {tool.name for tool in request.tools}
        return replace(
            request,
            messages=(*request.messages, answer, *results),
            begun="",
            tools=tuple(tool for tool in self._search.tools if tool.name in known),
            max_tokens=None if request.max_tokens is None else max(0, request.max_tokens - tokens),
        )

    def _go_on(self) -> None:
        """Raises StartLLMError."""
        stream = self._begin(self._request)
        with self._lock:
            self._stream.close()
            self._stream, self._is_counted = stream, False
            if self._closed.is_set():
                stream.close()
