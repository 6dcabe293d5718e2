"""Recorded requests of real agents before Dynamo's selector: does it choose the node that `explain` chooses?

As `test_dynamo`, which has the nodes and the selector. The prompts are those that four agents have sent, in their
order, of several users with the same agent: each user's first message is another one. A conversation stays at one node.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from start_llm.core.messages import Message, ToolCall
from start_llm.core.request import ChatRequest
from start_llm.proxy.routing import route_key
from tests.api.test_traces import FOLDER, recorded, translate
from tests.integration.test_dynamo import known_nodes, routers_tokens, select, selector

PROMPTS = 125  # of each agent: 500
USERS = 6
STORED_TOKENS = 500_000  # at a node
NO_BILLING_LINE = "claude, no billing line"
"""Claude Code with ``CLAUDE_CODE_ATTRIBUTION_HEADER=0``, as `launch` starts it: the first part of its system text is
another one in each conversation."""
__all__ = ["selector"]  # a fixture


@dataclass(frozen=True)
class Recorded:
    """A request of one user."""

    asked: ChatRequest
    answer: Message
    conversation: str


def of_user(client: str, user: int) -> Iterator[Recorded]:
    """What an agent has sent, without pictures."""
    name = client.partition(",")[0]
    for record in recorded(name):
        body, reply = record["body"], record["reply"]
        if client == NO_BILLING_LINE and isinstance(body.get("system"), list):
            kept = [part for part in body["system"] if not part["text"].startswith("x-anthropic-billing-header:")]
            body = body | {"system": kept}
        if '"image' in json.dumps(body):
            continue
        asked = translate(name, record | {"body": body})
        first = next(place for place, message in enumerate(asked.messages) if message.role == "user")
        messages = list(asked.messages)
        messages[first] = replace(messages[first], content=f"I am user {user}. {messages[first].content}")
        calls = tuple(ToolCall(call["id"], call["name"], call["arguments"]) for call in reply["calls"])
        answer = Message("assistant", reply["text"], reply["reasoning"] or None, calls)
        key = route_key(body, {name.lower(): value for name, value in record["headers"].items()}).conversation
        asked = replace(asked, messages=tuple(messages), session=asked.session and f"{asked.session}-{user}")
        yield Recorded(asked, answer, f"{user} {key[0]}")


def interleaved(client: str, chance: random.Random) -> Iterator[Recorded]:
    users = [of_user(client, user) for user in range(USERS)]
    while users:
        user = chance.choice(users)
        try:
            yield next(user)
        except StopIteration:
            users.remove(user)


def agreement(selector: str, client: str) -> tuple[float, int]:
    """(part of the prompts for which the selector's node is one of those with the most stored, number of prompts)."""
    chance = random.Random(client)
    homes: dict[str, int] = {}
    agreed = count = 0
    with known_nodes(selector, client, STORED_TOKENS) as nodes:
        for count, sent in enumerate(interleaved(client, chance), 1):
            wanted = [node.reused(sent.asked) for node in nodes]
            chosen = select(selector, client, routers_tokens(sent.asked))
            agreed += wanted[chosen - 1] >= max(wanted) - 64  # a router's unit is a block
            if wanted[chosen - 1] < max(wanted) - 64:
                print(f"{client} {count}: {wanted}, {chosen} was chosen for {sent.conversation}")
            home = nodes[homes.setdefault(sent.conversation, chance.randrange(2))]
            home.answer(sent.asked, sent.answer, count, odd=False)
            home.published(selector, client)
            if count == PROMPTS:
                break
    return agreed / count, count


@pytest.mark.thorough
@pytest.mark.parametrize("client", ["pi", "claude", NO_BILLING_LINE, "opencode", "openclaw"])
def test_real_agents_are_sent_where_explain_sends_them(selector: str, client: str) -> None:
    if not (FOLDER / client.partition(",")[0]).is_dir():
        pytest.skip("no recorded traces here")
    share, count = agreement(selector, client)
    print(f"{client}: {share:.1%} of {count}")
    assert share >= 0.95
