"""`session_of`: the client's name of a conversation, for the server and for the proxy in front of it."""

from __future__ import annotations

from typing import Any

import pytest

from start_llm.core.protocol import AGENT_HEADER, SESSION_FIELDS, SESSION_HEADERS, session_of

CLAUDE = "user_1_account_2_session_00ff-11"


@pytest.mark.parametrize(
    ("body", "headers", "found"),
    [
        *(({name: "s1"}, {}, ("s1", name)) for name in SESSION_FIELDS),
        *(({}, {name: "s1"}, ("s1", name)) for name in SESSION_HEADERS),
        ({"session_id": 7}, {}, ("7", "session_id")),
        ({"metadata": {"thread_id": "s1"}}, {}, ("s1", "metadata.thread_id")),
        ({"extra_body": {"chat_id": "s1"}}, {}, ("s1", "extra_body.chat_id")),
        ({"metadata": {"user_id": CLAUDE}}, {}, ("00ff-11", "metadata.user_id.session_id")),
        ({"metadata": {"user_id": '{"device": "d", "session_id": "s1"}'}}, {}, ("s1", "metadata.user_id.session_id")),
        ({"session_id": "first", "metadata": {"session_id": "last"}}, {"x-session-id": "h"}, ("first", "session_id")),
        ({"session_id": "s1"}, {AGENT_HEADER: "a"}, ("s1/a", "session_id")),
        ({}, {"x-session-id": "s1", AGENT_HEADER: "a"}, ("s1/a", "x-session-id")),
        # no names: people, groups, values of other kinds, a sub-agent of nobody
        ({"user": "u", "prompt_cache_key": "k", "metadata": {"user_id": "u"}}, {}, ("", "")),
        ({"session_id": True, "thread_id": "", "chat_id": None, "conversation_id": {"id": "c"}}, {}, ("", "")),
        ({"metadata": {"user_id": "{" * 1000}, "extra_body": ["s"]}, {AGENT_HEADER: "a"}, ("", "")),
    ],
)
def test_where_a_name_is_found(body: dict[str, Any], headers: dict[str, str], found: tuple[str, str]) -> None:
    assert session_of(body, headers) == found
