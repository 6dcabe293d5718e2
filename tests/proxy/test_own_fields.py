"""Fields of this server's own are folded into places that LiteLLM passes on, and no other provider gets them.

That LiteLLM passes them on: `test_dialects`, and `integration/test_sdk`.
"""

from __future__ import annotations

from typing import Any

import pytest

from start_llm.api.anthropic.messages import MessagesBody
from start_llm.api.common.fields import BodyModel
from start_llm.api.common.request import FIELDS
from start_llm.api.openai.chat import ChatBody
from start_llm.api.openai.responses import ResponsesBody
from start_llm.api.openai.responses_stream import seal
from start_llm.core.protocol import SESSION_FIELDS, thinking_signature
from start_llm.proxy.own_fields import fold, for_provider
from tests.vendors import openai

OTHERS = {"best_of", "max_tokens", "output_config", "output_format", "stop_sequences", "system", "thinking"}
"""Old names of OpenAI's, and Anthropic's."""
CALL = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}


NAMES = {"mine": "default", "tiny": "tiny", "openai/tiny": "tiny"}


@pytest.mark.parametrize(
    "dialect", ["chat/completions", "completions", "messages", "messages/count_tokens", "responses"]
)
@pytest.mark.parametrize("more", [{"adapter": "a"}, {"extra_body": {"adapter": "a"}}])
@pytest.mark.parametrize(("model", "behind"), [*NAMES.items(), ("x", "x")])
def test_an_adapter_goes_with_the_models_name(dialect: str, more: dict[str, Any], model: str, behind: str) -> None:
    found = fold(dialect, {"model": model, "max_tokens": 5, **more}, NAMES)
    assert found.pop("extra_body", {}) == {}
    assert found == {"model": f"{behind}+a", "max_tokens": 5}


def test_own_fields_of_responses_go_in_a_place_that_is_unfolded() -> None:
    plain, own = {"model": "tiny", "input": "hi", "tools": []}, {"min_p": 0.1, "top_k": 5}
    body = plain | own | {"extra_body": {"session_id": "s"}}
    assert fold("responses", body, NAMES) == plain | {"extra_body": own | {"session_id": "s"}}
    assert fold("messages", body, NAMES) is body, "there is no such place"
    for nothing_to_move in (plain, plain | {"adapter": None}, {"model": 5, "adapter": "a"}):
        assert fold("messages", nothing_to_move, NAMES) is nothing_to_move


def thinking(text: str, signed: str | None = None) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": thinking_signature(text) if signed is None else signed}


def messages(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": "u"}, {"role": "assistant", "content": list(blocks)}]
    return {"model": "m", "max_tokens": 5, "messages": said, "thinking": {"type": "adaptive"}, **more}


def test_thinking_that_this_server_signed_stays_here_and_the_vendors_own_goes_back() -> None:
    sent = for_provider("messages", messages(thinking("ours"), CALL, context_management={"edits": []}))
    assert sent["messages"][1]["content"] == [CALL]
    assert "thinking" not in sent and "context_management" not in sent, "a vendor wants its own in front of the call"
    theirs = messages(thinking("theirs", "EqQBCg"), CALL)
    assert for_provider("messages", theirs) == theirs
    mixed = for_provider("messages", messages(thinking("ours"), thinking("theirs", "EqQBCg"), CALL))
    assert mixed["messages"][1]["content"] == [thinking("theirs", "EqQBCg"), CALL]


def test_a_turn_of_thinking_alone_keeps_its_place() -> None:
    sent = for_provider("messages", messages(thinking("ours")))
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant"]
    assert [block["type"] for block in sent["messages"][1]["content"]] == ["text"]


def test_reasoning_that_this_server_sealed_stays_here() -> None:
    ours = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal("hm")}
    bare = {"type": "reasoning", "id": "rs_2", "summary": []}
    theirs = {"type": "reasoning", "id": "rs_3", "summary": [], "encrypted_content": "gAAAA"}
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    sent = for_provider("responses", {"model": "m", "input": [ours, bare, theirs, call], "store": False})
    assert sent == {"model": "m", "input": [theirs, call], "store": False}
    assert for_provider("responses", {"model": "m", "input": "u"}) == {"model": "m", "input": "u"}


def test_parameters_that_only_this_server_knows_stay_here() -> None:
    said = [{"role": "assistant", "content": "a", "reasoning_content": "r"}, {"role": "user", "content": "u"}]
    own = {"min_p": 0.1, "drafts": False, "repetition_penalty": 1.1, "chat_template_kwargs": {}, "top_k": 4}
    sent = for_provider("chat/completions", {"model": "m", "messages": said, "temperature": 1, **own})
    assert sent == {"model": "m", "temperature": 1, "messages": [{"role": "assistant", "content": "a"}, said[1]]}
    assert for_provider("messages", {"model": "m", "messages": [], "top_k": 4})["top_k"] == 4


@pytest.mark.parametrize(
    ("dialect", "body", "others"),
    [
        ("chat/completions", ChatBody, OTHERS),
        ("responses", ResponsesBody, OTHERS),
        ("messages", MessagesBody, {*OTHERS, "top_k"}),
    ],
)
def test_every_field_that_is_read_here_is_another_vendors_too_or_stays_here(
    dialect: str, body: type[BodyModel], others: set[str]
) -> None:
    """A new field of our own belongs into OWN_FIELDS."""
    chat = openai.types.chat.completion_create_params.CompletionCreateParamsStreaming
    responses = openai.types.responses.response_create_params.ResponseCreateParamsStreaming
    openais = {*chat.__annotations__, *responses.__annotations__}
    nowhere_declared = {"adapter", "chat_template_kwargs", "extra_body", *SESSION_FIELDS, *FIELDS}
    given = dict.fromkeys([*body.model_fields, *nowhere_declared], 1)
    sent = for_provider(dialect, given).keys()
    assert sent - openais - others == set()
    assert given.keys() & (openais | others) == sent


def test_what_is_no_conversation_is_left_as_it_is() -> None:
    for dialect in ("chat/completions", "messages", "responses"):
        for body in ({"messages": "x", "input": 3}, {"messages": [1, {"content": 2}], "input": [None, 4]}, {}):
            assert for_provider(dialect, dict(body)) == body
