"""JSON schemas that a grammar can be made of, and clear errors for those that cannot."""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from start_llm.core.errors import BadRequest
from start_llm.core.limits import SUBSCHEMAS
from start_llm.parsing.schema_form import Schema, endless, malformed, size, subschemas

WHITESPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,20}"
"""Between JSON tokens: one space, or a line break and an indent. A weak model cannot lose itself in it."""

_MESSAGES = (
    (re.compile(r"^Unknown format"), "format"),
    (re.compile(r"^oneOf constraints"), "oneOf"),
    (re.compile(r"regex parse error|[Rr]egex"), "pattern"),
    (re.compile(r"^Pointer|^Resource"), "$ref"),
    (re.compile(r"^Invalid type"), "type"),
)


def any_object() -> Schema:
    return {"type": "object"}


def embed(schema: Schema, *, lenient: bool = False) -> str:
    """The schema's text for a Lark grammar's ``%json``, with our white space and nobody else's options."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def check_schema(schema: Any, param: str) -> None:
    """Makes sure that output can be held to `schema` to the letter.

    Raises:
        BadRequest: naming the field `param`, and the keyword with its place inside the schema.
    """
    if not isinstance(schema, dict):
        raise BadRequest(f"{param} must be a JSON schema object, not {type(schema).__name__}.", param=param)
    if size(schema) > SUBSCHEMAS.most:
        raise too_large(param)
    try:
        _check_form(schema, param)
        problem = _grammar_problem(schema)
    except RecursionError:
        raise BadRequest(f"{param} is nested too deeply.", param=param) from None
    if problem:
        raise BadRequest(f"{param}: {_locate(problem, schema)}", param=param)


def too_large(param: str) -> BadRequest:
    return BadRequest(
        f"{param}: at most {SUBSCHEMAS.most:,} {SUBSCHEMAS.what} are allowed.", param=param, code="limit_exceeded"
    )


def is_supported(schema: Schema, *, lenient: bool) -> bool:
    """Whether a grammar can be made of it; `lenient` passes over keywords that cannot be enforced."""
    try:
        _check_form(schema, "")
        return not _grammar_problem(schema, lenient=lenient)
    except (BadRequest, RecursionError):
        return False


def _check_form(schema: Schema, param: str) -> None:
    wrong = malformed(schema)
    if wrong is not None:
        raise BadRequest(f"{param} is not a valid JSON schema: {wrong}.", param=param)
    for path, sub in subschemas(schema):
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            target = sub.get(keyword)
            if isinstance(target, str) and not target.startswith("#"):
                raise BadRequest(
                    f"{param}: {keyword!r} at {path} points to {target!r}; only references within the schema "
                    "('#/...') are allowed.",
                    param=param,
                )
    ring = endless(schema)
    if ring is not None:
        raise BadRequest(
            f"{param}: keyword '$ref' at {ring} leads back to itself before any value is complete.", param=param
        )


def _grammar_problem(schema: Schema, *, lenient: bool = False) -> str:
    try:
        grammar = LLMatcher.grammar_from_json_schema(embed(schema, lenient=lenient))
    except ValueError:  # text or a number that has no form in its JSON
        return "it holds a value that has no JSON form"
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return str(messages[0]) if failed else ""


def _locate(problem: str, schema: Schema) -> str:
    """llguidance's message as a sentence with the keyword and where it stands."""
    first = problem.strip().splitlines()[0][:300]
    named = re.search(r"Unimplemented keys: (\[.*?\])", problem)
    if named:
        keywords = json.loads(named.group(1))
        reason = "is not supported for constrained output"
    else:
        keywords = [word for pattern, word in _MESSAGES if pattern.search(problem)][:1]
        reason = f"cannot be enforced: {first}"
    for keyword in keywords:
        value = re.search(r"^(?:Unknown format|Invalid type): (.*)$", first)
        for path, sub in subschemas(schema):
            if keyword in sub and (value is None or sub[keyword] == value.group(1)):
                return f"keyword {keyword!r} at {path} {reason}."
        return f"keyword {keyword!r} {reason}."
    return f"no output can be held to this schema: {first}."
