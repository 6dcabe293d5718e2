"""A response format holds on the embedded model too, whose think tags are plain text."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tests.integration.live import live

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.smol
@pytest.mark.thorough
def test_the_embedded_model_answers_in_json(smol_path: Path, tmp_path: Path) -> None:
    """Left the choice, this model begins these answers with a thought, and never comes to the JSON."""
    asked = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    with live(smol_path, tmp_path) as server:
        for question in ("Bob, 22, from Rome.", "Tell me about a painter in Vienna who is 40."):
            message = [{"role": "user", "content": question}]
            answer = server.chat(message, response_format=asked, max_tokens=60)
            assert answer["body"]["choices"][0]["finish_reason"] == "stop"
            assert answer["message"].get("reasoning_content") is None
            jsonschema.validate(json.loads(answer["message"]["content"]), SCHEMA)
