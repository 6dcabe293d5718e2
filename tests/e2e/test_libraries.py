"""The examples of ``docs/clients/libraries.md``, as they stand there, against the real server; conversations of
four turns by each framework."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.install import search_path
from tests.e2e.turns import FRAMEWORKS
from tests.integration.live import Live, live
from tests.oracle.oracle import script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
PAGE = Path(__file__).parents[2] / "docs" / "clients" / "libraries.md"
QUESTION = "How is the weather in Paris?"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = "It is sunny in Paris."
INSTALLED = {"LangChain": "langchain", "LlamaIndex": "llamaindex", "Pydantic AI": "pydantic-ai"}
INSTALLED["OpenAI Agents SDK"] = "openai-agents"


def examples() -> dict[str, str]:
    """The Python of each section, by the section's title."""
    sections = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    blocks = {text.splitlines()[0]: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for text in sections}
    return {title: block[0] for title, block in blocks.items() if block}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, oracle_folder: Path) -> Iterator[Live]:
    with live(oracle_folder, tmp_path_factory.mktemp("libraries"), served_model_name="oracle") as made:
        yield made


#: What the page says of another class in an example: by title, what is replaced.
OTHERS = {
    "LangChain": {"langchain_openai": "langchain_anthropic", "ChatOpenAI": "ChatAnthropic", ":8080/v1": ":8080"},
    "OpenAI Agents SDK": {"OpenAIChatCompletionsModel": "OpenAIResponsesModel"},
}


def run(name: str, command: list[str], **environment: str) -> str:
    """What a program of the library prints."""
    folder = search_path(name)[-1]
    if not (folder / command[0]).exists():
        pytest.skip(f"tests/e2e/install.py {name} installs it")
    variables = {**os.environ, "LD_PRELOAD": "", "NO_PROXY": "*", **environment}
    done = subprocess.run(
        [folder / command[0], *command[1:]], env=variables, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("title", examples())
def test_the_example_calls_the_tool_and_answers(title: str, other: bool, target: Live, tmp_path: Path) -> None:
    text = examples()[title]
    if other and title not in OTHERS:
        pytest.skip("one way only")
    for old, new in OTHERS[title].items() if other else ():
        assert old in text
        text = text.replace(old, new)
    assert QUESTION in text and "http://127.0.0.1:8080" in text
    scripted = repr(f"{QUESTION} {script(CALL, ANSWER)}")
    program = tmp_path / "example.py"
    program.write_text(text.replace("http://127.0.0.1:8080", target.url).replace(f'"{QUESTION}"', scripted))
    assert ANSWER in run(INSTALLED[title], ["python", str(program)])


def test_llm_calls_a_function_and_goes_on(target: Live, tmp_path: Path) -> None:
    models = re.search(r"```yaml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert models
    (tmp_path / "extra-openai-models.yaml").write_text(models[1].replace("http://127.0.0.1:8080", target.url))
    function = 'def weather(city: str) -> str: return "Sun."'
    assert function in PAGE.read_text("utf-8")
    home = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    question = f"{QUESTION} {script(CALL, ANSWER)}"
    assert ANSWER in run("llm", ["llm", "-m", "local", question, "--functions", function], **home)
    assert "Rain." in run("llm", ["llm", "-c", f"And tomorrow? {script('Rain.')}"], **home)


@pytest.mark.parametrize(("name", "kind"), FRAMEWORKS)
def test_a_conversation_computes_what_is_new(
    name: str, kind: str, target: Live, tmp_path: Path, table: list[str]
) -> None:
    program = tmp_path / "turns.py"
    program.write_text(FRAMEWORKS[name, kind])
    questions, answers = [], []
    for city in ("Paris", "Rome", "Oslo", "Bern"):
        answers.append(f"It is sunny in {city}, all day long: {name} has asked the tool by {kind}.")
        said = f"<think>\nWhich city is it?\n</think>\n\nI look it up.\n{CALL.replace('Paris', city)}"
        questions.append(f"{name}, {kind}: how is {city}? {script(said, answers[-1])}")
    given = {"HOST": target.url, "KIND": kind, "QUESTIONS": json.dumps(questions)}
    assert run(name, ["python", str(program)], **given).split("\n")[:4] == answers
    entries = httpx.get(f"{target.url}/v1/cache/requests").json()["requests"][:8][::-1]
    assert [entry["status"] for entry in entries] == [200] * 8 and entries[0]["messages"] <= 2
    computed, new = (sum(entry[what] for entry in entries[1:]) for what in ("computed", "new"))
    table.append(f"{name} {kind}: {computed} / {new}, session {entries[-1]['session']}")
    assert computed <= 1.2 * new, [(entry["computed"], entry["new"], entry.get("miss")) for entry in entries]
