"""Grammars of tool calls, one function per format.

A marker that is a token of its own (``<tool_call>`` in most vocabularies) must be named by its id: a grammar's text
never matches it. So everything here asks `Markers` how to write one.

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
from start_llm.parsing.schema_form import Schema, any_object, check_schema, embed, is_supported, pointed, subschemas

MOST_BRANCHES = 1_000
"""Of a parameter's schema that are looked at for whether it may be a string."""
ANY_TEXT = "(?s:.*)"


class Lark:
    """A grammar being written. Rule names must be lower case, terminals upper case."""

    def __init__(self) -> None:
        self._rules = ["%llguidance {}"]

    def rule(self, name: str, body: str, options: str = "") -> str:
        self._rules.append(f"{name}{options}: {body}")
        return name

    def text(self) -> str:
        return "\n".join(self._rules) + "\n"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Markers:
    """How a marker is written: as the token that it is, or as text."""

    special: Mapping[str, int]

    def __call__(self, text: str) -> str:
        token = self.special.get(text)
        return literal(text) if token is None else f"<[{token}]>"

    def is_token(self, text: str) -> bool:
        return text in self.special


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called, with the schema its arguments are held to."""

    name: str
    schema: Schema
    lenient: bool
    param: str


Body = Callable[[Lark, Markers, CallableTool, str], str]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A block is ``open lead body close``.

    Attributes:
        body: given a call and a prefix for the names of its rules.
        open: the marker that begins every call; ``""`` where only `lead` does.
        lead: literal text that begins the call of a tool.
    """

    body: Body
    open: str = "<tool_call>"
    close: str = "</tool_call>"
    between: str = "\n"
    lead: Callable[[CallableTool], str] = lambda call: ""


def call_bodies(
    lark: Lark, call_format: CallFormat, calls: Sequence[CallableTool], markers: Markers
) -> list[tuple[CallableTool, str]]:
    """For each of `calls` a rule for what follows its lead."""
    close = f" {markers(call_format.close)}" if call_format.close else ""
    return [
        (call, lark.rule(f"call_{i}", call_format.body(lark, markers, call, f"call_{i}") + close))
        for i, call in enumerate(calls)
    ]


def call_tail(lark: Lark, call_format: CallFormat, calls: Sequence[CallableTool], markers: Markers) -> str:
    """Adds rule ``call_tail``: what follows the opening marker of a call, for any of `calls`."""
    parts = []
    for call, body in call_bodies(lark, call_format, calls, markers):
        lead = call_format.lead(call)
        parts.append(f"{literal(lead)} {body}" if lead else body)
    return lark.rule("call_tail", " | ".join(parts))


def pick_format(format_id: str, markers: Markers) -> CallFormat:
    """The format, or Hermes JSON for one without a grammar here (every parser of ours reads it)."""
    if format_id == "mistral":
        return CallFormat(_header_body, "[TOOL_CALLS]", "", "") if markers.is_token("[ARGS]") else _MISTRAL_LIST
    return _FORMATS.get(format_id, _FORMATS["hermes_json"])


def as_call(tool: Tool, param: str) -> CallableTool:
    """The schema of a tool's arguments.

    A strict tool's schema is kept to the letter or refused. For others, keywords that cannot be enforced are passed
    over, and what cannot be used at all becomes any JSON object: their client never asked for more than a call.

    Raises:
        BadRequest: for a strict tool, naming `param`, the keyword and its place.
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
    if schema["type"] != "object" or not is_supported(schema, lenient=True):
        schema = any_object()
    return CallableTool(tool.name, schema, lenient=True, param=param)


# --- JSON arguments ---------------------------------------------------------


def json_arguments(call: CallableTool) -> str:
    return f"%json {embed(call.schema, lenient=call.lenient)}"


def _json_body(head: str, tail: str) -> Body:
    """`head` with the tool's name in the place of NAME (as JSON: "NAME"), the arguments, `tail`."""

    def body(lark: Lark, markers: Markers, call: CallableTool, prefix: str) -> str:
        begin = head.replace('"NAME"', json.dumps(call.name)).replace("NAME", call.name)
        return " ".join(filter(None, [begin and literal(begin), json_arguments(call), tail and literal(tail)]))

    return body


def _header_body(lark: Lark, markers: Markers, call: CallableTool, prefix: str) -> str:
    return f"{literal(call.name)} {markers('[ARGS]')} {json_arguments(call)}"


def _llama_lead(call: CallableTool) -> str:
    return f'{{"name": {json.dumps(call.name)}, "parameters": '


# --- XML arguments ----------------------------------------------------------


def _qwen_body(lark: Lark, markers: Markers, call: CallableTool, prefix: str) -> str:
    parts = []
    for i, (key, schema, required) in enumerate(_parameters(call)):
        value = _value(lark, markers, call, schema, f"{prefix}_{i}", "\n</parameter>", f"$.properties.{key}")
        rule = lark.rule(f"{prefix}_p{i}", f'{literal(f"<parameter={key}>" + chr(10))} {value} "\\n"')
        parts.append(rule if required else f"({rule})?")
    return " ".join([literal(f"\n<function={call.name}>\n"), *parts, literal("</function>\n")])


def _glm_body(lark: Lark, markers: Markers, call: CallableTool, prefix: str) -> str:
    parts = []
    for i, (key, schema, required) in enumerate(_parameters(call)):
        value = _value(lark, markers, call, schema, f"{prefix}_{i}", "</arg_value>", f"$.properties.{key}")
        opening = f"{markers('<arg_key>')} {literal(key)} {markers('</arg_key>')}"
        rule = lark.rule(f"{prefix}_p{i}", f'"\\n"? {opening} "\\n"? {markers("<arg_value>")} {value}')
        parts.append(rule if required else f"({rule})?")
    return " ".join([literal(call.name), *parts, '"\\n"?'])


def _parameters(call: CallableTool) -> list[tuple[str, Any, bool]]:
    """(name, schema, required) in order; only an object with named properties can be written as XML.

    Raises:
        BadRequest: for a strict tool that says more than that at its top level, or a name that cannot be a tag.
    """
    known = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
    known |= {"title", "description", "default", "examples", "$comment", "deprecated"}
    if not call.lenient:
        for keyword in call.schema:
            if keyword not in known:
                raise BadRequest(
                    f"{call.param}: keyword {keyword!r} at $ is not supported in this model's tool format.",
                    param=call.param,
                )
    required = call.schema.get("required", [])
    properties = dict(call.schema.get("properties", {}))
    properties.update({key: {} for key in required if key not in properties})
    for key in properties:
        if not key or re.search(r"[<>\s]", key):
            raise BadRequest(
                f"{call.param}: the property name {key!r} cannot be written in this model's tool format.",
                param=call.param,
            )
    return [(key, schema, key in required) for key, schema in properties.items()]


def _value(lark: Lark, markers: Markers, call: CallableTool, schema: Any, prefix: str, end: str, path: str) -> str:
    """A parameter's value and the marker that ends it."""
    schema = _resolve(schema, call.schema)
    if "const" in schema or "enum" in schema:
        options = [schema["const"]] if "const" in schema else schema["enum"]
        words = [option if isinstance(option, str) else json.dumps(option) for option in options]
        return f"({' | '.join(literal(word) for word in words)}) {markers(end)}"
    if not _may_be_text(schema, call.schema):
        shared: Schema = {key: call.schema[key] for key in ("$defs", "definitions") if key in call.schema}
        if _refers_to_more(schema, shared):
            if not call.lenient:
                raise BadRequest(
                    f"{call.param}: keyword '$ref' at {path} is not supported in this model's tool format: "
                    "it must point into '#/$defs/' or '#/definitions/'.",
                    param=call.param,
                )
            schema, shared = {}, {}
        return f"%json {embed({**shared, **schema}, lenient=call.lenient)} {markers(end)}"
    text = _text_terminals(call, schema, path)
    if markers.is_token(end):  # text cannot run over a token, so it may be taken greedily
        name = prefix.upper() + "_TEXT"
        lark.rule(name, text)
        return f"{name} {markers(end)}"
    name = prefix.upper() + "_TEXT"
    lark.rule(name, f"{text} & ~/{ANY_TEXT}{regex_to_lark(re.escape(end.strip()))}{ANY_TEXT}/")
    return lark.rule(f"{prefix}_text", f"{name} {literal(end)}", "[lazy]")


def _refers_to_more(schema: Schema, shared: Schema) -> bool:
    """Whether a parameter's schema, or a definition that goes with it, points to the tool's schema as a whole."""
    targets = (sub.get("$ref") for part in (schema, shared) for _, sub in subschemas(part))
    return any(isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")) for target in targets)


def _resolve(schema: Any, root: Schema) -> Schema:
    """`schema` with its own local reference followed, for looking at its type; ``true`` is any value."""
    for _ in range(16):
        if not isinstance(schema, dict):
            return {}
        target = schema.get("$ref")
        if not isinstance(target, str):
            return schema
        found = pointed(root, target)
        schema = {**found, **{k: v for k, v in schema.items() if k != "$ref"}} if isinstance(found, dict) else {}
    return {}


def _may_be_text(schema: Schema, root: Schema) -> bool:
    """Whether a string is among what it allows. One whose references lead back to it may be text."""
    waiting: list[Any] = [schema]
    for _ in range(MOST_BRANCHES):
        if not waiting:
            return False
        found = _resolve(waiting.pop(), root)
        kind = found.get("type")
        branches = [*found.get("anyOf", []), *found.get("oneOf", [])]
        if kind is not None:
            text = kind == "string" or (isinstance(kind, list) and "string" in kind)
        elif branches:
            text = False
            waiting += branches
        else:
            text = not {"properties", "items", "required", "minimum", "maximum", "allOf"} & found.keys()
        if text:
            return True
    return True


def _text_terminals(call: CallableTool, schema: Schema, path: str) -> str:
    """A terminal for a string as it stands, by its length and pattern."""
    least, most, patterns = schema.get("minLength", 0), schema.get("maxLength"), []
    if schema.get("type") != "string":
        return f"/{ANY_TEXT}/"
    if least or most is not None:
        patterns.append(f"(?s:.{{{least},{'' if most is None else most}}})")
    if "pattern" in schema:
        patterns.append(_unanchored(schema["pattern"], call, path))
    if "format" in schema and not call.lenient:
        raise BadRequest(
            f"{call.param}: keyword 'format' at {path} is not supported in this model's tool format.", param=call.param
        )
    if patterns:  # parsers trim a value, so what counts must not be white space
        patterns.append(r"(\S((?s:.*)\S)?)?")
    terminals = [f"/{regex_to_lark(regex, use_ascii='dw')}/" for regex in patterns]
    return " & ".join([f"/{ANY_TEXT}/", *terminals, "~/[nN][uU][lL][lL]/"])  # read as null, whatever the schema says


def _unanchored(pattern: str, call: CallableTool, path: str) -> str:
    """A JSON schema's pattern, which may match anywhere, as one for the whole text."""
    places = list(_operators(pattern))
    anchors = [place for place in places if pattern[place] in "^$"]
    starts, ends = 0 in anchors, len(pattern) - 1 in anchors and pattern.endswith("$")
    either = any(pattern[place] == "|" for place in places)
    if len(anchors) > starts + ends or (anchors and either) or re.search(r"\\[bB]", pattern):
        if call.lenient:
            return ANY_TEXT
        raise BadRequest(
            f"{call.param}: keyword 'pattern' at {path} is not supported in this model's tool format: "
            f"{pattern!r} has anchors elsewhere than at its ends.",
            param=call.param,
        )
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


_MISTRAL_LIST = CallFormat(_json_body(' [{"name": "NAME", "arguments": ', "}]"), "[TOOL_CALLS]", "", "")
_HERMES = CallFormat(_json_body('\n{"name": "NAME", "arguments": ', "}\n"))
_GLM = CallFormat(_glm_body)
_FORMATS: Mapping[str, CallFormat] = {
    "hermes_json": _HERMES,
    "json_tools": _HERMES,
    "qwen3_coder": CallFormat(_qwen_body),
    "glm47": _GLM,
    "glm4_native": _GLM,
    "glm4_xml": _GLM,
    "llama": CallFormat(_json_body("", "}"), "", "", lead=_llama_lead),
    "llama_xml": CallFormat(_json_body("NAME>", ""), "<function=", "</function>"),
}
