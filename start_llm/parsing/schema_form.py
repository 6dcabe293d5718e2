"""JSON schemas that a grammar can be made of, and clear errors for those that cannot.

A schema must be one (every keyword has a value of the right kind), must not be too large, and must end.

jsonschema's own check of the form takes a third of a millisecond for every schema inside, so seconds for a large one.
This one takes microseconds, and knows the keywords that a grammar can be made of.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from llguidance import LLMatcher

from start_llm.core.errors import BadRequest
from start_llm.core.limits import ENUM, LITERAL, MULTIPLE, SUBSCHEMAS

Schema = dict[str, Any]
Kind = tuple[Callable[[Any], bool], str]

ANY_OBJECT: Schema = {"type": "object"}
TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
LEAST = -9 * 10**18
"""llguidance 1.9 ends the process over a number that becomes -2**63, wherever it stands in ``const`` or ``enum``."""
_ONE = (
    *("not", "if", "then", "else", "contains", "additionalProperties", "propertyNames"),
    *("additionalItems", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_VALUES = (*("items", "additionalProperties"), *_LISTS, *("properties", "patternProperties"))
"""Keywords whose schemas a value may have to satisfy."""


def subschemas(schema: Schema, *, follow: bool = False) -> Iterator[tuple[str, Schema]]:
    """Every schema inside `schema`, itself first, with its JSON path; data such as ``enum`` is not entered.

    `follow`: each one that a value may have to satisfy, once; definitions only where something refers to them.
    """
    waiting: list[tuple[str, Any]] = [("$", schema)]
    seen: set[int] = set()
    while waiting:
        path, sub = waiting.pop()
        if not isinstance(sub, dict) or id(sub) in seen:
            continue
        yield path, sub
        if follow:
            seen.add(id(sub))
            waiting.append((f"{path}.$ref", pointed(schema, sub.get("$ref", ""))))
        waiting += _inside(path, sub, _OF_VALUES if follow else (*_ONE, "items", *_LISTS, *_MAPS, "dependencies"))


def _inside(path: str, sub: Schema, keywords: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What stands right inside of a schema: schemas, if it is well formed."""
    for keyword in keywords:
        match sub.get(keyword):
            case dict() as several if keyword in (*_MAPS, "dependencies"):
                yield from ((f"{path}.{keyword}.{key}", item) for key, item in several.items())
            case list() as several:
                yield from ((f"{path}.{keyword}[{i}]", item) for i, item in enumerate(several))
            case dict() as one:
                yield f"{path}.{keyword}", one


def pointed(root: Mapping[str, Any], reference: str) -> Any:
    """What a ``#/...`` points to; ``None``: nothing, or no place in this schema."""
    found: Any = root if reference == "#" or reference.startswith("#/") else None
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def size(schema: Any) -> int:
    """How many schemas there are in it, and what costs a grammar as much as so many more.

    Measured with llguidance 1.9: a plain property takes about a millisecond. A number's bound takes five; each pair of
    `patternProperties` is compared, for as long; a `multipleOf` of 10 has as many states as ten digits have; names that
    are only required are looked for among all others.
    """
    if not isinstance(schema, dict):
        return 1
    count, multiples, together = 0, set(), False
    for _, sub in subschemas(schema):
        count += 1 + _weight(sub)
        together = together or not _TOGETHER.isdisjoint(sub)
        if _MULTIPLE[0](sub.get("multipleOf")):
            multiples.add(Fraction(str(sub["multipleOf"])))
    return count + _states(multiples, together=together) // 10


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TOGETHER = frozenset({"allOf", "anyOf", "oneOf", "$ref"})


def _weight(sub: Schema) -> int:
    """Of a schema by itself, beyond one. It may be malformed."""
    required, patterns, pattern = sub.get("required"), sub.get("patternProperties"), sub.get("pattern")
    weight = 5 * sum(bound in sub for bound in _BOUNDS)
    if isinstance(required, list):
        known = sub["properties"] if isinstance(sub.get("properties"), dict) else ()
        weight += max(0, len(required) - len(known))
    if isinstance(patterns, dict):
        weight += 5 * len(patterns) * (len(patterns) - 1) // 2 + sum(map(len, patterns)) // 100
    if isinstance(pattern, str):
        weight += len(pattern) // 100
    return weight


def _states(multiples: set[Fraction], *, together: bool) -> int:
    """Of all ``multipleOf`` in a schema: their sum; their least common multiple where several may hold at once."""
    scale = math.lcm(*(multiple.denominator for multiple in multiples))
    steps = [int(multiple * scale) for multiple in multiples]
    return math.lcm(*steps) if together and len(steps) > 1 else sum(multiple.numerator for multiple in multiples)


def malformed(schema: Schema) -> str | None:
    """The first keyword whose value is of the wrong kind: ``'type' at $.items.type must be ..., not ...``."""
    values = 0
    for path, sub in subschemas(schema):
        for keyword, value in sub.items():
            kind = KINDS.get(keyword)
            if kind is not None and not kind[0](value):
                return f"{keyword!r} at {path}.{keyword} must be {kind[1]}, not {_shown(value)}"
        values += len(sub.get("enum", ()))
        if values > ENUM.most:
            return f"'enum' at {path}.enum: at most {ENUM.most:,} {ENUM.what} are allowed"
        for keyword in ("const", "enum", "pattern", "properties", "maximum", "exclusiveMaximum"):
            for scalar in _scalars(sub.get(keyword)):
                if isinstance(scalar, str) and len(scalar) > LITERAL.most:
                    return f"{keyword!r} at {path}.{keyword}: at most {LITERAL.most:,} {LITERAL.what} are allowed"
                if keyword != "properties" and _is_number(scalar) and scalar < LEAST:
                    return f"{keyword!r} at {path}.{keyword}: numbers below {LEAST:,} are not allowed"
    return None


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str | bool | None) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _scalars(value: Any) -> Iterator[Any]:
    """All strings, numbers and words in a JSON value, keys too."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        else:
            yield value


# --- whether a value can be complete ---


def endless(schema: Schema) -> str | None:
    """The JSON path of a ``$ref`` that leads back to itself before any value is complete; ``None``: there is none.

    `schema` is not `malformed`. What *ends* is found from the leaves on: whenever a part turns out to end, those that
    wait for it are looked at again.
    """
    parts = list(subschemas(schema, follow=True))
    groups = {id(part): _groups(schema, part) for _, part in parts}
    waiters: dict[int, list[int]] = {}
    for waiter, needed in groups.items():
        for part in itertools.chain(*needed):
            waiters.setdefault(id(part), []).append(waiter)
    ends: set[int] = set()
    waiting = list(groups)
    while waiting:
        part = waiting.pop()
        if part not in ends and all(
            any(one is not False and (not isinstance(one, dict) or id(one) in ends) for one in group)
            for group in groups[part]
        ):
            ends.add(part)
            waiting += waiters.get(part, ())
    return next((path for path, part in parts if id(part) not in ends and "$ref" in part), None)


def _groups(root: Schema, sub: Schema) -> list[list[Any]]:
    """Groups of schemas: `sub` ends if at least one of each group does."""
    members, required = sub.get("properties", {}), sub.get("required", ())
    found = [pointed(root, sub.get("$ref", "")), *sub.get("allOf", ()), sub.get("enum") != []]
    if sub.get("type") == "object":
        found += [members[key] for key in required if key in members]
    elif sub.get("type") == "array":
        least, first = int(sub.get("minItems", 0)), sub.get("prefixItems", [])
        found += [*first[:least], *([sub.get("items", {})] if least > len(first) else [])]
    return [*([one] for one in found), *(sub[keyword] for keyword in ("anyOf", "oneOf") if keyword in sub)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_schema, value))


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value) and len(set(value)) == len(value)


def _are_types(value: Any) -> bool:
    words = [value] if isinstance(value, str) else value
    return _are_words(words) and bool(words) and TYPES.issuperset(words)


_NUMBER: Kind = (_is_number, "a number")
_COUNT: Kind = (lambda value: _is_number(value) and value >= 0 and value == int(value), "a whole number of 0 or more")
_SCHEMA: Kind = (_is_schema, "a schema: an object or a boolean")
_SCHEMAS: Kind = (_are_schemas, "a list of schemas that is not empty")
_MAP: Kind = (
    lambda value: isinstance(value, dict) and all(map(_is_schema, value.values())),
    "an object whose values are schemas",
)
_TEXT: Kind = (lambda value: isinstance(value, str), "a string")
_MULTIPLE: Kind = (lambda value: _is_number(value) and 0 < value <= MULTIPLE.most, f"a number up to {MULTIPLE.most:,}")

KINDS: Mapping[str, Kind] = {
    "type": (_are_types, f"one of {', '.join(sorted(TYPES))}, or a list of those"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "required": (_are_words, "a list of different strings"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_are_words, value.values())),
        "an object whose values are lists of strings",
    ),
    "items": (lambda value: _is_schema(value) or value == [] or _are_schemas(value), "a schema, or a list of them"),
    "multipleOf": _MULTIPLE,
    "uniqueItems": (lambda value: isinstance(value, bool), "a boolean"),
    **dict.fromkeys(_BOUNDS, _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minContains", "maxContains"), _COUNT),
    **dict.fromkeys(_ONE, _SCHEMA),
    **dict.fromkeys(_LISTS, _SCHEMAS),
    **dict.fromkeys(_MAPS, _MAP),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef", "$id", "$schema", "$anchor"), _TEXT),
    **dict.fromkeys(("$comment", "title", "description", "contentEncoding", "contentMediaType"), _TEXT),
}


# --- from a schema to a grammar ---

WHITESPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,20}"
"""Between JSON tokens: one space, or a line break and an indent. A weak model cannot lose itself in it."""

_MESSAGES = (
    (re.compile(r"^Unknown format"), "format"),
    (re.compile(r"^oneOf constraints"), "oneOf"),
    (re.compile(r"regex parse error|[Rr]egex"), "pattern"),
    (re.compile(r"^Pointer|^Resource"), "$ref"),
    (re.compile(r"^Invalid type"), "type"),
)


def embed(schema: Schema, *, lenient: bool = False) -> str:
    """The schema's text for a Lark grammar's ``%json``, with our white space and nobody else's options."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def check_schema(schema: Any, param: str) -> None:
    """Raises BadRequest if output cannot be held to `schema` to the letter: names `param`, keyword and place."""
    if not isinstance(schema, dict):
        raise BadRequest(f"{param} must be a JSON schema object, not {type(schema).__name__}.", param=param)
    if size(schema) > SUBSCHEMAS.most:
        raise too_large(param)
    problem = _problem(schema)
    if problem:
        raise BadRequest(param + problem, param=param)


def too_large(param: str) -> BadRequest:
    return BadRequest(
        f"{param}: at most {SUBSCHEMAS.most:,} {SUBSCHEMAS.what} are allowed.", param=param, code="limit_exceeded"
    )


def is_supported(schema: Schema) -> bool:
    """Whether a grammar can be made of it that passes over keywords that cannot be enforced."""
    return not _problem(schema, lenient=True)


def _problem(schema: Schema, *, lenient: bool = False) -> str:
    """Why no grammar can be made of it, as the end of a sentence that begins with its name; ``""`` if one can."""
    try:
        wrong = malformed(schema)
        if wrong is not None:
            return f" is not a valid JSON schema: {wrong}."
        for path, sub in subschemas(schema):
            for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
                target = sub.get(keyword)
                if isinstance(target, str) and not target.startswith("#"):
                    allowed = "only references within the schema ('#/...') are allowed"
                    return f": {keyword!r} at {path} points to {target!r}; {allowed}."
        ring = endless(schema)
        if ring is not None:
            return f": keyword '$ref' at {ring} leads back to itself before any value is complete."
        try:
            grammar = LLMatcher.grammar_from_json_schema(embed(schema, lenient=lenient))
        except ValueError:  # text or a number that has no form in its JSON
            return f": {_locate('it holds a value that has no JSON form', schema)}"
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
        return f": {_locate(str(messages[0]), schema)}" if failed else ""
    except RecursionError:
        return " is nested too deeply."


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
