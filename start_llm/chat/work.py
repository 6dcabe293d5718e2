"""What a request asks of the engine: a parser and a piece of work for each choice. Runs on HTTP threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from start_llm.chat.handle import ModelHandle
from start_llm.core.request import ChatRequest
from start_llm.core.work import Constraint, Sink, Submit, ThinkingLimit
from start_llm.parsing.choice import ChoiceParser, Detokenizer, RawChoiceParser
from start_llm.parsing.repetition import RepetitionGuard
from start_llm.parsing.stream import OutputParser, RawParser
from start_llm.prompt.pipeline import Prepared

_ONE_SHOT_TOKENS = 2048  # what took longer to compute is worth keeping, whatever it was for


class RequestWork:
    """The engine's work for a request. `constraint` and `max_tokens` are known once it is submitted."""

    constraint: Constraint | None = None
    max_tokens: int = 1

    def __init__(self, request: ChatRequest, model: ModelHandle, prepared: Prepared) -> None:
        self._request = request
        self._model = model
        self._prepared = prepared

    def choice(self, index: int) -> ChoiceParser:
        """A parser for this choice."""
        work_id = f"{self._request.id}#{index}"
        if self._request.prompt is not None:
            raw = Detokenizer(self._model.detokenizer(), raw=True)
            return RawChoiceParser(index, RawParser(self._request.stop, index), raw, work_id)
        parser = OutputParser(
            self._model.style,
            tools=self._request.tools,
            stop=self._request.stop,
            in_reasoning=self._prepared.rendering.in_reasoning,
            tool_calls=bool(self._request.tools) and self._request.tool_choice.mode != "none",
            whole=not self._request.stream,
            choice=index,
        )
        detokenizer = Detokenizer(self._model.detokenizer(), raw=bool(self._prepared.request.begun))
        guard = RepetitionGuard(self._text_of) if self._request.sampling.repetition_guard else None
        single = not self._request.parallel_tool_calls
        return ChoiceParser(index, parser, detokenizer, work_id, single_call=single, guard=guard)

    def _text_of(self, tokens: Sequence[int]) -> str:
        return "".join(map(self._model.token_text, tokens))

    def of(self, choice: ChoiceParser, sink: Sink, said: Sequence[int] = ()) -> Submit:
        """What the model thread is to do; `said`: tokens of the answer that stand already, its reasoning closed."""
        sampling, prompt = self._request.sampling, self._prepared.prompt
        seed = None if sampling.seed is None else sampling.seed + choice.index
        return Submit(
            id=choice.work_id,
            prompt=replace(prompt, tokens=(*prompt.tokens, *said)) if said else prompt,
            sampling=replace(sampling, seed=seed),
            max_tokens=max(1, self.max_tokens - choice.completion),
            sink=sink,
            logprobs=self._request.logprobs,
            constraint=self.constraint,
            thinking=None if said else self._thinking_limit(),
            views=None if self._model.views is None else partial(self._model.views, self._request.messages),
            session=self._prepared.session,
            owner=self._request.owner,
            conversation=self._request.conversation,
            one_shot=self._prepared.one_shot and len(prompt.tokens) < _ONE_SHOT_TOKENS,
            model=self._model.model,
        )

    def _thinking_limit(self) -> ThinkingLimit | None:
        budget, tags = self._request.thinking_budget, self._model.think_tokens
        if budget is None or tags is None:
            return None
        return ThinkingLimit(budget, *tags, inside=self._prepared.rendering.in_reasoning)
