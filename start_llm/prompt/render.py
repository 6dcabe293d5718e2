"""Messages to text: a conversation, fitted to what the template can show, is rendered once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from start_llm.core.errors import BadRequest
from start_llm.core.messages import MARK, Message, Tool
from start_llm.files.lru import Lru
from start_llm.prompt.fit import Dicts, Fitter
from start_llm.prompt.guard import CUT, NOTHING, Guard
from start_llm.prompt.reading import digest_of, leading_systems
from start_llm.prompt.textdiff import common_prefix
from start_llm.prompt.traits import TemplateError, Traits
from start_llm.prompt.tree import Rendering

if TYPE_CHECKING:
    from start_llm.prompt.hf import HFTemplate

_KEPT = 256


class Renderer:
    """Renders with one template. Thread-safe."""

    def __init__(
        self,
        template: HFTemplate,
        traits: Traits,
        *,
        preserve_thinking: bool,
        images: bool = False,
        guard: Guard = NOTHING,
    ) -> None:
        """`images`: messages may hold marks of images; a template that takes parts is given their texts as parts."""
        self._template = template
        self.traits = traits
        self._preserve = preserve_thinking
        self._guard = guard
        names = "nora7" in self._tried([{"role": "user", "content": "alpha7", "name": "nora7"}], None, True)
        self._fit = Fitter(traits, preserve_thinking=preserve_thinking, guard=guard, names=names).fit
        self._joins = images and self._takes_parts()
        self._suffixes: Lru[str, str] = Lru(_KEPT)
        self._heads: Lru[bytes, int] = Lru(_KEPT)

    def variables(self, *, thinking: bool, effort: str | None, extra: dict[str, Any]) -> dict[str, Any]:
        """Template variables; the client's own win. Raises BadRequest: it names what is no variable of a template."""
        if reserved := sorted(self._template.reserved & extra.keys()):
            raise BadRequest(
                f"chat_template_kwargs.{reserved[0]} is not allowed: it is not a variable of the template",
                param="chat_template_kwargs",
            )
        if extra.get("documents") and "documents" not in (self._template.source or ""):
            why = "the template of this model shows none; send them in a message"
            raise BadRequest(f"chat_template_kwargs.documents: {why}.", param="chat_template_kwargs.documents")
        chosen: dict[str, Any] = dict.fromkeys(self.traits.switches, thinking)
        if self.traits.preserve:
            chosen["preserve_thinking"] = self._preserve
        if effort is not None:
            chosen["reasoning_effort"] = effort
        chosen.update(self._guard.value(extra))
        return chosen

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any], begun: str = ""
    ) -> Rendering:
        """Text with the generation prompt, and how the answer begins; no tokens yet.

        Raises BadRequest: the template refuses the conversation, or begins every answer with thoughts.
        """
        dicts, functions = self._fit(messages, tools)
        if self._joins:
            dicts = [{**each, "content": _parts(each.get("content"))} for each in dicts]
        text = self._text(dicts, functions, True, variables)
        suffix = self._suffix(variables)
        if suffix and text.endswith(suffix):
            generation = len(text) - len(suffix)
        else:
            generation = common_prefix(text, self._text(dicts, functions, False, variables))
        rendering = Rendering(text, generation, self._head(text, messages, tools, variables))
        if not begun:
            return rendering
        if rendering.in_reasoning:
            why = "this model begins each answer with its thoughts, so it cannot continue one"
            place = f"messages[{len(messages)}]"
            raise BadRequest(f"{place}: {why}; end with a message of the user or a tool.", param="messages")
        # A cut: the tokens before it are those behind which the model itself would begin.
        opening = self._opening(text, messages, tools, variables)
        return replace(rendering, text=text + opening + CUT + self._guard.text(begun, "assistant"))

    def _opening(self, text: str, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any]) -> str:
        """What stands between the generation prompt, the end of `text`, and an answer's words: a channel."""
        word = "alpha7"
        whole = self._tried(*self._fit([*messages, Message("assistant", word)], tools), False, **variables)
        frame, found, _ = whole.rpartition(word)
        return frame[len(text) :] if found and frame.startswith(text) else ""

    def _takes_parts(self) -> bool:
        """Whether the template takes a message's content as a list of text parts."""
        parts = [{"type": "text", "text": "alpha7"}, {"type": "text", "text": "bravo7"}]
        text = self._tried([{"role": "user", "content": parts}], None, True)
        return 0 <= text.find("alpha7") < text.find("bravo7") and "'text'" not in text

    def _tried(self, dicts: Dicts, functions: Dicts | None, agp: bool, **variables: Any) -> str:
        """The text; nothing if the template refuses it."""
        try:
            return self._template.render(dicts, functions, agp, **variables)
        except TemplateError:
            return ""

    def _text(self, dicts: Dicts, functions: Dicts | None, agp: bool, variables: dict[str, Any]) -> str:
        try:
            return self._template.render(dicts, functions, agp, **variables)
        except TemplateError as error:
            raise BadRequest(f"The model's chat template refuses these messages: {error}", param="messages") from error

    def _suffix(self, variables: dict[str, Any]) -> str:
        """The generation prompt as it usually looks with these variables."""
        key = json.dumps(variables, sort_keys=True, default=repr)
        if (known := self._suffixes.get(key)) is not None:
            return known
        user: Dicts = [{"role": "user", "content": "x"}]
        opened, closed = (self._tried(user, None, agp, **variables) for agp in (True, False))
        suffix = opened[len(closed) :] if closed and opened.startswith(closed) else ""
        self._suffixes.put(key, suffix)
        return suffix

    def _head(self, text: str, messages: Sequence[Message], tools: Sequence[Tool], variables: dict[str, Any]) -> int:
        """How far a conversation with the same tools and system text, but another user message, has the same text."""
        lead = leading_systems(messages)
        if not lead and not tools:
            return 0
        texts = (f"{message.name or ''}\n{message.content}" for message in messages[:lead])
        functions = json.dumps([tool.as_function() for tool in tools])
        key = digest_of(*texts, functions, json.dumps(variables, sort_keys=True, default=repr))
        known = self._heads.get(key)
        if known is not None and known <= len(text):
            return known
        probe = (*messages[:lead], Message("user", "\N{SECTION SIGN}"))
        head = common_prefix(text, self._tried(*self._fit(probe, tools), False, **variables))
        self._heads.put(key, head)
        return head


def _parts(content: Any) -> Any:
    """A text with marks of images, in parts; any other content as it is."""
    if not isinstance(content, str) or MARK.search(content) is None:
        return content
    ends = sorted({0, len(content), *(place for mark in MARK.finditer(content) for place in mark.span())})
    return [{"type": "text", "text": content[start:end]} for start, end in pairwise(ends)]
