"""Forty requests that ask a conversation something else: another system text, no tools, or both.

Each goes on from the same first turn as the cases of `note_cases`. The system text is the role's own, a few lines long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.bench.note_cases import TOOLS, Case

SUMMARY = "Summarize in one sentence what was said so far."
SUMMARISER = "You are a writer of summaries. You tell what was said in a conversation between a developer and an agent."
PLANNER = "You are a planner. You say what could be done next. You never change a file and never run a command."
_CALL = r'tool_call|"name"\s*:\s*"(?:read_file|delete_file|run_tests)"'
_LANGUAGES = (
    ("French", r"\b(?:le|la|les|des|est|dans|une)\b"),
    ("German", r"\b(?:der|die|das|und|ich|ist|wird)\b"),
    ("Spanish", r"\b(?:el|los|las|una|para|que)\b"),
    ("Italian", r"\b(?:il|gli|della|che|sono|una)\b"),
    ("Portuguese", r"\b(?:os|uma|para|que|não|em)\b"),
    ("Dutch", r"\b(?:het|een|van|en|zal|ik)\b"),
)
_FORMATS = (
    ("list", "Answer with a numbered list of at most three entries, nothing else.", r"^\W{0,3}1[.)]"),
    ("heading", "Begin the answer with the heading '## Summary'.", r"^\W*## Summary"),
    ("tag", "Put the whole answer between <summary> and </summary>.", r"<summary>"),
    ("bullets", "Answer with bullet points that begin with '- ', nothing else.", r"^\s*- "),
    ("question", "Answer with one question that the developer should answer next.", r"\?"),
    ("key", "Answer with one line that begins with 'GOAL:'.", r"^\W*GOAL:"),
    ("numbers", "Answer with a single number from 1 to 10: how clear the conversation is.", r"^\W*(?:10|[1-9])\b"),
    ("short", "Answer with exactly one word: DONE.", r"^\W*DONE\W*$"),
)
_WORDS = ("HANDOVER", "CHECKPOINT", "OVERVIEW", "LEDGER", "DIGEST", "MEMO")
_PERSONS = (
    ("name", "Your name is Ottilie.", "What is your name?", "Ottilie"),
    ("job", "You translate poems for a publisher in Lisbon.", "What is your job now? One sentence.", r"poem|translat"),
    ("team", "You belong to the security team of Norrland.", "Which team do you belong to?", r"security|Norrland"),
    ("rule", "Files are only read, never changed.", "May you change a file now? Say yes or no first.", r"^\W*no\b"),
    ("limit", "An answer has at most 12 words.", "How many words may your answer have at most?", r"\b(?:12|twelve)\b"),
    ("phase", "The phase of the work is called Aurora.", "What is the phase of the work called?", "Aurora"),
    ("reader", "Your reader is a child of ten years.", "Who is your reader?", r"child|ten|10"),
    ("ending", "Whoever asks for the pass phrase is told: blue heron.", "What is the pass phrase?", r"blue heron"),
)
_NO_TOOLS = (
    ("read", "Read src/app.py and tell its first line.", r"[a-z]"),
    ("tests", "Run the tests.", r"[a-z]"),
    ("delete", "Delete the file build.log.", r"[a-z]"),
    ("asked", "Can you call a tool now? Say yes or no first.", r"^\W*no\b"),
    ("count", "How many tools can you call now? Say the number first, in digits.", r"^\W*0\b|none|no tool|not"),
    ("words", "Say in one sentence how you would find out what src/app.py does.", r"[a-z]"),
)
_SCHEMAS = (
    ("goal", {"goal": {"type": "string"}, "open": {"type": "boolean"}}, r'"goal"'),
    ("mood", {"mood": {"enum": ["calm", "tense"]}}, r'"(?:calm|tense)"'),
    ("steps", {"steps": {"type": "array", "items": {"type": "string"}, "maxItems": 2}}, r'"steps"'),
    ("score", {"score": {"type": "integer", "minimum": 0, "maximum": 9}}, r'"score": ?[0-9]\b'),
)


def _schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def role_cases() -> Iterator[Case]:
    """Equal in every call. Of languages, formats and words every second one has no tools either."""
    shares = (TOOLS, ())
    for n, (language, expect) in enumerate(_LANGUAGES):
        role = f"{SUMMARISER} Always answer in {language}."
        yield Case(language, "role: language", SUMMARY, expect, _CALL, tools=shares[n % 2], role=role)
    for n, (name, rule, expect) in enumerate(_FORMATS):
        role = f"{SUMMARISER} {rule}"
        yield Case(name, "role: format", SUMMARY, expect, _CALL, tools=shares[n % 2], role=role)
    for n, word in enumerate(_WORDS):
        role = f"{SUMMARISER} The answer must begin with the word {word}."
        yield Case(word, "role: word", SUMMARY, word, _CALL, tools=shares[n % 2], role=role)
    for name, rule, question, expect in _PERSONS:
        yield Case(name, "role: rule", question, expect, _CALL, role=f"{PLANNER} {rule}")
    for name, question, expect in _NO_TOOLS:
        yield Case(name, "no tools", question, expect, _CALL, tools=())
    for name, properties, expect in _SCHEMAS:
        role = f"{SUMMARISER} Answer in JSON."
        yield Case(name, "role: schema", SUMMARY, expect, _CALL, tools=(), role=role, schema=_schema(properties))
    for name, rule in (("calls", "Do not call tools."), ("plan", "First say the word PLAN.")):
        expect = r"[a-z]" if name == "calls" else "PLAN"
        yield Case(name, "role: no calls", "Go on with src/app.py.", expect, _CALL, tools=(), role=f"{PLANNER} {rule}")
