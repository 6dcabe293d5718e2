"""What is proposed for one client holds no word that another one read or was told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from start_llm.engine.decode import drafting
from start_llm.engine.decode.draft import Proposal, SuffixIndex
from tests.integration.live import Live
from tests.kinds import some
from tests.oracle import make_tokenizer

OPENING = "The door opens with these words, in this order: "
SECRET = "heron, walnut, trumpet, glacier, saddle, and then the bell."
OTHER = "no words at all, for it has no lock."
ASK = [{"role": "user", "content": "How does the door open?"}]


@dataclass
class Seen:
    """What was in the indexes, and what they proposed, as texts."""

    held: list[str] = field(default_factory=list)
    proposed: list[str] = field(default_factory=list)


@pytest.fixture
def seen(indexed: None, cheap_passes: None, monkeypatch: pytest.MonkeyPatch) -> Seen:
    found, decode = Seen(), make_tokenizer().decode

    class Watched(SuffixIndex):
        def __init__(self, prompt: Sequence[int], others: Sequence[Sequence[int]] = ()) -> None:
            found.held += [decode(np.asarray(tokens).tolist()) for tokens in (prompt, *others)]
            super().__init__(prompt, others)

        def propose(self, most: int) -> Proposal | None:
            proposal = super().propose(most)
            if proposal is not None:
                found.proposed.append(decode(proposal.tokens))
            return proposal

    monkeypatch.setattr(drafting, "SuffixIndex", Watched)
    return found


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], object]:
    """Sets what the model says next, whatever it is asked."""
    path = tmp_path / "reply.txt"
    monkeypatch.setenv("ORACLE_REPLIES", str(path))
    return lambda text: path.write_text(text, "utf-8")


def hides_it(seen: Seen, says: Callable[[str], object], answer: Callable[[], str]) -> bool:
    """Whether another answer, that begins as the secret did, is made of its own client's words alone."""
    seen.held.clear()
    seen.proposed.clear()
    says(OPENING + OTHER)
    assert answer() == OPENING + OTHER
    return bool(seen.held) and not any(
        word in text for word in SECRET[:13].split(", ") for text in (*seen.held, *seen.proposed)
    )


def ask(server: Live, who: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    headers = {"Authorization": f"Bearer {who['key']}"} if "key" in who else {}
    body = {"model": "default", "messages": messages, **{name: who[name] for name in who if name != "key"}}
    response = server.post("/v1/chat/completions", json=body, headers=headers)
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


def complete(server: Live, prompt: str) -> str:
    body = {"model": "default", "prompt": prompt, "max_tokens": 60}
    response = server.post("/v1/completions", json=body)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


def test_what_a_client_has_sent_is_proposed_to_it(
    servers: Callable[..., Live], seen: Seen, says: Callable[[str], object]
) -> None:
    """So the other tests here could see a word of another client."""
    who = {"session_id": "door-0", "key": "first", "user": "anna"}
    says(OPENING + SECRET)
    assert ask(servers("plain"), who, [{"role": "user", "content": f"Say it: {OPENING}{SECRET}"}]) == OPENING + SECRET
    assert any(SECRET in text for text in seen.held)
    assert any("heron, walnut" in text for text in seen.proposed)


@pytest.mark.parametrize(
    ("one", "other"),
    some(
        [
            ({}, {}),
            ({"session_id": "door-1"}, {"session_id": "door-2"}),
            ({"session_id": "door-3"}, {}),
            ({"session_id": "door-4", "key": "first"}, {"session_id": "door-4", "key": "second"}),
            ({"session_id": "door-5", "user": "anna"}, {"session_id": "door-5", "user": "bert"}),
            ({"prompt_cache_key": "door-6", "key": "first"}, {"prompt_cache_key": "door-6"}),
            ({"key": "first"}, {"key": "second"}),
            ({"user": "anna"}, {"user": "bert"}),
        ],
        4,
    ),
)
def test_the_same_question_brings_no_client_the_words_of_another_one(
    servers: Callable[..., Live], seen: Seen, says: Callable[[str], object], one: dict[str, Any], other: dict[str, Any]
) -> None:
    says(OPENING + SECRET)
    assert ask(servers("plain"), one, ASK) == OPENING + SECRET
    assert hides_it(seen, says, lambda: ask(servers("plain"), other, ASK))


def test_a_conversation_that_two_clients_share_ends_where_they_part(
    servers: Callable[..., Live], seen: Seen, says: Callable[[str], object]
) -> None:
    """Both send the same transcript, so its KV is reused; what each is told behind it stays its own."""
    begun = [*ASK, {"role": "assistant", "content": "Ask again."}, {"role": "user", "content": "How, please?"}]
    one, other = {"session_id": "door-7", "key": "first"}, {"session_id": "door-8", "key": "second"}
    says(OPENING + SECRET)
    ask(servers("hybrid"), one, begun)
    tool = {"role": "user", "content": f"A note for one of us: {SECRET}"}
    ask(servers("hybrid"), one, [*begun, {"role": "assistant", "content": OPENING + SECRET}, tool])
    assert hides_it(seen, says, lambda: ask(servers("hybrid"), other, begun))


def test_raw_prompts_are_conversations_of_nobody(
    servers: Callable[..., Live], seen: Seen, says: Callable[[str], object]
) -> None:
    prompt = "<|im_start|>user\nHow does the door open?<|im_end|>\n<|im_start|>assistant\n"
    says(OPENING + SECRET)
    assert complete(servers("plain"), prompt) == OPENING + SECRET
    assert hides_it(seen, says, lambda: complete(servers("plain"), prompt))
