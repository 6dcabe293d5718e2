"""The vendors' JavaScript libraries put streams together: nothing raises, and what they hold is what was said."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from start_llm.core.events import Done, Event, ReasoningDelta, Started, TextDelta, ToolCallFinished, Usage
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from tests.api import test_answers_fit as answers
from tests.api.fakes import FakeService, make_server
from tests.e2e.install import clients_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
STREAMS = 200  # of each dialect
PACKAGES = {"chat": "openai-js", "responses": "openai-js", "messages": "anthropic-js", "ollama": "ollama-js"}
HEAD = """
const { HOST, STREAMS } = process.env
const parameters = { type: 'object', properties: { path: { type: 'string' } } }
const nested = [{ type: 'function', function: { name: 'read', parameters } }]
const flat = [{ type: 'function', name: 'read', parameters }]
const messages = (n) => [{ role: 'user', content: `stream ${n}` }]
const told = (text, thought, calls) => ({ text: text || '', thought: thought || '', calls })
async function main() {
  const all = []
  for (let n = 0; n < Number(STREAMS); n++) all.push(await one(n))
  console.log(JSON.stringify(all))
}
"""
PROGRAMS = {
    "chat": """
const OpenAI = require('openai')
const client = new OpenAI({ baseURL: `${HOST}/v1`, apiKey: 'x', maxRetries: 0 })
async function one(n) {
  const stream = client.chat.completions.stream({ model: 'tiny', messages: messages(n), tools: nested })
  let thought = ''
  for await (const part of stream) thought += part.choices[0]?.delta.reasoning_content || ''
  const whole = (await stream.finalChatCompletion()).choices[0].message
  return told(whole.content, thought, (whole.tool_calls || []).map((call) => call.function.arguments))
}
""",
    "responses": """
const OpenAI = require('openai')
const client = new OpenAI({ baseURL: `${HOST}/v1`, apiKey: 'x', maxRetries: 0 })
async function one(n) {
  const whole = await client.responses.stream({ model: 'tiny', input: messages(n), tools: flat }).finalResponse()
  const of = (type) => whole.output.filter((item) => item.type === type)
  const texts = of('message').flatMap((item) => item.content).map((part) => part.text)
  const thoughts = of('reasoning').flatMap((item) => [...(item.summary || []), ...(item.content || [])])
  return told(texts.join(''), thoughts.map((part) => part.text).join(''), of('function_call').map((c) => c.arguments))
}
""",
    "messages": """
const Anthropic = require('@anthropic-ai/sdk')
const client = new Anthropic({ baseURL: HOST, apiKey: 'x', maxRetries: 0 })
async function one(n) {
  const tools = [{ name: 'read', input_schema: parameters }]
  const thinking = { type: 'enabled', budget_tokens: 1024 }
  const asked = { model: 'tiny', max_tokens: 2000, messages: messages(n), tools, thinking }
  const whole = await client.messages.stream(asked).finalMessage()
  const of = (type) => whole.content.filter((block) => block.type === type)
  const join = (type, name) => of(type).map((block) => block[name]).join('')
  return told(join('text', 'text'), join('thinking', 'thinking'), of('tool_use').map((block) => block.input))
}
""",
    "ollama": """
const { Ollama } = require('ollama')
const client = new Ollama({ host: HOST })
async function one(n) {
  const whole = { text: '', thought: '', calls: [] }
  const asked = { model: 'tiny', messages: messages(n), tools: nested, think: true, stream: true }
  for await (const part of await client.chat(asked)) {
    whole.text += part.message.content || ''
    whole.thought += part.message.thinking || ''
    whole.calls.push(...(part.message.tool_calls || []).map((call) => call.function.arguments))
  }
  return whole
}
""",
}


@pytest.mark.parametrize("dialect", PROGRAMS)
def test_what_a_library_puts_together_is_what_was_said(
    dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = clients_folder() / PACKAGES[dialect]
    if not folder.is_dir():
        pytest.skip(f"tests/e2e/install.py {PACKAGES[dialect]} installs it")
    monkeypatch.setattr(
        answers, "ARGUMENTS", ('{"path": "a"}', "{}", '{"path": "ä \\" \\\\ ✓", "n": [1, {"a": null}]}')
    )
    said: dict[str, list[Event]] = {}

    def script(request: ChatRequest) -> Iterator[Event]:
        name = request.messages[-1].content
        chance = random.Random(name)
        said[name] = list(answers.said(chance, request, 0))
        yield Started(answers.told(chance))
        yield from said[name]
        yield Done(Usage(9, 5, 3, 1), answers.told(chance))

    settings = Settings(_env_file=None, mlx_port=0, log_root=tmp_path, start_llm_cache_dir=tmp_path)  # type: ignore[call-arg]
    server = make_server(settings, FakeService(script))
    server.start()
    program = tmp_path / "ask.cjs"
    program.write_text(f"{HEAD}{PROGRAMS[dialect]}main()\n")
    node = clients_folder() / "node" / "node_modules" / ".bin" / "node"
    given = {"HOST": server.url, "STREAMS": str(STREAMS), "NO_PROXY": "*", "LD_PRELOAD": ""}
    given["NODE_PATH"] = str(folder / "node_modules")
    try:
        done = subprocess.run(
            [node if node.exists() else "node", program],
            env=os.environ | given, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr[-3000:]
    held = json.loads(done.stdout)
    assert len(held) == STREAMS
    for number, found in enumerate(held):
        events = said[f"stream {number}"]
        calls = [json.loads(event.arguments) for event in events if isinstance(event, ToolCallFinished)]
        assert found == {
            "text": "".join(event.text for event in events if isinstance(event, TextDelta)),
            "thought": "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
            "calls": found["calls"],
        }, number
        given = [json.loads(call) if isinstance(call, str) else call for call in found["calls"]]
        assert given == calls, number
