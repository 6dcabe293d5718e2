"""How models mark their thinking: one table, for prompts that open a block and for answers that hold one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningStyle:
    """A pair of tags around reasoning."""

    id: str
    # `start`, `end`: the tags; both ``""`` where the model has none
    start: str = ""
    end: str = ""
    also_ends: tuple[str, ...] = ()  # further tags that end it
    drop: tuple[str, ...] = ()  # further structural markup that is never shown
    channels: bool = False  # gpt-oss's harmony: messages with headers instead of tags
    # models without tags of their own write these as plain text, because a prompt asked them to or because they
    # learned it from other models. They are looked for in the answers of every model that has tags.
    spoken: bool = False


REASONING_STYLES: dict[str, ReasoningStyle] = {
    style.id: style
    for style in (
        ReasoningStyle("null"),
        ReasoningStyle("think_tag", "<think>", "</think>", spoken=True),
        ReasoningStyle("thinking_tag", "<thinking>", "</thinking>", spoken=True),
        ReasoningStyle("reasoning_tag", "<reasoning>", "</reasoning>", spoken=True),
        ReasoningStyle("mistral", "[THINK]", "[/THINK]"),
        ReasoningStyle("seed", "<seed:think>", "</seed:think>"),
        ReasoningStyle("longcat", "<longcat_think>", "</longcat_think>"),
        ReasoningStyle("think_marks", "<|think:start|>", "<|think:end|>"),
        ReasoningStyle("command", "<|START_THINKING|>", "<|END_THINKING|>"),
        ReasoningStyle("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningStyle(
            "kimi_k3",
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            drop=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        ),
        # K2 Horizon: a tag for each effort, which its template opens.
        ReasoningStyle("ifm", "<ifm|think>", "</ifm|think>", also_ends=("</ifm|think_fast>", "</ifm|think_faster>")),
        ReasoningStyle("ifm_fast", "<ifm|think_fast>", "</ifm|think_fast>"),
        ReasoningStyle("ifm_faster", "<ifm|think_faster>", "</ifm|think_faster>"),
        ReasoningStyle("hy", "<think:opensource>", "</think:opensource>"),
        ReasoningStyle("hy_v4", "<think:6124c78e>", "</think:6124c78e>"),
        # Inkling: every message ends alike, and a header stands in front of each.
        ReasoningStyle(
            "inkling",
            "<|content_thinking|>",
            "<|end_message|>",
            drop=("<|message_model|>", "<|content_text|>", "<|end_message|>", "<|content_model_end_sampling|>"),
        ),
        ReasoningStyle("harmony", channels=True),
    )
}

REASONING_TAGS: tuple[tuple[str, str], ...] = tuple(
    (style.start, style.end) for style in REASONING_STYLES.values() if style.start
)
"""Every known pair of an opening and a closing tag."""


def reasoning_style(start: str, end: str) -> ReasoningStyle:
    """The style with these tags: one of ours, or a new one named after its opening tag."""
    known = (style for style in REASONING_STYLES.values() if start and (style.start, style.end) == (start, end))
    return next(known, ReasoningStyle(start or "null", start, end))
