"""How models mark their thinking."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningStyle:
    """A pair of tags around reasoning.

    Attributes:
        start, end: the tags; both ``""`` where the model has none.
        drop: further structural markup that is never shown.
        channels: gpt-oss's harmony: messages with headers instead of tags.
    """

    id: str
    start: str = ""
    end: str = ""
    drop: tuple[str, ...] = ()
    channels: bool = False


REASONING_STYLES: dict[str, ReasoningStyle] = {
    style.id: style
    for style in (
        ReasoningStyle("null"),
        ReasoningStyle("think_tag", "<think>", "</think>"),
        ReasoningStyle("mistral", "[THINK]", "[/THINK]"),
        ReasoningStyle("longcat", "<longcat_think>", "</longcat_think>"),
        ReasoningStyle("think_marks", "<|think:start|>", "<|think:end|>"),
        ReasoningStyle("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningStyle(
            "kimi_k3",
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        ),
        ReasoningStyle("harmony", channels=True),
    )
}


def reasoning_style(start: str, end: str) -> ReasoningStyle:
    """The style with these tags: one of ours, or a new one named after its opening tag."""
    known = (style for style in REASONING_STYLES.values() if start and (style.start, style.end) == (start, end))
    return next(known, ReasoningStyle(start or "null", start, end))
