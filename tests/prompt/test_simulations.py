"""Clients that do all kinds of things at random: whatever they send, a reader of the prompt knows what holds now.

Each seed is one simulation. A failure names the seed, the step and what differs, and shows the end of the prompt.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.messages import Message, Tool
from start_llm.prompt.heal import CLEARED
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.turndb import TurnDB
from start_llm.prompt.turns import TurnMemory
from start_llm.prompt.volatile import Rules
from tests.prompt.client import (
    BASH,
    EDIT,
    READ,
    Client,
    completed,
    in_content,
    pipeline,
    reserialised,
    same,
    say,
    settings,
    stripped,
)
from tests.prompt.models import model
from tests.prompt.reader import FILES_INTRO, files_read, lasting, messages_read, replaced, system_read, tools_read

NAMES = ("a.py", "src/b c.py", "d.md", "e.txt")
# Lines that look like something else: fences, diffs, places, names, notes, line breaks of other kinds.
ODD_LINES = (
    "x = 1", "y", "", "    return", "\tz", "w\u2028w", "v\x0bv", "r\r", "```python", "```", "# h", "> q",
    "-minus", "+plus", "line 3:", "(-3 more lines)", "a.py:", "@@", "</update>",
)  # fmt: skip
LINES = tuple(f"Rule {n:02d}: a sentence of the system text that says something of its own." for n in range(30))
REMINDER = "<system-reminder>\n{}\n</system-reminder>"
ALL_KEPT = 2**28  # bytes
TOOL_SETS: tuple[tuple[Tool, ...], ...] = (
    (READ, BASH),
    (READ, BASH, EDIT),
    (replace(READ, description="Reads folders too"), BASH),
    (BASH,),
)

FEW = {"files": range(60), "agents": range(40), "equal turns": range(20)}
MANY = {"files": range(60, 1260), "agents": range(40, 640), "equal turns": range(20, 320)}
IN_ONE_TEST = 100


def text(client: Client) -> str:
    assert client.prepared is not None
    return model(client.family)[1].decode(client.prepared.prompt.tokens)


@contextmanager
def located(seed: int, step: int, client: Client) -> Iterator[None]:
    """Says where in a simulation something failed."""
    try:
        yield
    except Exception as error:
        error.add_note(f"seed {seed}, step {step}; the prompt ends with:\n{text(client)[-2000:]}")
        raise


def differing(read: Mapping[str, Any], real: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What a reader takes for true and what is true, by name, where the two differ."""
    return {name: (read.get(name), real.get(name)) for name in {**read, **real} if read.get(name) != real.get(name)}


# --- a client that shows files in the conversation and has them edited -------


def random_file(chooser: random.Random) -> str:
    lines = [
        chooser.choice(ODD_LINES) + (str(chooser.randrange(4)) if chooser.random() < 0.7 else "")
        for _ in range(chooser.choice([0, 1, 2, 5, 12, 30]))
    ]
    return "\n".join(lines) + ("\n" if lines and chooser.random() < 0.7 else "")


def files_block(files: Mapping[str, str]) -> str:
    fence = "````" if any(re.search(r"^```", text, re.MULTILINE) for text in files.values()) else "```"
    shown = "".join(f"\n{name}\n{fence}\n{text}{fence}\n" for name, text in files.items())
    return f"{FILES_INTRO}\n\n*Trust this message*\n{shown}"


def edit(name: str, search: str, new: str) -> str:
    """An answer with an edit."""
    return f"Edit.\n\n{name}\n```\n<<<<<<< SEARCH\n{search}=======\n{new}\n>>>>>>> REPLACE\n```"


@dataclass
class FilesClient:
    """Two conversations about the same files; files are changed, removed and put back behind the model's back."""

    seed: int
    files: dict[str, str] = field(default_factory=dict)
    saved: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chooser = random.Random(self.seed)
        self.pipe = pipeline("chatml")
        self.pipe._turns = TurnMemory(self.chooser.choice([ALL_KEPT, 20000, 60000]))
        self.files[self.chooser.choice(NAMES)] = random_file(self.chooser)
        self.histories: list[list[Message]] = [[Message("system", "You edit.")] for _ in range(2)]

    def run(self) -> None:
        for step in range(self.chooser.choice([6, 12])):
            which = self.chooser.randrange(2)
            self.act(which)
            history = self.histories[which]
            shown = [Message("user", files_block(self.files)), Message("assistant", "Ok.")] if self.files else []
            client = Client("chatml", self.pipe, tools=(), messages=[*history, *shown])
            client.ask(Message("user", f"Question {self.chooser.randrange(3)}"))
            with located(self.seed, step, client):
                real = {name: text.rstrip("\n") for name, text in self.files.items()}
                wrong = differing(files_read(text(client)), real)
                assert not wrong, f"files, as read and as they are: {wrong}"
            client.answer(say(self.answer(step), None))
            history += client.messages[-2:]

    def act(self, which: int) -> None:
        """Something that happens between two requests, to the files or to this conversation."""
        chance, chooser, files = self.chooser.random(), self.chooser, self.files
        history = self.histories[which]
        if chance < 0.25:
            files[chooser.choice(NAMES)] = random_file(chooser)
        elif chance < 0.35 and len(files) > 1:
            del files[chooser.choice(list(files))]
        elif chance < 0.55 and files:
            name = chooser.choice(list(files))
            lines = files[name].split("\n")
            place = chooser.randrange(len(lines) + 1)
            new = [f"{chooser.choice(ODD_LINES)}new" for _ in range(chooser.randrange(3))]
            lines[place : place + chooser.randrange(3)] = new
            files[name] = "\n".join(lines)
        elif chance < 0.62:
            self.saved.append(dict(files))
        elif chance < 0.7 and self.saved:
            self.files = dict(chooser.choice(self.saved))
        elif chance < 0.75 and len(history) > 2:
            del history[-2:]
        elif chance < 0.8:
            self.histories[which] = list(self.histories[1 - which])
        if chooser.random() < 0.2:
            names = list(self.files)
            chooser.shuffle(names)
            self.files = {name: self.files[name] for name in names}

    def answer(self, step: int) -> str:
        """What the model answers; the client makes its edits, or does not."""
        chooser, files = self.chooser, self.files
        done, chance = chooser.random() < 0.6, chooser.random()
        absent = [name for name in NAMES if name not in files]
        if absent and chance < 0.1:
            name, new = chooser.choice(absent), f"written\nin {step}"
            if done:
                files[name] = new
            return edit(name, "", new)
        if files and chance < 0.7:
            name, new = chooser.choice(list(files)), f"edited {step}"
            lines = files[name].split("\n")
            place = chooser.randrange(len(lines))
            search = "\n".join(lines[place : place + 2])
            # Blank lines at the end of a file are not compared, so an edit does not rely on them.
            if search.strip() and lines[place + 1 : place + 2] != [""] and not re.search(r"^```", search, re.MULTILINE):
                if done:
                    files[name] = replaced(files[name], search, new)
                return edit(name, f"{search}\n", new)
        return "Words."


# --- agents -------------------------------------------------------------------


def system_texts(chooser: random.Random) -> list[list[str]]:
    """A long system text and others that come from it, with a volatile value here and there."""
    texts = [list(LINES)]
    for _ in range(3):
        lines = list(chooser.choice(texts))
        place = chooser.randrange(len(lines))
        del lines[place : place + chooser.randrange(5)]
        for _ in range(chooser.randrange(3)):
            clock = f"Clock {chooser.randrange(6)}: current time is "
            if chooser.random() < 0.4 and not any(line.startswith(clock) for line in lines):
                lines.insert(place, f"{clock}{chooser.randrange(3)}")
            else:
                lines.insert(place, f"Fresh {chooser.randrange(99)}")
        texts.append(lines)
    return texts


@dataclass
class Agent:
    """A conversation. `history`: as the client remembers it; `cleared`: tool results that it sends no more."""

    client: Client
    tag: str
    system: int = 0
    history: list[Message] = field(default_factory=list)
    cleared: set[int] = field(default_factory=set)
    saved: list[tuple[list[Message], set[int]]] = field(default_factory=list)

    def undo(self) -> None:
        """Back to before the last answer."""
        while self.history and self.history[-1].role != "assistant":
            self.history.pop()
        if self.history:
            self.history.pop()

    def sent(self) -> list[Message]:
        return [replace(m, content=CLEARED) if i in self.cleared else m for i, m in enumerate(self.history)]


@dataclass
class Agents:
    """Two agents at one server, which is started anew at times and forgets old turns.

    Their system texts and tools change, old results are cleared, and they go back in their conversations.
    """

    seed: int
    folder: Path

    def __post_init__(self) -> None:
        self.chooser = random.Random(self.seed)
        self.limit = self.chooser.choice([ALL_KEPT, ALL_KEPT, 40000, 120000])
        self.pipe = self.started()
        self.texts = system_texts(self.chooser)
        self.agents = [
            Agent(Client("chatml", self.pipe, echo=self.chooser.choice([same, stripped, completed])), f"agent {i}")
            for i in range(2)
        ]

    def started(self) -> Pipeline:
        template, tokenizer = model("chatml")
        store = TurnDB(self.folder / "turns.sqlite")
        pipe = Pipeline(template, tokenizer, settings=settings(), rules=Rules.load(None), store=store)
        pipe._turns._limit = self.limit
        return pipe

    def run(self) -> None:
        for step in range(self.chooser.choice([6, 14])):
            agent = self.chooser.choice(self.agents)
            self.act(agent)
            self.next_message(agent)
            client, system = agent.client, "\n".join(self.texts[agent.system])
            client.pipe = self.pipe
            client.messages = [Message("system", system), *agent.sent()]
            client.ask()
            with located(self.seed, step, client):
                check_head(text(client), system, client.tools)
                check_messages(text(client), agent)
            if self.chooser.random() < 0.9:
                self.answer(agent, step)
        self.pipe.close()

    def act(self, agent: Agent) -> None:
        """Something that happens before the next request."""
        chance, chooser = self.chooser.random(), self.chooser
        if chance < 0.3:
            agent.system = chooser.randrange(len(self.texts))
        elif chance < 0.4:
            agent.client.tools = chooser.choice(TOOL_SETS)
        elif chance < 0.5:
            results = [i for i, message in enumerate(agent.history) if message.role == "tool"]
            agent.cleared |= {i for i in results if chooser.random() < 0.6}
        elif chance < 0.58:
            agent.cleared = set()
        elif chance < 0.64:
            self.pipe.close()
            self.pipe = self.started()
        elif chance < 0.72:
            agent.saved.append((list(agent.history), set(agent.cleared)))
        elif chance < 0.8 and agent.saved:
            history, cleared = chooser.choice(agent.saved)
            agent.history, agent.cleared = list(history), set(cleared)
        elif chance < 0.85:
            agent.undo()

    def next_message(self, agent: Agent) -> None:
        last = agent.history[-1] if agent.history else None
        if last and last.tool_calls:
            whose = agent.tag if self.chooser.random() < 0.7 else "same"
            output = f"output {whose} {self.chooser.randrange(4)} {'data ' * 8}"
            agent.history.append(Message("tool", output, tool_call_id=last.tool_calls[0].id))
        elif not last or last.role == "assistant":
            agent.history.append(Message("user", self.chooser.choice(["Go", "On", "Why?"])))

    def answer(self, agent: Agent, step: int) -> None:
        calls = {"read": {"path": self.chooser.choice("ab")}} if self.chooser.random() < 0.6 else {}
        made = say(self.chooser.choice(["Ok.", "Step."]), f"Thought of {agent.tag} {step}", **calls)
        numbered = tuple(replace(call, id=f"id{self.seed}-{step}") for call in made.tool_calls)
        agent.client.answer(replace(made, tool_calls=numbered))
        agent.history.append(agent.client.messages[-1])


def check_head(prompt: str, system: str, tools: tuple[Tool, ...]) -> None:
    read, real = system_read(prompt), lasting(system)
    assert read.split("\n") == real.split("\n"), "system text, as read and as sent"
    for line in system.split("\n"):
        # The last value that the prompt shows of it is the one that holds.
        if match := re.fullmatch(r"(.* current time is )\d+", line):
            shown = [match[1] + value for value in re.findall(re.escape(match[1]) + r"(\d+)", prompt)]
            assert line in shown[-1:], f"{line!r} is shown as {shown}"
    wrong = differing(tools_read(prompt), {tool.name: tool.description for tool in tools})
    assert not wrong, f"tools, as read and as sent: {wrong}"


def check_messages(prompt: str, agent: Agent) -> None:
    read = messages_read(prompt)[1:]
    roles = [message.role for message in agent.history]
    assert [message.role for message in read] == roles, "roles, as read and as sent"
    for index, (shown, message) in enumerate(zip(read, agent.history, strict=True)):
        where = f"message {index}, a {message.role}'s, as read and as sent"
        if message.role == "assistant":
            words = [message.content, *(json.loads(call.arguments)["path"] for call in message.tool_calls)]
            assert all(word.strip() in shown.content for word in words), f"{where}: {shown.content!r}, {words}"
        elif index not in agent.cleared or shown.content != CLEARED:
            assert shown.content.strip() == message.content.strip(), where


# --- conversations with equal turns -------------------------------------------


def filed(text: str) -> str:
    """A user's words as a client keeps them in a history file: two blanks behind each line."""
    return "".join(f"{line}  \n" for line in text.rstrip().split("\n"))


@dataclass
class EqualTurns:
    """Three conversations that say much the same: none is shown what another thought, saw or was reminded of."""

    seed: int

    def __post_init__(self) -> None:
        self.chooser = random.Random(self.seed)
        pipe = pipeline("qwen35")
        echoes = [same, stripped, completed, reserialised, in_content]
        self.clients = [
            Client(
                "qwen35",
                pipe,
                echo=self.chooser.choice(echoes),
                messages=[Message("system", "\n".join(LINES)), Message("user", f"Question {number}")],
            )
            for number in range(3)
        ]

    def run(self) -> None:
        texts = (LINES, LINES[:4] + LINES[5:], (*LINES, "More."))
        for step in range(15):
            number = self.chooser.randrange(3)
            client = self.clients[number]
            if self.chooser.random() < 0.3:
                client.messages[0] = Message("system", "\n".join(self.chooser.choice(texts)))
            self.next_message(number, step)
            kept = client.messages
            client.messages = self.sent(kept)
            client.ask()
            with located(self.seed, step, client):
                check_own(text(client), number)
                check_all_shown(text(client), client.messages)
            client.messages = kept
            self.answer(number, step)

    def next_message(self, number: int, step: int) -> None:
        chooser, messages = self.chooser, self.clients[number].messages
        last = messages[-1]
        if last.tool_calls:
            messages.append(Message("tool", f"out of {number} at {step}", tool_call_id=last.tool_calls[0].id))
        elif last.role == "assistant":
            reminder = REMINDER.format(f"rem {number} {chooser.randrange(3)}")
            words = chooser.choice(["On", "Why?\nTell me", "x"]) + chooser.choice(["", "\n", " ", f"\n{reminder}"])
            messages.append(Message("user", words))

    def sent(self, messages: list[Message]) -> list[Message]:
        """The messages as the client writes them down this time."""
        result, chooser = list(messages), self.chooser
        in_a_file, clears = chooser.random() < 0.3, chooser.random() < 0.2
        for index, message in enumerate(messages):
            if in_a_file and message.role == "user" and index > 1 and chooser.random() < 0.7:
                result[index] = replace(message, content=filed(message.content))
            elif clears and message.role == "tool" and chooser.random() < 0.5:
                result[index] = replace(message, content=CLEARED)
        return result

    def answer(self, number: int, step: int) -> None:
        calls = {"read": {"path": self.chooser.choice("ab")}} if self.chooser.random() < 0.5 else {}
        made = say(self.chooser.choice(["Ok.", "Done.", "# Head\nOk."]), f"Thought {number}-{step}", **calls)
        numbered = tuple(replace(call, id=f"i{step}") for call in made.tool_calls)
        self.clients[number].answer(replace(made, tool_calls=numbered))


def check_own(prompt: str, number: int) -> None:
    others = "".join(str(other) for other in range(3) if other != number)
    leaked = re.findall(rf"Thought [{others}]-\d+|out of [{others}] at \d+|rem [{others}] \d", prompt)
    assert not leaked, f"conversation {number} is shown what belongs to another: {leaked}"


def check_all_shown(prompt: str, messages: list[Message]) -> None:
    said = [message.content for message in messages if message.content != CLEARED and "<think>" not in message.content]
    hidden = [line for content in said for line in content.split("\n") if line.strip() not in prompt]
    assert not hidden, f"lines that the prompt does not show: {hidden}"


# --- tests ----------------------------------------------------------------------


def simulate(kind: str, seed: int, folder: Path) -> None:
    if kind == "files":
        FilesClient(seed).run()
    elif kind == "agents":
        Agents(seed, folder).run()
    else:
        EqualTurns(seed).run()


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, seeds in FEW.items() for seed in seeds])
def test_a_reader_knows_what_holds(kind: str, seed: int, tmp_path: Path) -> None:
    simulate(kind, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "first"), [(kind, n) for kind, seeds in MANY.items() for n in seeds[::IN_ONE_TEST]])
def test_a_reader_knows_what_holds_in_many_simulations(kind: str, first: int, tmp_path: Path) -> None:
    for seed in range(first, first + IN_ONE_TEST):
        folder = tmp_path / str(seed)
        folder.mkdir()
        simulate(kind, seed, folder)
