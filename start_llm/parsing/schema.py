"""What a tool's JSON schema says about a value, and how a value is brought to it."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from start_llm.core.jsontext import finite, nearest, no_constant, too_much_to_read
from start_llm.parsing.schema_form import pointed

ANY: Mapping[str, Any] = {}
STEPS = 20_000
"""Schemas that are looked at for one request's tool, all values together; after that all is valid."""
_MOST_DEPTH = 64
_MOST_LEVELS = 128  # of schemas inside one another that are looked at for their types
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_TYPE_NAMES = ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (Mapping, "object"))


@dataclass(slots=True)
class Root:
    """A whole schema, which ``$ref`` points into, with what has been found out about its parts. One thread."""

    schema: Mapping[str, Any]
    types: dict[int, frozenset[str]] = field(default_factory=dict)
    listed: dict[int, frozenset[str]] = field(default_factory=dict)
    members: dict[int, dict[str, Any]] = field(default_factory=dict)
    items: dict[int, Any] = field(default_factory=dict)
    levels: int = 0
    steps: int = STEPS


class Schema:
    """A schema and the root that its ``$ref`` point into. One thread; bad parts of a schema allow anything."""

    def __init__(self, schema: Any, root: Root | None = None) -> None:
        plain: Mapping[str, Any] = schema if isinstance(schema, Mapping) else ANY
        self._root = Root(plain) if root is None else root
        self.schema = self._resolve(plain)

    def _resolve(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        for _ in range(16):
            ref = schema.get("$ref")
            if not isinstance(ref, str) or not ref.startswith("#"):
                return schema
            target = pointed(self._root.schema, ref)
            if not isinstance(target, Mapping):
                return ANY
            schema = target
        return ANY

    def _branches(self, *words: str) -> Iterator[Schema]:
        for word in words:
            parts = self.schema.get(word)
            if isinstance(parts, list):
                yield from (Schema(part, self._root) for part in parts)

    @property
    def types(self) -> frozenset[str]:
        """JSON type names that are allowed; empty if anything is, as in a schema that refers to itself or stands too
        deep."""
        known = self._root.types
        if id(self.schema) not in known:
            known[id(self.schema)] = frozenset()  # for whoever comes back here on the way
            if self._root.levels < _MOST_LEVELS:
                self._root.levels += 1
                known[id(self.schema)] = self._own_types()
                self._root.levels -= 1
        return known[id(self.schema)]

    def _own_types(self) -> frozenset[str]:
        declared = self.schema.get("type")
        if isinstance(declared, str):
            return frozenset({declared})
        if isinstance(declared, list):
            return frozenset(str(name) for name in declared)
        if isinstance(self.schema.get("enum"), list):
            return frozenset(type_name(value) for value in self.schema["enum"])
        if "const" in self.schema:
            return frozenset({type_name(self.schema["const"])})
        for branch in self._branches("allOf"):
            if branch.types:
                return branch.types
        found = [branch.types for branch in self._branches("anyOf", "oneOf")]
        return frozenset().union(*found) if found and all(found) else frozenset()

    def allows(self, name: str) -> bool:
        types = self.types
        return not types or name in types or (name == "integer" and "number" in types)

    def _parts(self) -> Iterator[Schema]:
        """Itself, and what holds beside it or in place of it."""
        yield self
        yield from self._branches("allOf", "anyOf", "oneOf")

    def member(self, key: str) -> Schema:
        """The schema of an object's member."""
        known = self._root.members
        if id(self.schema) not in known:  # there may be thousands of alternatives, and as many names to look up
            known[id(self.schema)] = {}
            for part in self._parts():
                members = part.schema.get("properties")
                for name, schema in members.items() if isinstance(members, Mapping) else ():
                    known[id(self.schema)].setdefault(name, schema)
        found = known[id(self.schema)]
        return Schema(found[key], self._root) if key in found else self._other_members

    @property
    def _other_members(self) -> Schema:
        """Of members without a name; where there are patterns, any: nobody looks which of them a name fits."""
        others = ANY if "patternProperties" in self.schema else self.schema.get("additionalProperties")
        return Schema(others, self._root)

    @property
    def keys(self) -> tuple[str, ...]:
        members = self.schema.get("properties")
        return tuple(map(str, members)) if isinstance(members, Mapping) else ()

    @property
    def items(self) -> Schema:
        """Of a list's values; any where the first ones have schemas of their own (``prefixItems``)."""
        known = self._root.items
        if id(self.schema) not in known:
            parts = [part.schema for part in self._parts()]
            found = (schema["items"] for schema in parts if isinstance(schema.get("items"), Mapping))
            known[id(self.schema)] = ANY if any("prefixItems" in schema for schema in parts) else next(found, ANY)
        return Schema(known[id(self.schema)], self._root)

    def valid(self, value: Any, depth: int = 0) -> bool:
        """Whether `value` and its parts have a type that the schema allows, and are among the values that it lists.

        Bounds, lengths and patterns are not looked at: another type does not help against them.
        """
        self._root.steps -= 1
        if depth > _MOST_DEPTH or self._root.steps < 0:
            return True
        whole = isinstance(value, float) and value.is_integer() and self.allows("integer")
        if not (whole or self.allows(type_name(value))) or not self._is_listed(value):
            return False
        if not self._fits_branches(value, depth):
            return False
        if isinstance(value, dict):
            return self._has_members(value, depth)
        if not isinstance(value, list) or "prefixItems" in self.schema:
            return True
        items = Schema(self.schema.get("items"), self._root)
        return all(items.valid(part, depth + 1) for part in value)

    def _fits_branches(self, value: Any, depth: int) -> bool:
        for word, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
            fits = (branch.valid(value, depth + 1) for branch in self._branches(word))
            if isinstance(self.schema.get(word), list) and self.schema[word] and not enough(fits):
                return False
        return True

    def _is_listed(self, value: Any) -> bool:
        listed = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        if not isinstance(listed, list):
            return True
        known = self._root.listed
        if id(self.schema) not in known:  # a list may have 100,000 values, and be asked for each value of another one
            known[id(self.schema)] = frozenset(map(dump, listed))
        return dump(value) in known[id(self.schema)]

    def _has_members(self, value: dict[str, Any], depth: int) -> bool:
        members, required = self.schema.get("properties"), self.schema.get("required")
        known: Mapping[str, Any] = members if isinstance(members, Mapping) else ANY
        others = self.schema.get("additionalProperties")
        if isinstance(required, list) and any(isinstance(name, str) and name not in value for name in required):
            return False
        if others is False and "patternProperties" not in self.schema and not value.keys() <= known.keys():
            return False
        return all(
            (Schema(known[key], self._root) if key in known else self._other_members).valid(part, depth + 1)
            for key, part in value.items()
        )

    def coerce(self, value: Any, within: frozenset[int] = frozenset()) -> Any:
        """`value` in a type that the schema allows, if there is an obvious one; else as it is.

        `within`: schemas (by `id`) that it was put into a list for: a list of such lists has no end.
        """
        if self.valid(value):
            return value
        if isinstance(value, dict) and self.allows("object"):
            return {key: self.member(key).coerce(part) for key, part in value.items()}
        if isinstance(value, list) and self.allows("array"):
            return [self.items.coerce(part, within) for part in value]
        likely = self._candidates(value, may_be_item=id(self.schema) not in within)
        candidates = [candidate for candidate in likely if self.allows(type_name(candidate))]
        for candidate in candidates:
            if self.valid(candidate):
                return candidate
        if self.allows(type_name(value)) or not candidates:
            return value
        first = candidates[0]
        return self.coerce(first, within | {id(self.schema)}) if isinstance(first, dict | list) else first

    def _candidates(self, value: Any, *, may_be_item: bool) -> Iterator[Any]:
        """What it may have been meant to be, the likeliest first. The last one is a list of it, where that is asked."""
        word = value.strip().lower() if isinstance(value, str) else None
        if word in _BOOLEANS and "boolean" in self.types:
            yield _BOOLEANS[word]
        found, parsed = parse_literal(value.strip(), nearest) if isinstance(value, str) else (False, value)
        if found:
            yield parsed
        if isinstance(parsed, float) and parsed.is_integer():
            yield int(parsed)
        if word == "" and "null" in self.types:
            yield None
        if word is None:
            if "boolean" in self.types and value in (0, 1):
                yield bool(value)
            if value is not None:
                yield json.dumps(value, ensure_ascii=False)
        if may_be_item:
            yield [value]


ANYTHING = Schema(ANY)


def type_name(value: Any) -> str:
    """The JSON type of a Python value."""
    if value is None:
        return "null"
    return next((name for kind, name in _TYPE_NAMES if isinstance(value, kind)), "array")


def parse_literal(text: str, number: Callable[[str], float] = finite) -> tuple[bool, Any]:
    """`text` as JSON or as a Python literal of JSON's types: (found, value). What is nested too deeply is neither."""
    if too_much_to_read(text):
        return False, None
    try:
        return True, json.loads(text, strict=False, parse_constant=no_constant, parse_float=number)
    except (ValueError, RecursionError):
        pass
    try:
        return True, json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False, None


def dump(value: Any) -> str:
    """JSON text as this package writes it."""
    return json.dumps(value, ensure_ascii=False)


def escape(text: str) -> str:
    """The inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
