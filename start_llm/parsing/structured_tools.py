"""Grammars of tool calls, one function per format.

A marker that is a token of its own (``<tool_call>`` in most vocabularies) must be named by its id: a grammar's text
never matches it. So everything here asks `Lark.marker` how to write one.

The XML formats write strings as they are, without quotes. Their grammar cannot say everything that a JSON schema can:
enumerations, lengths and patterns of strings are kept to, other keywords of strings are not supported there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from start_llm.core.errors import BadRequest
from start_llm.core.messages import Tool
from start_llm.parsing.schema import Root
from start_llm.parsing.schema import Schema as ToolSchema
from start_llm.parsing.schema import dump as literal
from start_llm.parsing.schema_form import ANY_OBJECT, Schema, check_schema, embed, is_supported, pointed, subschemas
from start_llm.parsing.tools.minimax_m3 import MARK
from start_llm.parsing.tools.tagged import GLM, IFM, Tags, keyed

_OF_OTHERS = {"properties", "items", "required", "minimum", "maximum"}  # no schema of a text has these
_OF_TEXTS = ("minLength", "maxLength", "pattern", "format", "enum", "const")
_NOTES = {"title", "description", "default", "examples", "$comment", "deprecated"}
ANY_TEXT = "(?s:.*)"
_TAG_NAME = r"[^<>\s]+"


class Lark:
    """A grammar being written. Rule names must be lower case, terminals upper case.

    `special` are the token ids of the markers that are tokens. A tool format without a grammar here is Hermes JSON,
    which every parser of ours reads.
    """

    def __init__(self, special: Mapping[str, int], format_id: str) -> None:
        self._special = special
        self.rules = ["%llguidance {}"]
        self.calls = _FORMATS.get(format_id, _FORMATS["hermes_json"])
        if format_id == "mistral" and self.is_token("[ARGS]"):
            self.calls = CallFormat(_json_body("NAME[ARGS]", ""), "[TOOL_CALLS]", "", "")
        elif format_id == "hy_v4":  # its tags end in the checkpoint's own way
            opening = next((token for token in special if token.startswith("<tool_calls:")), "<tool_calls>")
            self.calls = _keyed_format(keyed("", opening.removeprefix("<tool_calls")[:-1]), opening)
        elif not self.is_token(self.calls.open) and any(token in self.calls.open for token in special):
            # A grammar's text would run up to the token in the middle of a marker.
            self.calls = _FORMATS["hermes_json"]

    def rule(self, name: str, body: str, options: str = "") -> str:
        self.rules.append(f"{name}{options}: {body}")
        return name

    def marker(self, text: str) -> str:
        """The marker as the token that it is, as tokens and text, or as text."""
        inside = sorted((token for token in self._special if token in text), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, inside))})", text) if inside else [text]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else literal(piece) for piece in pieces if piece
        )

    def is_token(self, text: str) -> bool:
        """Whether it begins with a token, so that no text runs over it."""
        return any(text.startswith(token) for token in self._special)

    def call_bodies(self, calls: Sequence[CallableTool]) -> list[tuple[CallableTool, str]]:
        """For each of `calls` a rule for what follows its lead."""
        close = f" {self.marker(self.calls.close)}" if self.calls.close else ""
        return [
            (call, self.rule(f"call_{i}", self.calls.body(self, call, f"call_{i}") + close))
            for i, call in enumerate(calls)
        ]

    def call_tail(self, calls: Sequence[CallableTool]) -> str:
        """Adds rule ``call_tail``: what follows the opening marker of a call, for any of `calls`."""
        leads = [(self.calls.lead(call), body) for call, body in self.call_bodies(calls)]
        return self.rule("call_tail", " | ".join(f"{literal(lead)} {body}" if lead else body for lead, body in leads))


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called, with the schema its arguments are held to."""

    name: str
    schema: Schema
    lenient: bool
    param: str
    # names of the arguments, for formats that write each behind its name, where `schema` is any object
    keys: tuple[str, ...] = ()

    def refused(self, keyword: str, path: str, why: str = "") -> BadRequest:
        what = f"keyword {keyword!r} at {path} is not supported in this model's tool format"
        return BadRequest(f"{self.param}: {what}{why}.", param=self.param)


Body = Callable[[Lark, CallableTool, str], str]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A block is ``open lead body close``: `open` is the marker that begins every call, ``""`` where only `lead` does.

    `lead` is literal text that begins the call of a tool. `body` takes a call and a prefix for the names of its rules.
    """

    body: Body
    open: str = "<tool_call>"
    close: str = "</tool_call>"
    between: str = "\n"
    lead: Callable[[CallableTool], str] = lambda call: ""


def any_call(tool: Tool, param: str, most: int | None = None) -> CallableTool:
    """Of a tool whose arguments are held to nothing; `most`: of their names that are told."""
    members = tool.parameters.get("properties")
    keys = [key for key in members if re.fullmatch(_TAG_NAME, key)] if isinstance(members, dict) else []
    return CallableTool(tool.name, ANY_OBJECT, lenient=True, param=param, keys=tuple(keys[:most]))


def as_call(tool: Tool, param: str) -> CallableTool:
    """The schema of a tool's arguments.

    A strict tool's schema is kept to the letter or refused. For others, keywords that cannot be enforced are passed
    over, and what cannot be used at all becomes any JSON object: their client never asked for more than a call.
    Raises BadRequest for a strict tool, naming `param`, the keyword and its place.
    """
    schema: Schema = dict(tool.parameters) or {"type": "object", "properties": {}}
    schema.setdefault("type", "object")
    if "properties" in schema and not {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"} & schema.keys():
        schema.setdefault("additionalProperties", False)
    if tool.strict:
        check_schema(schema, param)
        if schema["type"] != "object":
            raise BadRequest(f"{param}: keyword 'type' at $ must be 'object'.", param=param)
        return CallableTool(tool.name, schema, lenient=False, param=param)
    if schema["type"] != "object" or not is_supported(schema):
        return any_call(tool, param)
    return CallableTool(tool.name, schema, lenient=True, param=param)


def json_arguments(call: CallableTool) -> str:
    return f"%json {embed(call.schema, lenient=call.lenient)}"


def _json_body(head: str, tail: str) -> Body:
    """`head` with the tool's name in the place of NAME (as JSON: "NAME"), the arguments, `tail`."""

    def body(lark: Lark, call: CallableTool, prefix: str) -> str:
        begin = head.replace('"NAME"', json.dumps(call.name)).replace("NAME", call.name)
        return " ".join(filter(None, [lark.marker(begin), json_arguments(call), lark.marker(tail)]))

    return body


def _qwen_body(lark: Lark, call: CallableTool, prefix: str) -> str:
    def frame(key: str, value: str) -> str:
        return f'{literal(f"<parameter={key}>" + chr(10))} {value} "\\n"'

    rules = _parameter_rules(lark, call, prefix, "\n</parameter>", frame)
    return " ".join([literal(f"\n<function={call.name}>\n"), *rules, literal("</function>\n")])


def _keyed_format(tags: Tags, outer: str = "") -> CallFormat:
    """A name, and keys and values in tags of their own; `outer`: begins a second pair of tags around them."""

    def body(lark: Lark, call: CallableTool, names: str) -> str:
        opens, closes, begins = map(lark.marker, (tags.param[0], tags.head_end, tags.value_start))

        def frame(key: str, value: str) -> str:
            return f'"\\n"? {opens} {literal(key)} {closes} "\\n"? {begins} {value}'

        rules = _parameter_rules(lark, call, names, tags.param[1], frame)
        inner = " ".join([literal(call.name), *rules, '"\\n"?'])
        return f'"\\n"? {lark.marker(tags.outer[0])} {inner} {lark.marker(tags.outer[1])} "\\n"?' if outer else inner

    return CallFormat(body, outer, f"</{outer[1:]}") if outer else CallFormat(body, *tags.outer)


def _minimax_body(lark: Lark, call: CallableTool, prefix: str) -> str:
    def frame(key: str, value: str) -> str:
        return f"{lark.marker(f'{MARK}<{key}>')} {value}"

    rules = _parameter_rules(lark, call, prefix, f"{MARK}</KEY>", frame)
    opening, end = lark.marker(f'{MARK}<invoke name="{call.name}">'), lark.marker(f"{MARK}</invoke>")
    return " ".join(['"\\n"', opening, *rules, end, '"\\n"'])


def _dsml_body(lark: Lark, call: CallableTool, prefix: str) -> str:
    def frame(key: str, value: str) -> str:
        kind = '("true" | "false")' if value.endswith("_text") else '"false"'
        return f"""{literal(f'<｜DSML｜parameter name="{key}" string="')} {kind} "\\">" {value} "\\n\""""

    rules = _parameter_rules(lark, call, prefix, "</｜DSML｜parameter>", frame)
    return " ".join([literal(f'\n<｜DSML｜invoke name="{call.name}">\n'), *rules, literal("</｜DSML｜invoke>\n")])


def _parameter_rules(
    lark: Lark, call: CallableTool, prefix: str, end: str, frame: Callable[[str, str], str]
) -> Iterator[str]:
    """A rule for each parameter; `frame` puts a value into its markup, but for the `end`, in which KEY is its name."""
    for i, (key, schema, required) in enumerate(_parameters(call)):
        value = _value(lark, call, schema, f"{prefix}_{i}", end.replace("KEY", key), f"$.properties.{key}")
        rule = lark.rule(f"{prefix}_p{i}", frame(key, value))
        yield rule if required else f"({rule})?"


def _parameters(call: CallableTool) -> list[tuple[str, Any, bool]]:
    """(name, schema, required) in order; only an object with named properties can be written as XML.

    Raises BadRequest for a strict tool that says more than that at its top level, or a name that cannot be a tag.
    """
    known = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
    odd = next((keyword for keyword in call.schema if keyword not in known | _NOTES), None)
    if odd is not None and not call.lenient:
        raise call.refused(odd, "$")
    required = call.schema.get("required", [])
    properties = dict(call.schema.get("properties", {key: {} for key in call.keys}))
    properties.update({key: {} for key in required if key not in properties})
    for key in properties:
        if not re.fullmatch(_TAG_NAME, key):
            raise BadRequest(
                f"{call.param}: the property name {key!r} cannot be written in this model's tool format.",
                param=call.param,
            )
    return [(key, schema, key in required) for key, schema in properties.items()]


def _value(lark: Lark, call: CallableTool, schema: Any, prefix: str, end: str, path: str) -> str:
    """A parameter's value and the marker that ends it."""
    schema = _resolve(schema, call.schema)
    optional = _optional(schema, call.schema)
    if "const" in optional or "enum" in optional:
        return f"{_one_of(optional, or_null=optional is not schema)} {lark.marker(end)}"
    if optional.get("type") == "string" and optional is not schema:
        schema = {**optional, "type": ["string", "null"]}
    if not _is_text(call, schema, path):
        return f"{_json(call, schema, path)} {lark.marker(end)}"
    text = _text_terminals(call, schema, path)
    name = prefix.upper() + "_TEXT"
    if lark.is_token(end):  # text cannot run over a token, so it may be taken greedily
        return f"{lark.rule(name, text)} {lark.marker(end)}"
    lark.rule(name, f"{text} & ~/{ANY_TEXT}{regex_to_lark(re.escape(end.strip()))}{ANY_TEXT}/")
    # Where null is no such text, DSML must not say that it is one.
    is_either = "null" in _types(schema) and not schema.keys().isdisjoint(_OF_TEXTS)
    return lark.rule(f"{prefix}_{'either' if is_either else 'text'}", f"{name} {literal(end)}", "[lazy]")


def _optional(schema: Schema, root: Schema) -> Schema:
    """What a schema allows beside ``null``, if it says nothing else; else the schema itself."""
    keyword = next((word for word in ("anyOf", "oneOf") if word in schema), "anyOf")
    parts = [_resolve(part, root) for part in schema.get(keyword, ())[:3]]
    others = [part for part in parts if part.get("type") != "null"]
    alone = len(parts) == 2 and len(others) == 1 and schema.keys() - {keyword} <= _NOTES
    return others[0] if alone else schema


def _is_text(call: CallableTool, schema: Schema, path: str) -> bool:
    """Whether it is written without quotes. Raises BadRequest where text cannot be held to what the schema says.

    Where nothing but a string or ``null`` is allowed parsers read no JSON: quotes would become part of the text.
    """
    found = ToolSchema(schema, Root(call.schema))
    if not found.allows("string") or not (found.types or _OF_OTHERS.isdisjoint(schema)):
        return False
    only = bool(found.types) and found.types <= {"string", "null"}
    if only and set(_types(schema)) == found.types:
        return True
    if call.lenient:
        return only or "allOf" not in schema or "type" in schema
    said = _said_of_texts(call, schema)
    if said is not None and only:
        raise call.refused(said, path, ": say it beside a 'type' of string, or of string and null")
    return said is None


def _said_of_texts(call: CallableTool, schema: Schema) -> str | None:
    """A word by which the schema says what texts are allowed; ``None`` if all are."""
    words = ("allOf", *_OF_TEXTS)
    parts = [_resolve(part, call.schema) for word in ("anyOf", "oneOf") for part in schema.get(word, ())]
    if any(part.get("type") == "string" and part.keys().isdisjoint(words) for part in parts):
        return None
    return next((word for part in (schema, *parts) for word in words if word in part), None)


def _types(schema: Schema) -> list[str]:
    named = schema.get("type", [])
    return [named] if isinstance(named, str) else named


def _one_of(schema: Schema, *, or_null: bool = False) -> str:
    """The values of a ``const`` or an ``enum``: texts as they are, others as JSON."""
    options = [schema["const"]] if "const" in schema else list(schema["enum"])
    options += [None] * or_null
    words = [option if isinstance(option, str) else json.dumps(option) for option in options]
    return f"({' | '.join(literal(word) for word in words)})"


def _json(call: CallableTool, schema: Schema, path: str) -> str:
    """A JSON value. A reference that does not point into the schema's definitions is refused, or allows any value."""
    shared: Schema = {key: call.schema[key] for key in ("$defs", "definitions") if key in call.schema}
    targets = [sub.get("$ref") for part in (schema, shared) for _, sub in subschemas(part)]
    if any(isinstance(to, str) and not to.startswith(("#/$defs/", "#/definitions/")) for to in targets):
        if not call.lenient:
            raise call.refused("$ref", path, ": it must point into '#/$defs/' or '#/definitions/'")
        schema, shared = {}, {}
    return f"%json {embed({**shared, **schema}, lenient=call.lenient)}"


def _resolve(schema: Any, root: Schema) -> Schema:
    """`schema` with its own local reference followed, or one that is alone in an ``allOf``, for looking at its type;
    ``true`` is any value."""
    for _ in range(16):
        if not isinstance(schema, dict):
            return {}
        keyword, found = "$ref", schema.get("$ref")
        if isinstance(found, str):
            found = pointed(root, found)
        else:
            keyword, found = "allOf", _together(schema)
            if found is None:
                return schema
        schema = {**found, **{k: v for k, v in schema.items() if k != keyword}} if isinstance(found, dict) else {}
    return {}


def _together(schema: Schema) -> Schema | None:
    """The schemas of an ``allOf`` as one: a single one, or several of a text, that say nothing which is said twice."""
    parts = schema.get("allOf")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return None
    words = [*(schema.keys() - {"allOf"}), *(word for part in parts for word in part)]
    if len(set(words)) < len(words) or (len(parts) > 1 and not {"type", *_OF_TEXTS, *_NOTES}.issuperset(words)):
        return None
    return {word: value for part in parts for word, value in part.items()}


def _text_terminals(call: CallableTool, schema: Schema, path: str) -> str:
    """A terminal for a string as it stands, by its length and pattern."""
    least, most, patterns = schema.get("minLength", 0), schema.get("maxLength"), []
    types = _types(schema)
    if "string" not in types or not {"string", "null"}.issuperset(types):
        return f"/{ANY_TEXT}/"
    if least or most is not None:
        patterns.append(f"(?s:.{{{least},{'' if most is None else most}}})")
    if "pattern" in schema:
        patterns.append(_unanchored(schema["pattern"], call, path))
    if "format" in schema and not call.lenient:
        raise call.refused("format", path)
    if patterns:  # parsers trim a value, so what counts must not be white space
        patterns.append(r"(\S((?s:.*)\S)?)?")
    terminals = [f"/{regex_to_lark(regex, use_ascii='dw')}/" for regex in patterns]
    if "null" not in types:
        # The word is read as null, whatever the schema says.
        return " & ".join([f"/{ANY_TEXT}/", *terminals, "~/[nN][uU][lL][lL]/"])
    return f"({' & '.join(terminals)} | /null/)" if terminals else f"/{ANY_TEXT}/"


def _unanchored(pattern: str, call: CallableTool, path: str) -> str:
    """A JSON schema's pattern, which may match anywhere, as one for the whole text."""
    places = list(_operators(pattern))
    anchors = [place for place in places if pattern[place] in "^$"]
    starts, ends = 0 in anchors, len(pattern) - 1 in anchors and pattern.endswith("$")
    either = any(pattern[place] == "|" for place in places)
    if len(anchors) > starts + ends or (anchors and either) or re.search(r"\\[bB]", pattern):
        if call.lenient:
            return ANY_TEXT
        raise call.refused("pattern", path, f": {pattern!r} has anchors elsewhere than at its ends")
    inner = pattern[1 if starts else 0 : len(pattern) - 1 if ends else None]
    return f"{'' if starts else ANY_TEXT}({inner}){'' if ends else ANY_TEXT}"


def _operators(pattern: str) -> Iterator[int]:
    """Where anchors stand, and alternatives that are not inside a group."""
    depth, in_class, escaped = 0, False, False
    for i, char in enumerate(pattern):
        if escaped or char == "\\":
            escaped = not escaped
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char in "^$" or (char == "|" and depth == 0):
            yield i


_FORMATS: Mapping[str, CallFormat] = {
    **dict.fromkeys(("hermes_json", "json_tools"), CallFormat(_json_body('\n{"name": "NAME", "arguments": ', "}\n"))),
    **dict.fromkeys(("glm47", "glm4_native", "glm4_xml"), _keyed_format(GLM)),
    "k2_horizon": _keyed_format(IFM, "<ifm|tool_calls>"),
    "minimax_m3": CallFormat(_minimax_body, f"{MARK}<tool_call>", f"{MARK}</tool_call>"),
    "deepseek_v4": CallFormat(_dsml_body, "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    "inkling": CallFormat(
        _json_body('{"name": "NAME", "args": ', "}"), "<|content_invoke_tool_json|>", "<|end_message|>"
    ),
    "qwen3_coder": CallFormat(_qwen_body),
    "mistral": CallFormat(_json_body(' [{"name": "NAME", "arguments": ', "}]"), "[TOOL_CALLS]", "", ""),
    "llama": CallFormat(
        _json_body("", "}"), "", "", lead=lambda call: '{"name": ' + json.dumps(call.name) + ', "parameters": '
    ),
    "llama_xml": CallFormat(_json_body("NAME>", ""), "<function=", "</function>"),
}
