"""Pictures in agents' sessions: on a model that reads text only the session goes on; a model that sees tells which
picture it was shown."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from start_llm.clients import CLIENTS
from tests.e2e.scenarios import SCENARIOS, Scenario, call
from tests.e2e.test_clients import check
from tests.e2e.world import Run, Target, World, make_served, make_world, skip_unless_installed
from tests.images.pictures import b64, data_url, encoded, noise
from tests.oracle.oracle import script
from tests.vendors import anthropic, openai
from tests.vision.oracle import SITE, Names, build_vision_oracle

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

READ: dict[str, Callable[[Path], str]] = {
    "pi": lambda path: call("read", path=str(path)),
    "claude": lambda path: call("Read", file_path=str(path)),
    "opencode": lambda path: call("read", filePath=str(path)),
    "codex": lambda path: call("view_image", path=str(path)),
    "qwen": lambda path: call("read_file", file_path=str(path)),
    "openclaw": lambda path: call("read", path=str(path)),
    "cline": lambda path: call("read_files", paths=[str(path)]),
}
"""How a model asks for a picture; aider's models ask for nothing, its user adds the file."""
SENDS = frozenset({"claude"})
"""Agents that send a picture whatever they are told of the model; the others leave it out, or say so, themselves."""
ATTACHED: dict[str, Callable[[list[str], Path], list[str]]] = {
    "pi": lambda arguments, picture: [f"@{picture}", *arguments],
    "claude": lambda arguments, picture: [*arguments[:-1], f"@{picture} {arguments[-1]}"],
    "opencode": lambda arguments, picture: [*arguments, "--file", str(picture)],
    "codex": lambda arguments, picture: [*arguments[:-1], f"--image={picture}", *arguments[-1:]],
}
"""The arguments of a first turn with a picture that the user attaches."""


class Session:
    """An agent in a repository of its own, with pictures in it."""

    def __init__(self, world: World, name: str, part: str) -> None:
        skip_unless_installed(name)
        self.world, self.name = world, name
        self.scenario: Scenario = SCENARIOS[name]
        self.folder = world.repository(name, part)
        (self.folder / "NOTES.md").touch()
        self.data = world.folder / name / "cache" / "launch" / name

    def picture(self, name: str, seed: int) -> Path:
        path = self.folder / name
        path.write_bytes(encoded(noise(200, 120, seed), "PNG"))
        return path

    def turn(self, question: str, *texts: str, again: bool = False, attached: Path | None = None) -> Run:
        """`texts`: what the model says. Everything in it went well."""
        scenario = self.scenario
        arguments, text = (scenario.again if again else scenario.first)(f"{question} {script(*texts)}", self.data)
        if attached is not None:
            arguments = ATTACHED[self.name](arguments, attached)
        typed = len(texts) if scenario.typed and again else None
        run = self.world.launch(self.name, self.folder, arguments, text, scenario.seconds, typed)
        check(run, len(texts))
        return run


@pytest.mark.parametrize("name", list(CLIENTS))
def test_an_image_does_not_end_the_session(name: str, world: World) -> None:
    session = Session(world, name, "pictures")
    picture, scenario = session.picture("shot.png", 1), session.scenario
    beside = world.beside(name, session.folder, *scenario.beside) if scenario.beside else nullcontext()
    with beside:
        if name in READ:
            session.turn("What is in shot.png?", f"I look at it.\n{READ[name](picture)}", "It cannot be shown to me.")
        else:
            arguments, text = scenario.first(f"What is in shot.png? {script('It was not shown to me.')}", session.data)
            run = world.launch(name, session.folder, [*arguments, str(picture)], text, scenario.seconds)
            check(run, 1)
        again = session.turn("And now?", "Still nothing.", again=True)
    if name in SENDS:
        assert "iVBORw0KGgo" in json.dumps([entry["body"] for entry in again.sent]), "the picture is in the history"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Names]]:
    kind = os.environ.get("START_LLM_E2E_ORACLE", "plain")
    oracle = build_vision_oracle(tmp_path_factory.mktemp("oracle") / "seeing", kind)  # type: ignore[arg-type]
    with make_world(tmp_path_factory.mktemp("seeing"), oracle, SITE) as world:
        yield world, Names(oracle)


@pytest.mark.parametrize("name", list(ATTACHED))
def test_the_model_sees_the_images_that_the_agent_was_given(name: str, seeing: tuple[World, Names]) -> None:
    """One is attached by the user, one read by the agent's tool, one of the same size read in a resumed session."""
    world, names = seeing
    session = Session(world, name, "seen")
    paths = [session.picture(f"shot{number}.png", number) for number in range(3)]
    one, two, three = (names.of(noise(200, 120, number)) for number in range(3))
    said = session.turn("What is it?", "I see {images}.", attached=paths[0])
    assert f"I see {one}." in said.output
    said = session.turn("And shot1.png?", f"A look.\n{READ[name](paths[1])}", "I see {images}.", again=True)
    assert f"I see {one}, {two}." in said.output
    last = session.turn("And shot2.png?", f"A look.\n{READ[name](paths[2])}", "I see {images}.", again=True)
    assert f"I see {one}, {two}, {three}." in last.output
    going_on = [entry for entry in last.served if entry["tools"]]
    assert all(entry["reused"] > 0.8 * entry["prompt"] for entry in going_on), [
        (entry["prompt"], entry["reused"]) for entry in going_on
    ]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Target], Names]]:
    oracle = build_vision_oracle(tmp_path_factory.mktemp("oracle") / "behind")
    with make_served(tmp_path_factory.mktemp("behind"), oracle, SITE) as (made, _):
        yield made, Names(oracle)


@pytest.mark.parametrize("way", ["direct", "proxy", "wildcard"])
def test_images_through_the_proxy(way: str, targets: tuple[dict[str, Target], Names]) -> None:
    """In all three dialects, and in the result of a tool."""
    target, names = targets[0][way], targets[1]
    one, two = (encoded(noise(96, 64, seed), "PNG") for seed in (1, 2))
    first, second = names.of(noise(96, 64, 1)), names.of(noise(96, 64, 2))
    asked = f"{way} {script('I see {images}.', 'Now I see {images}.')}"
    with openai.OpenAI(base_url=f"{target.url}/v1", api_key=target.key, max_retries=0) as client:
        parts: list[Any] = [{"type": "text", "text": asked}, {"type": "image_url", "image_url": {"url": data_url(one)}}]
        chat = client.chat.completions.create(model=target.model, messages=[{"role": "user", "content": parts}])
        assert chat.choices[0].message.content == f"I see {first}."
        items: list[Any] = [
            {"type": "input_text", "text": asked},
            {"type": "input_image", "image_url": data_url(two), "detail": "auto"},
        ]
        response = client.responses.create(model=target.model, input=[{"role": "user", "content": items}])
        assert response.output_text == f"I see {second}."
    tool: Any = {"name": "Read", "description": "Reads", "input_schema": {"type": "object", "properties": {}}}
    with anthropic.Anthropic(base_url=target.url, api_key=target.key, max_retries=0) as claude:
        given: Any = {"model": target.model, "max_tokens": 200, "tools": [tool]}
        blocks: list[Any] = [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(data)}}
            for data in (one, two)
        ]
        ask = script("I see {images}.\n" + call("Read"), "Now I see {images}.")
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": f"{way} {ask}"}, blocks[0]]}]
        answer = claude.messages.create(messages=messages, **given)
        assert answer.content[0].type == "text" and answer.content[0].text.strip() == f"I see {first}."
        use = next(block.id for block in answer.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use, "content": [blocks[1]]}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        after = claude.messages.create(messages=messages, **given)
        assert after.content[-1].type == "text" and after.content[-1].text == f"Now I see {first}, {second}."
