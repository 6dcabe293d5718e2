"""A model is asked how it calls tools when it is loaded, and its calls are read so from then on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live import live
from tests.models.callers import CALLERS, build_caller

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WRITES = next(caller for caller in CALLERS if caller.family == "mistral")


@pytest.mark.parametrize("probe", ["on", "off"])
def test_calls_of_a_model_that_writes_otherwise_than_its_template_says(
    probe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_caller(tmp_path, "Qwen3-8B", "hermes")
    reply = tmp_path / "reply"
    reply.write_text(WRITES.reply())
    monkeypatch.setenv("ORACLE_REPLIES", str(reply))
    with live(model, tmp_path / "cache", model_probe=probe) as server:
        facts = server.get("/v1/models").json()["data"][0]["details"]["facts"]
        message = server.chat([{"role": "user", "content": "Weather in Paris?"}], tools=[TOOL])["message"]
    assert facts["family"] == {"value": "qwen3", "source": "config"}
    if probe == "off":
        assert facts["tool_parser"] == {"value": "json_tools", "source": "template"}
        assert not message.get("tool_calls") and "[TOOL_CALLS]" in message["content"]
    else:
        assert facts["tool_parser"] == {"value": "mistral", "source": "probe"}
        (call,) = message["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}


@pytest.mark.parametrize(("said", "calls"), [("I cannot know that.", False), (WRITES.reply(), True)])
def test_a_model_that_makes_no_call_is_not_said_to_call_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, calls: bool
) -> None:
    reply = tmp_path / "reply"
    reply.write_text(said)
    monkeypatch.setenv("ORACLE_REPLIES", str(reply))
    with live(build_caller(tmp_path, "Qwen3-8B", "hermes"), tmp_path / "cache", model_probe="on") as server:
        (model,) = server.get("/v1/models").json()["data"]
        health = server.get("/health").json()
    assert model["capabilities"]["tools"] is health["capabilities"]["tools"] is calls
