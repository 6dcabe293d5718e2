"""A long conversation is asked for a summary, by another role, or in one message: what is computed, seen and called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.asking import CALL, user
from tests.integration.live import TOOLS, Live
from tests.model_thread import on_model_thread
from tests.oracle.oracle import script
from tests.unique import unique

Json = dict[str, Any]
RULES = " ".join(f"Rule {n} of the house." for n in range(60))
POINTS = " ".join(f"Say what is known of point {n}." for n in range(60))
SUMMARISER = "You write summaries. Begin with the word RAPPORT."
NO_CALLS = "No tool can be called now: answer with text."
SLOW = [pytest.mark.thorough, pytest.mark.slow]
LENGTHS = [16_000, pytest.param(64_000, marks=pytest.mark.thorough), pytest.param(175_000, marks=SLOW)]  # of 196,608


@dataclass
class Talk:
    """A conversation with one call of a tool, whose result makes it `length` tokens long."""

    server: Live
    messages: list[Json]
    tools: list[Json]

    @classmethod
    def held(cls, server: Live, length: int) -> Talk:
        name = unique()
        system = {"role": "system", "content": f"You are the agent {name}.\n{RULES}"}
        talk = cls(server, [system, {"role": "user", "content": f"Go. {script(CALL, f'Read {name}.')}"}], TOOLS)
        (call,) = talk.turn()["message"]["tool_calls"]
        text = " ".join(f"{number} {name[:6]}" for number in range(length // 4))
        part = server.chat([{"role": "user", "content": text[:4000]}], max_tokens=1)["report"]["prompt"]
        text = text[: 4000 * length // part]
        talk.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        talk.turn()
        return talk

    def turn(self, *new: Json) -> Json:
        self.messages += new
        answer = self.ask(self.messages, self.tools)
        self.messages.append({name: value for name, value in answer["message"].items() if value})
        return answer

    def ask(self, messages: list[Json], tools: list[Json], **more: Any) -> Json:
        """The answer, with what its prompt really cost under ``computed``, and what was foretold under ``told``."""
        body = {**({"tools": tools} if tools else {}), **more}
        told = self.server.post("/v1/cache/explain", json={"model": "default", "messages": messages, **body}).json()
        before = self.server.passes()
        answer = self.server.chat(messages, **body)
        computed = self.server.prompt_work(answer["report"]["prompt"], before)
        return {**answer, "computed": computed, "told": told}

    def shown(self, answer: Json) -> str:
        tokens = list(self.server.prompt_of(answer))
        return str(on_model_thread(self.server.app, lambda _, wrapper: wrapper.decode(tokens)))


@pytest.fixture(params=["plain", pytest.param("hybrid", marks=pytest.mark.thorough)])
def server(request: pytest.FixtureRequest, servers: Callable[..., Live]) -> Live:
    return servers(request.param)


def asked(talk: Talk, form: str) -> tuple[list[Json], list[Json]]:
    """The messages and tools of a request for a summary."""
    system, *history = talk.messages
    ask = user(f"Summarize. {POINTS} {script(CALL)}")
    other = {"role": "system", "content": SUMMARISER}
    return {
        "as the conversation": ([system, *history, ask], talk.tools),
        "no tools": ([system, *history, ask], []),
        "some tools": ([system, *history, ask], talk.tools[:1]),
        "another system text": ([other, *history, ask], talk.tools),
        "another system text, no tools": ([other, *history, ask], []),
        "no system text, no tools": ([*history, ask], []),
    }[form]


FORMS = ("no tools", "another system text", "another system text, no tools", "some tools", "no system text, no tools")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.timeout(1200)
def test_a_summary_costs_what_is_new_and_the_conversation_goes_on(server: Live, length: int) -> None:
    talk, is_hybrid = Talk.held(server, length), str(server.app.settings.model_path).endswith("hybrid")
    for form in ("as the conversation", *FORMS):
        messages, tools = asked(talk, form)
        answer = talk.ask(messages, tools)
        report, shown = answer["report"], talk.shown(answer)
        assert answer["computed"] <= 1.05 * report["new"] + 16, (
            form,
            answer["computed"],
            report.get("miss"),
            answer["told"],
        )
        assert report["new"] < 1200 and (is_hybrid or "miss" not in report), (form, report)
        # All of it was known beforehand.
        assert {name: answer["told"][name] for name in ("prompt", "new")} == {
            name: report[name] for name in ("prompt", "new")
        }
        assert abs(answer["told"]["computed"] - answer["computed"]) <= 1, form
        # The model sees all that was sent, what holds now last.
        places = [shown.rfind(message["content"]) for message in messages if message.get("content")]
        assert min(places) >= 0
        end = shown[places[-2] :]
        if messages[0]["content"] == SUMMARISER:
            assert end.index("no longer holds") < end.index(SUMMARISER) < end.index("Summarize.")
        if not tools:
            # It would call a tool now: nothing that is no call begins so.
            assert NO_CALLS in end and not answer["message"].get("tool_calls")
            assert "<tool_call>" not in str(answer["message"].get("content"))
    later = talk.turn(user("And now?"))
    assert later["computed"] <= 1.05 * later["report"]["new"] + 32, (later["computed"], later["report"])
    assert SUMMARISER not in talk.shown(later) and NO_CALLS not in talk.shown(later)
    summed_up = [talk.messages[0], user("Another one began this. Its summary: it went well."), *talk.messages[-2:]]
    behind = talk.ask([*summed_up, user("Go on.")], talk.tools)
    assert behind["computed"] <= 1.05 * behind["report"]["new"] + 32, (behind["computed"], behind["report"])


def test_a_grammar_of_calls_has_no_tool_that_a_note_took_back(server: Live) -> None:
    talk = Talk.held(server, 2000)
    left = [tool for tool in TOOLS if tool["function"]["name"] != "read"]
    ask = user(f"Go on. {script(CALL)}")
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in left]
    for tools, more in ((left, {"tool_choice": "required"}), (strict, {})):
        answer = talk.ask([*talk.messages, ask], tools, max_tokens=40, **more)  # the name is in it
        assert "do not call: read" in talk.shown(answer)
        called = [call["function"]["name"] for call in answer["message"]["tool_calls"]]
        assert called and "read" not in called
