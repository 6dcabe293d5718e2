"""The tokens that a router makes of a client's messages: the template applied to them as they were sent.

What this server shows its model can be more: reasoning that the client left out, notes, blocks as they were shown
before. A router knows nothing of that, so published KV events speak of the plain tokens (`kvcache/events`).
"""

from __future__ import annotations

from dataclasses import replace

from start_llm.core.messages import Message
from start_llm.core.prompt import FIRST_IMAGE_ID
from start_llm.core.request import ChatRequest
from start_llm.files.lru import Lru
from start_llm.prompt.predict import followers, known_until
from start_llm.prompt.prepared import Prepared
from start_llm.prompt.render import Renderer
from start_llm.prompt.tokenise import Coder
from start_llm.prompt.tree import Rendering

_KEPT = 64  # conversations whose last text is kept, so that the next turn encodes only what is new


class PlainTokens:
    """Thread-safe."""

    def __init__(self, renderer: Renderer, coder: Coder) -> None:
        self._renderer, self._coder = renderer, coder
        self._last: Lru[tuple[str | None, str], Rendering] = Lru(_KEPT)

    def of(self, prepared: Prepared, answer: Message) -> list[tuple[int, ...]]:
        """Those of the request's messages and `answer`, in each way in which the next request may carry it: without its
        reasoning, and with it where the template then shows it.

        They end before the first image: its tokens are a router's own matter. Raises BadRequest: the template refuses
        these messages.
        """
        ways = [replace(answer, reasoning=None), *([answer] if answer.reasoning else [])]
        renderings = [self._render(prepared.request, sent) for sent in ways]
        different = {rendering.text: rendering for rendering in renderings}.values()
        return [self._tokens((prepared.request.owner, prepared.session), rendering) for rendering in different]

    def _render(self, request: ChatRequest, answer: Message) -> Rendering:
        """The conversation, and stand-ins for what will follow `answer`."""
        messages = [*request.messages, answer, *followers(answer, [])]
        variables = dict(request.template_kwargs)
        if request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        return self._renderer.render(messages, request.tools, variables)

    def _tokens(self, key: tuple[str | None, str], text: Rendering) -> tuple[int, ...]:
        """Those in front of the stand-ins and of the first image."""
        rendering = self._coder.code_again(text, self._last.get(key) or Rendering("", 0))
        self._last.put(key, rendering)
        tokens = rendering.tokens[: rendering.anchor_at(known_until(rendering.text)).token]
        image = next((index for index, token in enumerate(tokens) if token >= FIRST_IMAGE_ID), len(tokens))
        return tokens[:image]
