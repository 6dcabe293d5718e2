"""The scenarios. Each is a short conversation that does what some real client does.

A scenario gets a `Bench`: something that asks and keeps the books, and a seed that makes its texts unlike all others'.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from scripts.bench.agent import Agent, Asker, Drift, NoDrift, Step, Style
from scripts.bench.drifts import Billing, Clock, Customer, MessageId, Reminder
from scripts.bench.texts import Writer

Json = dict[str, Any]


class Skipped(Exception):
    """The scenario cannot run here; says why."""


class Bench(Asker, Protocol):
    seed: str

    def restart(self) -> None:
        """Stops the server hard and starts it again. Raises Skipped where that cannot be done."""
        ...


Scenario = Callable[[Bench], None]


def _agent(bench: Bench, writer: Writer, style: Style | None = None, drift: Drift | None = None) -> Agent:
    drift = drift or NoDrift()
    # A client's habit is known as that client's by its system text.
    system = f"{drift.shows}\n{writer.system()}" if drift.shows else writer.system()
    return Agent(bench, system, writer.tools(), style or Style(), drift)


def _conversation(
    bench: Bench, turns: int, calls: int, reasoning: bool, style: Style | None = None, drift: Drift | None = None
) -> None:
    writer = Writer(bench.seed)
    agent = _agent(bench, writer, style, drift)
    for _ in range(turns):
        agent.turn(writer.task(), writer.steps(calls, reasoning))


def append(bench: Bench) -> None:
    _conversation(bench, turns=6, calls=0, reasoning=False)


def reasoning_stripped(bench: Bench) -> None:
    _conversation(bench, turns=6, calls=1, reasoning=True, style=Style(reasoning="strip"))


def reasoning_echoed(bench: Bench) -> None:
    _conversation(bench, turns=6, calls=1, reasoning=True, style=Style(reasoning="echo"))


def reasoning_doubled(bench: Bench) -> None:
    _conversation(bench, turns=6, calls=1, reasoning=True, style=Style(reasoning="doubled"))


def tools_compact(bench: Bench) -> None:
    _conversation(bench, turns=3, calls=4, reasoning=True, style=Style("strip", "compact"))


def tools_sorted(bench: Bench) -> None:
    _conversation(bench, turns=3, calls=4, reasoning=False, style=Style("echo", "sorted"))


def tools_object(bench: Bench) -> None:
    _conversation(bench, turns=3, calls=4, reasoning=True, style=Style("echo", "object"))


def clock(bench: Bench) -> None:
    _conversation(bench, turns=6, calls=1, reasoning=False, drift=Clock())


def _plain_chat(bench: Bench, drift: Drift) -> None:
    """Neither tools nor a name of the conversation."""
    writer = Writer(bench.seed)
    agent = Agent(bench, writer.system(), [], drift=drift)
    for _ in range(6):
        agent.turn(writer.task(), writer.steps(answer_lines=6))


def clock_chat(bench: Bench) -> None:
    _plain_chat(bench, Clock())


def customer_chat(bench: Bench) -> None:
    """The name of another customer is nothing that may be told in a note: it is shown as sent, and computed."""
    _plain_chat(bench, Customer())


def billing(bench: Bench) -> None:
    _conversation(bench, turns=6, calls=1, reasoning=False, drift=Billing())


def reminder(bench: Bench) -> None:
    _conversation(bench, turns=6, calls=1, reasoning=False, drift=Reminder())


def message_id(bench: Bench) -> None:
    _conversation(bench, turns=6, calls=1, reasoning=False, drift=MessageId())


def insertion(bench: Bench) -> None:
    """After four turns a client puts a note between the second and the third."""
    writer = Writer(bench.seed)
    agent = _agent(bench, writer)
    for _ in range(4):
        agent.turn(writer.task(), writer.steps())
    agent.messages.insert(5, {"role": "user", "content": f"(A note from the editor: {writer.prose(2)})"})
    for _ in range(2):
        agent.turn(writer.task(), writer.steps())


def edit_and_regenerate(bench: Bench) -> None:
    """An answer is asked for again, then an earlier message is edited and the conversation goes on from there."""
    writer = Writer(bench.seed)
    agent = _agent(bench, writer)
    for _ in range(4):
        steps = writer.steps()
        agent.turn(writer.task(), steps)
    last = agent.messages.pop()
    again = agent.ask(steps[-1])
    agent.messages.append(agent.style.assistant(again) if not again.error else last)
    del agent.messages[5:]
    for _ in range(2):
        agent.turn(writer.task(), writer.steps())


def subagents(bench: Bench) -> None:
    """An orchestrator, twelve sub-agents with its system prompt and tools, the orchestrator again."""
    writer = Writer(bench.seed)
    main = _agent(bench, writer)
    for _ in range(2):
        main.turn(writer.task(), writer.steps(calls=2))
    for _ in range(12):
        Agent(bench, main.system, main.tools).turn(writer.task(), writer.steps(calls=1))
    main.turn(writer.task(), writer.steps(calls=1))


def new_sessions(bench: Bench) -> None:
    """Five sessions in the same repository, one after another."""
    writer = Writer(bench.seed)
    first = _agent(bench, writer)
    for agent in [first, *(Agent(bench, first.system, first.tools) for _ in range(4))]:
        for _ in range(2):
            agent.turn(writer.task(), writer.steps(calls=1))


def side_requests(bench: Bench) -> None:
    """A title and a summary are asked for between the turns."""
    writer = Writer(bench.seed)
    agent = _agent(bench, writer)
    for number in range(4):
        task = writer.task()
        agent.turn(task, writer.steps(calls=1))
        title = Agent(bench, "Write a title of at most six words for this conversation.", [])
        title.turn(f"Title number {number} for: {task}", [Step(f"Work {number}")])
        summary = agent.branch()
        summary.turn(f"Summarise what was done so far, part {number}.", [Step(writer.sentence())])


def _long_talk(bench: Bench) -> tuple[Writer, Agent]:
    writer = Writer(bench.seed)
    agent = _agent(bench, writer)
    for _ in range(4):
        agent.turn(writer.task(), writer.steps(calls=3))
    return writer, agent


def _summed_up(writer: Writer, agent: Agent, asked: Agent) -> None:
    """A summary is asked for, and the conversation goes on from that."""
    summary = writer.prose(12)
    asked.turn(f"Write a summary for whoever goes on with this.\n{writer.prose(6)}", [Step(summary)])
    frame = "Another assistant has begun this work. Its summary:\n"
    later = Agent(agent.asker, agent.system, agent.tools)
    later.messages += [{"role": "user", "content": frame + summary}, *agent.messages[-2:]]
    later.turn(writer.task(), writer.steps(calls=1))


def compaction(bench: Bench) -> None:
    """A summary is asked for without tools (Codex)."""
    writer, agent = _long_talk(bench)
    _summed_up(writer, agent, agent.branch(tools=[]))


def compaction_role(bench: Bench) -> None:
    """A summary is asked for without tools and with a system text of its own (Qwen Code)."""
    writer, agent = _long_talk(bench)
    _summed_up(writer, agent, agent.branch(f"You write summaries.\n{writer.prose(8)}", []))


def plan_and_build(bench: Bench) -> None:
    """The system text and some of the tools change with the mode: plan, build, plan, build."""
    writer, agent = _long_talk(bench)
    build, tools, plan = agent.system, agent.tools, f"You plan. You change nothing.\n{writer.prose(8)}"
    for number in range(4):
        agent = agent.branch(build if number % 2 else plan, tools if number % 2 else tools[:2])
        agent.turn(writer.task(), writer.steps())


def sub_agent_with_history(bench: Bench) -> None:
    """Two sub-agents with roles of their own are given the history; then the main one goes on."""
    writer, agent = _long_talk(bench)
    for number in range(2):
        agent.branch(f"You are helper {number}.\n{writer.prose(8)}", agent.tools[:2]).turn(
            writer.task(), writer.steps()
        )
    agent.turn(writer.task(), writer.steps(calls=1))


def parallel(bench: Bench) -> None:
    """Six sessions at once."""

    def session(number: int) -> None:
        writer = Writer(f"{bench.seed}.{number}")
        agent = _agent(bench, writer)
        for _ in range(3):
            agent.turn(writer.task(), writer.steps(calls=1))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(session, range(6)))


def restart(bench: Bench) -> None:
    """The server is killed between two turns."""
    writer = Writer(bench.seed)
    agent = _agent(bench, writer)
    for _ in range(3):
        agent.turn(writer.task(), writer.steps(calls=1))
    bench.restart()
    for _ in range(2):
        agent.turn(writer.task(), writer.steps(calls=1))


SCENARIOS: dict[str, Scenario] = {
    run.__name__: run
    for run in (
        append,
        reasoning_stripped,
        reasoning_echoed,
        reasoning_doubled,
        tools_compact,
        tools_sorted,
        tools_object,
        clock,
        clock_chat,
        customer_chat,
        billing,
        reminder,
        message_id,
        insertion,
        edit_and_regenerate,
        subagents,
        new_sessions,
        side_requests,
        compaction,
        compaction_role,
        plan_and_build,
        sub_agent_with_history,
        parallel,
        restart,
    )
}
