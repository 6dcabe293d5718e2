"""An answer that ends or is cut at any character of any format: nothing is made up or doubled, no markup leaks."""

from __future__ import annotations

import json
from itertools import product

import pytest

from start_llm.core.events import TextDelta, ToolCallDelta, ToolCallFinished
from start_llm.parsing.stream import OutputParser
from tests.kinds import RUN, some
from tests.parsing.formats import RENDER
from tests.parsing.helpers import TOOLS, style_of

CALLS = [
    ("write", {"path": "a.txt", "content": "rm -rf /home/me"}),
    ("read", {"path": "b", "limit": 30, "tags": ["x", "y z"]}),
]
SAID = "Now.\n"
# What comes behind the end, and whether a limit cut the answer there.
ENDS = [("", True), ("", False), ("<|im_end|>\n<|im_start|>user\nHi", False)]


@pytest.mark.parametrize("ident", some(sorted(RENDER), 9))
def test_an_answer_may_end_anywhere(ident: str) -> None:
    before = "" if ident in {"harmony", "kimi_k3", "llama"} else SAID
    text = before + RENDER[ident](CALLS)
    ends = ENDS[:2] if ident in {"harmony", "minimax_m3"} else ENDS  # their turns end otherwise
    for end, (tail, cut) in product(range(0, len(text), 1 if RUN.whole else 3), ends):
        parser = OutputParser(style_of(ident), tools=TOOLS)
        # Pieces of any size say the same (test_nasty): only what is near the end comes letter by letter.
        pieces = [text[: max(0, end - 8)], *text[max(0, end - 8) : end], *tail]
        events = [event for piece in pieces if piece for event in parser.feed(piece)]
        events += parser.finish(cut=cut)
        said = "".join(event.text for event in events if isinstance(event, TextDelta))
        finished = [event for event in events if isinstance(event, ToolCallFinished)]
        parsed = parser.parsed()
        assert (said, [(call.name, call.arguments) for call in finished]) == (
            parsed.content,
            [(call.name, call.arguments) for call in parsed.tool_calls],
        )
        if finished:
            assert said.strip() == before.strip()
        elif cut:
            rest = "" if SAID.startswith(said) else said.removeprefix(SAID.strip()).strip()
            most = len("write") if ident == "inkling" else 2  # there a call begins with the bare name of its tool
            assert len(rest) <= most, "no markup in the text, but what might as well have been text"
        else:  # it is text, as it was written
            assert text[:end].replace("<|message_model|>", "").startswith(said.rstrip())
        assert len(finished) <= len(CALLS)
        for event, (name, arguments) in zip(finished, CALLS, strict=False):
            deltas = [e.arguments for e in events if isinstance(e, ToolCallDelta) and e.index == event.index]
            assert event.name == name and event.arguments == "".join(deltas)
            try:
                given = json.loads(event.arguments)
            except ValueError:
                assert cut  # nobody can take it for a call
                continue
            is_short = not cut and event is finished[-1] and set(given) <= set(arguments)
            assert is_short or given == arguments, f"{text[:end]!r} is no call with {event.arguments}"


def test_text_that_only_might_have_become_markup_stays() -> None:
    parser = OutputParser(style_of("hermes_json"), tools=TOOLS)
    parser.feed("if a <")
    parser.finish(cut=True)
    assert parser.parsed().content == "if a <"
