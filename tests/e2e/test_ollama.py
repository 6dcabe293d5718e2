"""Ollama's official client for Python against the real server: chat, streams, tools, images, embeddings.

The one for JavaScript has what is its own in `test_accumulators`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from start_llm.core.extras import is_installed
from tests.e2e.test_libraries import run
from tests.embeddings.tiny import build_encoder
from tests.integration.live import Live, live
from tests.oracle.oracle import script

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
QUESTION = "How is the weather? " + script(f"<think>\nWhich city?\n</think>\n\nI look.\n{CALL}", "It is sunny.")
PYTHON = """
import json, os, ollama
client, question = ollama.Client(os.environ["HOST"], trust_env=False), os.environ["QUESTION"]
image, encoder = os.environ["IMAGE"], os.environ["ENCODER"]
tool = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters":
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
name = client.list().models[0].model
messages = [{"role": "user", "content": question}]
stream = list(client.chat(name, messages, tools=[tool], think=True, stream=True, options={"num_predict": 200}))
calls = [call for part in stream for call in part.message.tool_calls or []]
said = {"role": "assistant", "content": "".join(part.message.content or "" for part in stream),
    "thinking": "".join(part.message.thinking or "" for part in stream), "tool_calls": calls}
told = {"role": "tool", "tool_name": "weather", "content": "Sun."}
answer = client.chat(name, [*messages, said, told], tools=[tool], think=True)
picture = client.chat(name, [{"role": "user", "content": "See.", "images": [image]}], options={"num_predict": 5})
raw = [part.response for part in client.generate(name, "Once", raw=True, stream=True, options={"num_predict": 4})]
wrong = ""
try:
    client.chat("nobody/at-all", messages)
except ollama.ResponseError as error:
    wrong = f"{error.status_code} {error.error}"
vectors = client.embed(encoder, ["a", "b"]).embeddings if encoder else []
print(json.dumps({"thinking": said["thinking"], "text": said["content"], "wrong": wrong, "raw": len(raw),
    "calls": [[call.function.name, dict(call.function.arguments)] for call in calls], "vectors": len(vectors),
    "answer": answer.message.content, "reused": stream[-1].prompt_eval_count, "done": stream[-1].done_reason,
    "picture": picture.done, "show": client.show(name).capabilities, "ps": len(client.ps().models)}))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, oracle_folder: Path) -> Iterator[Live]:
    cache = tmp_path_factory.mktemp("ollama")
    more = {"embedding_model": str(build_encoder(cache / "encoder"))} if is_installed("mlx_embeddings") else {}
    with live(oracle_folder, cache, ollama_port=0, **more) as made:
        yield made


def test_the_client_does_all_that_it_can(server: Live) -> None:
    (png := BytesIO()).name = "a.png"
    Image.new("RGB", (8, 8), "red").save(png)
    encoder = "encoder" if server.app.settings.embedding_model else ""
    given = {
        "HOST": server.url,
        "QUESTION": QUESTION,
        "IMAGE": base64.b64encode(png.getvalue()).decode(),
        "ENCODER": encoder,
    }
    found = json.loads(run("ollama", ["python", "-c", PYTHON], **given))
    assert found["thinking"].strip() == "Which city?" and found["text"].strip() == "I look."
    assert found["calls"] == [["weather", {"city": "Paris"}]] and found["answer"].strip() == "It is sunny."
    assert found["wrong"].startswith("404 ") and "nobody" in found["wrong"]
    assert found["picture"] is True and found["raw"] >= 2 and found["reused"] > 0 and found["done"] == "stop"
    assert {"completion", "tools"} <= set(found["show"]) and found["ps"] == 1
    assert found["vectors"] == (2 if encoder else 0)
