"""One of the answers of a request, while its tokens come in: text, calls, logprobs, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from start_llm.core import events as ev
from start_llm.core.messages import Message
from start_llm.parsing.repetition import RepetitionGuard
from start_llm.parsing.stream import OutputParser

_BROKEN = "\ufffd"
_BEFORE = "\n"


class Detokenizer:
    """One per choice; one thread. A character that is not complete yet is held back.

    `streaming`: mlx-lm's, a fresh one. With `raw` a space at the beginning stays, as the text goes on from a prompt;
    mlx-lm drops it from an empty text.
    """

    def __init__(self, streaming: Any, *, raw: bool = False) -> None:
        self._streaming = streaming
        if raw and "text" in vars(streaming):
            vars(streaming).update(text=_BEFORE, offset=len(_BEFORE))

    def feed(self, token: int) -> str:
        """The text that this token completes, maybe ``""``."""
        self._streaming.add_token(token)
        return str(self._streaming.last_segment)

    def finish(self) -> str:
        """The rest. Bytes that never became a character are left out."""
        self._streaming.finalize()
        return str(self._streaming.last_segment).rstrip(_BROKEN)


class Ending(Enum):
    """Why an answer ends where it does; the first four by the engine's word for it."""

    MODEL = "stop"
    LIMIT = "length"
    WATCHDOG = "deadline"
    CANCELLED = "cancelled"
    STOP_STRING = "a stop string of the client's came; the model had gone on"
    OTHERS_TURN = "the model began to write somebody else's turn"
    REPETITION = "it repeats itself, and would go on"
    SECOND_CALL = "a second call came where one at most is allowed; it is not passed on"


_FINISH_REASONS: dict[Ending | None, ev.FinishReason] = {
    Ending.LIMIT: "length",
    Ending.WATCHDOG: "length",
    Ending.REPETITION: "length",
    Ending.CANCELLED: "cancelled",
}


@dataclass(slots=True)
class ChoiceParser:
    """Used by the thread of its request."""

    index: int
    parser: OutputParser
    detokenizer: Detokenizer
    work_id: str  # the engine's name of it
    is_anew: bool = False  # its work was given up, and begun once more with what stands of the answer
    single_call: bool = False  # a second call ends the answer
    guard: RepetitionGuard | None = None  # ends an answer that repeats itself
    # `said`, `repeats`: all tokens so far, and the period in which their end repeats, once that is certain
    said: list[int] = field(default_factory=list)
    repeats: int = 0
    ending: Ending | None = None  # set as soon as nothing that is generated from there on belongs to the answer
    # `over`, `seen`: the engine has sent its final event; text or a call of it have been passed on
    over: bool = False
    seen: bool = False
    # what was generated, if the answer is just that: an answer that ends before its tokens do has none
    tokens: tuple[int, ...] = ()
    # `completion`, `reasoning`: tokens generated, and those of reasoning among them
    completion: int = 0
    reasoning: int = 0
    _pending: list[ev.TokenLogprob] = field(default_factory=list)

    def without_repetition(self, period: int) -> list[int]:
        """The tokens so far, without what repeats the last period: two of them are left."""
        run = self.guard.run(period) if self.guard is not None else 0
        return self.said[: len(self.said) - run + period]

    def message(self) -> Message:
        """The answer as an assistant message."""
        parsed = self.parser.parsed()
        return replace(parsed, tool_calls=parsed.tool_calls[:1]) if self.single_call else parsed

    def sampled(self, token: int, logprob: ev.TokenLogprob | None) -> list[ev.Event]:
        """A token was generated."""
        if self.ending is not None:
            return []  # the model thread may be some tokens ahead, by a block of them if it drafts
        self.completion += 1
        self.said.append(token)
        if self.guard is not None and (period := self.guard.add(token)):
            self.repeats, self.ending = period, Ending.REPETITION
        events = self._take(self.detokenizer.feed(token), logprob)
        if self.parser.in_reasoning or (events and all(isinstance(event, ev.ReasoningDelta) for event in events)):
            self.reasoning += 1
        return events

    def finish(
        self, reason: Literal["stop", "length", "cancelled", "deadline"], tokens: tuple[int, ...]
    ) -> list[ev.Event]:
        """The generation is over, with these tokens. The last event is the choice's own."""
        self.over = True
        events: list[ev.Event] = []
        if self.ending is None:
            self.tokens = tokens
            events += self._take(self.detokenizer.finish(), None)
        cut = reason in {"length", "deadline"} or self.ending is Ending.REPETITION
        events += self._passed(self.parser.finish(cut=cut))
        # Some endings show only at the end of the text. And what the client was not told must not stand in the next
        # prompt.
        if self.ending is not None or not self.parser.faithful:
            self.tokens = ()
        self.ending = self.ending or Ending(reason)
        why = _FINISH_REASONS.get(self.ending, "tool_calls" if self.parser.parsed().tool_calls else "stop")
        return [*events, ev.ChoiceDone(why, self.index, self.parser.stopped)]

    def _take(self, text: str, logprob: ev.TokenLogprob | None) -> list[ev.Event]:
        self._completed(text, logprob)
        return self._passed(self.parser.feed(text))

    def _passed(self, events: list[ev.Event]) -> list[ev.Event]:
        """What of the parser's events the client is told."""
        if self.ending is Ending.SECOND_CALL:
            return []
        if self.single_call:
            calls = (i for i, event in enumerate(events) if isinstance(event, ev.ToolCallStarted) and event.index > 0)
            end = next(calls, None)
            if end is not None:
                self.ending, events = Ending.SECOND_CALL, events[:end]
        if self.ending is None and self.parser.ended:
            self.ending = Ending.OTHERS_TURN if self.parser.stopped is None else Ending.STOP_STRING
        self.seen = self.seen or any(isinstance(event, ev.TextDelta | ev.ToolCallStarted) for event in events)
        return self._with_logprobs(events)

    def _completed(self, text: str, logprob: ev.TokenLogprob | None) -> None:
        """The last token completed this text; without a logprob it may be what stands behind all tokens."""
        if logprob is not None:
            self._pending.append(logprob)

    def _with_logprobs(self, events: list[ev.Event]) -> list[ev.Event]:
        """Hands the logprobs of the tokens so far to the visible text among the events."""
        if not self._pending or not events:
            return events
        for i, event in enumerate(events):
            if isinstance(event, ev.TextDelta):
                events[i] = replace(event, logprobs=tuple(self._pending))
                break
        self._pending.clear()
        return events


@dataclass(slots=True)
class RawChoiceParser(ChoiceParser):
    """Each token's logprob has the text that the token completed, and goes out with the end of that text.

    So the texts of the tokens, joined, are the answer's text: of a token in which a stop string begins it has what
    stands in front of that. Tokens of a stop string have none.
    """

    _passed_on: int = 0  # characters that went out
    _begin: int = 0  # where the text of the first token that waits begins

    def _completed(self, text: str, logprob: ev.TokenLogprob | None) -> None:
        if logprob is not None:
            self._pending.append(replace(logprob, text=text))
        elif self._pending:
            last = self._pending[-1]
            self._pending[-1] = replace(last, text=(last.text or "") + text)

    def _with_logprobs(self, events: list[ev.Event]) -> list[ev.Event]:
        for index, event in enumerate(events):
            if isinstance(event, ev.TextDelta):
                self._passed_on += len(event.text)
                due = []
                while self._pending and self._begin < self._passed_on >= self._begin + len(self._pending[0].text or ""):
                    due.append(self._pending.pop(0))
                    self._begin += len(due[-1].text or "")
                events[index] = replace(event, logprobs=tuple(due))
        if self.parser.ended and self._pending and self._begin < self._passed_on:
            split = self._pending.pop(0)
            text = (split.text or "")[: self._passed_on - self._begin]
            events.append(ev.TextDelta("", self.index, (replace(split, text=text),)))
            self._begin = self._passed_on
        return events
