"""The tokens that a router makes of a client's messages: the template applied to them as they were sent.

What this server shows its model can be more: reasoning that the client left out, notes, blocks as they were shown
before. A router knows nothing of that, so published KV events speak of the plain tokens (`kvcache/events`).
"""

from __future__ import annotations

from dataclasses import replace

from start_llm.core.messages import Message
from start_llm.core.prompt import FIRST_IMAGE_ID
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

    def of(self, prepared: Prepared, answer: Message) -> tuple[int, ...]:
        """Those of the request's messages and `answer`, as the next request will carry it: without its reasoning.

        They end before the first image: its tokens are a router's own matter. Raises BadRequest: the template refuses
        these messages.
        """
        request = prepared.request
        sent = replace(answer, reasoning=None)
        messages = [*request.messages, sent, *followers(sent, [])]
        variables = dict(request.template_kwargs)
        if request.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", request.reasoning_effort)
        text = self._renderer.render(messages, request.tools, variables)
        key = (request.owner, prepared.session)
        old = self._last.get(key) or Rendering("", 0)
        rendering = self._coder.code_again(text, old)
        self._last.put(key, rendering)
        tokens = rendering.tokens[: rendering.anchor_at(known_until(rendering.text)).token]
        image = next((index for index, token in enumerate(tokens) if token >= FIRST_IMAGE_ID), len(tokens))
        return tokens[:image]
