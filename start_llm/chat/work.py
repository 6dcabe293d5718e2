"""What a request asks of the engine: a parser and a piece of work for each choice. Runs on HTTP threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from start_llm.chat.handle import ModelHandle
from start_llm.core.request import ChatRequest
from start_llm.core.work import Constraint, Sink, Submit, ThinkingLimit
from start_llm.parsing.choice import ChoiceParser, Detokenizer, RawChoiceParser
from start_llm.parsing.registry import output_style
from start_llm.parsing.repetition import RepetitionGuard
from start_llm.parsing.stream import OutputParser
from start_llm.prompt.prepared import Prepared

_ONE_SHOT_TOKENS = 2048  # what took longer to compute is worth keeping, whatever it was for


@dataclass(frozen=True, slots=True)
class RequestWork:
    """A request whose prompt was made, and how long and in which form its answer may be."""

    request: ChatRequest
    model: ModelHandle
    prepared: Prepared
    constraint: Constraint | None
    max_tokens: int

    def choice(self, index: int) -> ChoiceParser:
        """A parser for this choice."""
        work_id = f"{self.request.id}#{index}"
        if self.request.prompt is not None:
            text = OutputParser(output_style(), stop=self.request.stop, choice=index, raw=True)
            return RawChoiceParser(index, text, Detokenizer(self.model.detokenizer(), raw=True), work_id)
        parser = OutputParser(
            self.model.style,
            tools=self.request.tools,
            stop=self.request.stop,
            in_reasoning=self.prepared.rendering.in_reasoning,
            tool_calls=bool(self.request.tools) and self.request.tool_choice.mode != "none",
            whole=not self.request.stream,
            choice=index,
        )
        detokenizer = Detokenizer(self.model.detokenizer(), raw=bool(self.prepared.request.begun))
        guard = None
        if self.request.sampling.repetition_guard:
            guard = RepetitionGuard(lambda tokens: "".join(map(self.model.token_text, tokens)))
        single = not self.request.parallel_tool_calls
        return ChoiceParser(index, parser, detokenizer, work_id, single_call=single, guard=guard)

    def of(self, choice: ChoiceParser, sink: Sink, said: Sequence[int] = ()) -> Submit:
        """What the model thread is to do; `said`: tokens of the answer that stand already, its reasoning closed."""
        sampling, prompt = self.request.sampling, self.prepared.prompt
        seed = None if sampling.seed is None else sampling.seed + choice.index - self.request.first_choice
        return Submit(
            id=choice.work_id,
            prompt=replace(prompt, tokens=(*prompt.tokens, *said)) if said else prompt,
            sampling=replace(sampling, seed=seed),
            max_tokens=max(1, self.max_tokens - choice.completion),
            sink=sink,
            logprobs=self.request.logprobs,
            constraint=self.constraint,
            thinking=None if said else self._thinking_limit(),
            views=None if self.model.views is None else partial(self.model.views, self.request.messages),
            session=self.prepared.session,
            owner=self.request.owner,
            one_shot=self.prepared.one_shot and len(prompt.tokens) < _ONE_SHOT_TOKENS,
            model=self.model.model,
        )

    def _thinking_limit(self) -> ThinkingLimit | None:
        budget, tags = self.request.thinking_budget, self.model.think_tokens
        if budget is None or tags is None:
            return None
        return ThinkingLimit(budget, *tags, inside=self.prepared.rendering.in_reasoning)
