"""An answer that a limit cut off, at every character of every format: nothing is made up, no markup leaks."""

from __future__ import annotations

import json

import pytest

from start_llm.core.events import TextDelta, ToolCallDelta, ToolCallFinished
from start_llm.parsing.stream import OutputParser
from tests.kinds import RUN, some
from tests.parsing.formats import RENDER
from tests.parsing.helpers import TOOLS, style_of

CALLS = [("write", {"path": "a.txt", "content": "rm -rf /home/me"}), ("bash", {"command": "ls"})]
SAID = "Now.\n"


@pytest.mark.parametrize("ident", some(sorted(RENDER), 9))
def test_what_was_cut_is_never_completed(ident: str) -> None:
    before = "" if ident in {"harmony", "kimi_k3", "llama"} else SAID
    text = before + RENDER[ident](CALLS)
    for end in range(0, len(text), 1 if RUN.whole else 2):
        parser = OutputParser(style_of(ident), tools=TOOLS)
        # Pieces of any size say the same (test_formats): only what is near the cut comes letter by letter.
        pieces = [text[: max(0, end - 8)], *text[max(0, end - 8) : end]]
        events = [event for piece in pieces if piece for event in parser.feed(piece)]
        events += parser.finish(cut=True)
        said = "".join(event.text for event in events if isinstance(event, TextDelta))
        rest = "" if SAID.startswith(said) else said.removeprefix(SAID.strip()).strip()
        most = len("write") if ident == "inkling" else 2  # there a call begins with the bare name of its tool
        assert len(rest) <= most, "no markup in the text, but what might as well have been text"
        finished = [event for event in events if isinstance(event, ToolCallFinished)]
        assert [(call.name, call.arguments) for call in finished] == [
            (call.name, call.arguments) for call in parser.parsed().tool_calls
        ]
        for event, (name, arguments) in zip(finished, CALLS, strict=False):
            deltas = [e.arguments for e in events if isinstance(e, ToolCallDelta) and e.index == event.index]
            assert event.name == name and event.arguments == "".join(deltas)
            try:
                given = json.loads(event.arguments)
            except ValueError:
                continue  # nobody can take it for a call
            assert given == arguments, f"{text[:end]!r} is no call with {event.arguments}"


def test_a_block_that_has_not_become_a_call_is_dropped() -> None:
    for text in ("Now.\n<tool_call>", 'Now.\n<tool_call>\n{"name": "re'):
        parser = OutputParser(style_of("hermes_json"), tools=TOOLS)
        events = [*parser.feed(text), *parser.finish(cut=True)]
        assert "".join(event.text for event in events if isinstance(event, TextDelta)).strip() == "Now."
        assert parser.parsed().tool_calls == ()


def test_text_that_only_might_have_become_markup_stays() -> None:
    parser = OutputParser(style_of("hermes_json"), tools=TOOLS)
    parser.feed("if a <")
    parser.finish(cut=True)
    assert parser.parsed().content == "if a <"
