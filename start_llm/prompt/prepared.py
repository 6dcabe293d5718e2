"""A request ready for the engine: the prompt, and what is needed to record the answer and to explain misses."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from start_llm.core.messages import Message
from start_llm.core.prompt import Prompt
from start_llm.core.report import Miss
from start_llm.core.request import ChatRequest
from start_llm.prompt.reading import MessageChain, answer_digest, call_id, link
from start_llm.prompt.traits import Clock
from start_llm.prompt.tree import Difference, Node, Path, Rendering, nonce_after, rendering_delta
from start_llm.prompt.view import View


@dataclass(frozen=True)
class Prepared:
    """What `Composer` made of a request."""

    request: ChatRequest
    chain: MessageChain
    view: View
    rendering: Rendering  # the view as text and tokens
    prompt: Prompt
    variables: Mapping[str, Any]  # of the template
    clock: Clock | None = None  # stopped, for a template that prints the date by itself
    stem: Path | None = None  # the path whose text and tokens the rendering goes on from
    spoken: int = 0  # tokens of the answers of ours that the request carries
    new: int = 0  # prompt tokens that no earlier request of this owner had sent, and that were not generated for it
    miss: Miss | None = None  # why no base was used, or not the deepest one, as far as this room knows it

    @property
    def raw(self) -> bool:
        """The request is no conversation: its text is the prompt (`completions`)."""
        return self.request.prompt is not None

    def whole(self, answer: Message) -> Message:
        """The answer with the beginning that its client wrote: what stands in the next request."""
        begun = self.request.begun
        return replace(answer, content=begun + answer.content) if begun else answer

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines of the update note that was added."""
        return self.view.notes

    @property
    def no_calls(self) -> bool:
        """The prompt shows tools that the request does not have: none may be called."""
        return bool(self.view.tools) and not self.request.tools

    @property
    def one_shot(self) -> bool:
        """It looks like a side request (title, summary)."""
        return not self.request.tools and all(message.role != "assistant" for message in self.request.messages)

    @property
    def session(self) -> str:
        """Stable id of the conversation: the client's own, else how it begins up to its first user message."""
        if self.request.session or self.raw:
            return self.request.session or "completion"
        links = zip(self.chain.keys, self.chain.links, strict=True)
        users = (key for key, entry in links if entry.message.role == "user")
        return f"auto-{next(users, self.chain.last_key).hex()[:24]}"

    def node_of(self, answer: Message, tokens: Sequence[int], spoken: int, *, keep: bool) -> Node:
        """The answer as a node of the conversation tree. For the arguments see `Node`; `keep`: what was shown, too."""
        chain, view, stem = self.chain, self.view, self.stem
        links = chain.links[stem.node.length if stem is not None else 0 :]
        results = [entry for entry in links if entry.message.tool_call_id and not entry.facts.has("cleared")]
        digest = answer_digest(answer.content, answer.tool_calls, chain.client)
        return Node(
            id=secrets.randbits(62),
            parent=stem.node.id if stem is not None else None,
            key=link(chain.last_key, digest),
            owner=self.request.owner,
            session=self.request.session,
            nonce=nonce_after(stem, self.request.session),
            length=len(chain.keys) + 1,
            spoken=self.spoken + spoken,
            # Thoughts and moved blocks are compared anew by each request.
            difference=view.difference if view.difference > Difference.THOUGHTS else Difference.NONE,
            noted=view.noted,
            digests=(*(entry.facts.digest for entry in links), digest),
            results=tuple((call_id(entry.message.tool_call_id), entry.facts.digest) for entry in results),
            shown=(view.new[:-1] if view.transient else view.new) if keep else (),
            told=view.told,
            tools=None if stem is not None and stem.tools == view.tools else view.tools,
            clock=self.clock.moment if self.clock is not None else None,
            grown=rendering_delta(stem, self.rendering),
            answer=answer,
            answer_tokens=tuple(tokens),
        )

    def heals(self) -> bool:
        """Whether the base's answer came back without its reasoning or otherwise written."""
        base = self.view.base
        if base is None:
            return False
        sent = self.chain.entries[self.chain.indices[base.node.length - 1]].message
        return replace(sent, tool_calls=()) != replace(base.node.answer, tool_calls=())
