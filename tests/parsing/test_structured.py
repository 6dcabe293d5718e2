"""Which texts a request's grammar accepts. A byte vocabulary, so that only the grammar matters; no model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from start_llm.core.errors import BadRequest
from start_llm.core.messages import Tool
from start_llm.core.request import Dialect, ResponseFormat, ToolChoice
from start_llm.core.work import Constraint
from start_llm.parsing.structured import MOST_CALLS
from tests.kinds import some
from tests.parsing.helpers import calls, run, style
from tests.parsing.vocabulary import BOTH, BYTES, GOOD, OBJECT, PING, STRICT, TOKENS, WEATHER, Vocabulary, constraint

FORMATS = pytest.mark.parametrize("tool_format", some(GOOD, 5))

# --- response formats ---


def test_free_answers_have_no_constraint() -> None:
    assert constraint(BYTES) is None
    assert constraint(BYTES, tools=(WEATHER,)) is None


@BOTH
@pytest.mark.parametrize("tool_format", some(["harmony", *GOOD], 5))
@pytest.mark.parametrize("tools", [(), (WEATHER,), (STRICT,)])
def test_no_call_can_begin_where_none_is_allowed(words: Vocabulary, tool_format: str, tools: tuple[Tool, ...]) -> None:
    """Also where the request has no tools: its prompt may show those of the turns before."""
    harmony = tool_format == "harmony"
    reasoning, free = ("harmony", "<|channel|>final<|message|>") if harmony else ("null", "")
    call = GOOD.get(tool_format, '<|channel|>commentary to=functions.get_weather json<|message|>{"city": "Ulm"}')
    wanted = constraint(words, tool_format, reasoning, tools=tools, tool_choice=ToolChoice("none"))
    for good in ("", "The tool get_weather is gone.\n\n{1: 2} <b>", "x" * 300):
        assert words.accepts(wanted, free + good)
    assert not words.begins(wanted, call)
    assert harmony or not words.begins(wanted, f"I look. {call}")


def test_json_object_is_one_object_and_nothing_else() -> None:
    wanted = constraint(BYTES, response_format=OBJECT)
    for good in ('{"a": [1, null, {"b": "c"}]}', "{}", '\n\n{"a":1}', '{\n  "a": 1\n}'):
        assert BYTES.accepts(wanted, good), good
    for bad in ("[1]", '"a"', "{} and more", "Sure! {}", '{"a": 1'):
        assert not BYTES.accepts(wanted, bad), bad


def test_white_space_is_bounded_everywhere() -> None:
    wanted = constraint(BYTES, response_format=OBJECT)
    assert BYTES.begins(wanted, '{\n                    "a"')
    for loop in ("{" + " " * 3, "{" + "\n" * 3, "{\n" + " " * 22, '{"a":' + " " * 3, '{"a": 1,' + "\t" * 3, "\n" * 6):
        assert not BYTES.begins(wanted, loop), loop


def test_json_schema_is_kept_to() -> None:
    wanted = constraint(BYTES, response_format=ResponseFormat("json_schema", WEATHER.parameters))
    assert BYTES.accepts(wanted, '{"city": "Ülm\\n", "days": 3, "unit": "C"}')
    for bad in (
        "{}",
        '{"city": 3}',
        '{"city": "a", "days": 10}',
        '{"city": "a", "unit": "K"}',
        '{"city": "a", "x": 1}',
    ):
        assert not BYTES.accepts(wanted, bad), bad


def test_a_clients_own_grammar_options_do_not_count() -> None:
    schema = {"type": "object", "x-guidance": {"lenient": True, "whitespace_pattern": "x+"}, "not": {"type": "null"}}
    with pytest.raises(BadRequest, match="'not'"):
        constraint(BYTES, response_format=ResponseFormat("json_schema", schema))


PARAM = "response_format.json_schema.schema"
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(3000):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"not": {"type": "string"}}}}, ["'not'", "$.properties.a"]),
        ({"type": "array", "uniqueItems": True}, ["'uniqueItems'", "$"]),
        ({"items": {"dependentRequired": {"a": ["b"]}}}, ["'dependentRequired'", "$.items"]),
        ({"anyOf": [{"type": "null"}, {"if": {}}]}, ["'if'", "$.anyOf[1]"]),
        ({"properties": {"a": {"type": "string", "format": "idn-email"}}}, ["'format'", "$.properties.a", "idn-email"]),
        ({"properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}, ["'pattern'", "$.properties.a"]),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, ["'oneOf'", "$"]),
        ({"$ref": "https://example.com/a.json"}, ["'$ref'", "https://example.com/a.json", "within the schema"]),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, ["'$ref'", "$.properties.a"]),
        ({"$ref": "#/$defs/missing"}, ["'$ref'", "missing"]),
        ({"type": "null", "$schema": "x"}, ["cannot be enforced", "json-schema:///x"]),
        ({"type": "strin"}, ["not a valid JSON schema", "'type'", "strin"]),
        ({"properties": {"a": {"minLength": -1}}}, ["not a valid", "'minLength'", "$.properties.a.minLength"]),
        ({"required": "a"}, ["not a valid", "'required'"]),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, ["no output", "Unsatisfiable"]),
        (DEEP, ["at most 3,000 schemas"]),
        (None, ["is missing"]),
    ],
)
def test_a_bad_schema_is_refused_by_keyword_and_place(schema: Any, words: list[str]) -> None:
    with pytest.raises(BadRequest) as caught:
        constraint(BYTES, response_format=ResponseFormat("json_schema", schema))
    assert caught.value.param == PARAM
    assert "\n" not in caught.value.message
    for word in (PARAM, *words):
        assert word in caught.value.message


def test_keywords_inside_data_are_not_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"const": {"$ref": "http://x"}}, "$ref": {"type": "null"}},
        "required": ["not", "$ref"],
        "default": {"if": 1},
    }
    wanted = constraint(BYTES, response_format=ResponseFormat("json_schema", schema))
    assert BYTES.accepts(wanted, '{"not": {"$ref": "http://x"}, "$ref": null}')


# --- forced calls ---


@BOTH
@pytest.mark.parametrize("tool_format", GOOD)
def test_required_accepts_calls_and_only_valid_ones(words: Vocabulary, tool_format: str) -> None:
    wanted = constraint(words, tool_format, tools=(WEATHER, PING), tool_choice=ToolChoice("required"))
    good = GOOD[tool_format]
    assert words.accepts(wanted, good)
    assert words.accepts(wanted, "\n\n" + good)
    assert words.accepts(wanted, good + "\n" + good)
    for bad in ("Hello", "Hello " + good, good + " bye", good.replace("get_weather", "get_wether")):
        assert not words.accepts(wanted, bad), bad
    assert not words.accepts(wanted, good.replace("2", "22"))
    assert not words.accepts(wanted, good.replace("days", "dais"))


def test_mistral_calls_have_a_header_or_are_a_list() -> None:
    fields: dict[str, Any] = {"tools": (WEATHER, PING), "tool_choice": ToolChoice("required")}
    header = '[TOOL_CALLS]get_weather[ARGS]{"city": "Ulm"}'
    assert TOKENS.accepts(constraint(TOKENS, "mistral", **fields), header + header)
    assert not TOKENS.accepts(constraint(TOKENS, "mistral", **fields), header.replace('"Ulm"', "1"))
    listed = '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Ulm"}}]'
    assert BYTES.accepts(constraint(BYTES, "mistral", **fields), listed)


@BOTH
@FORMATS
def test_forced_calls_come_to_an_end(words: Vocabulary, tool_format: str) -> None:
    fields: dict[str, Any] = {"tools": (WEATHER,), "tool_choice": ToolChoice("required")}
    for most, more in ((1, {"parallel_tool_calls": False}), (MOST_CALLS, {})):
        wanted = constraint(words, tool_format, **fields, **more)
        calls_made = "\n".join([GOOD[tool_format]] * most)
        assert words.accepts(wanted, calls_made)
        assert not words.begins(wanted, calls_made + "\n")


def test_a_named_tool_is_the_only_one() -> None:
    wanted = constraint(BYTES, tools=(WEATHER, PING), tool_choice=ToolChoice("named", "ping"))
    assert BYTES.accepts(wanted, '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>')
    assert not BYTES.accepts(wanted, GOOD["hermes_json"])


def test_a_choice_without_such_a_tool_is_refused() -> None:
    with pytest.raises(BadRequest, match="'pong'; the tools are 'get_weather', 'ping'") as caught:
        constraint(BYTES, tools=(WEATHER, PING), tool_choice=ToolChoice("named", "pong"))
    assert caught.value.param == "tool_choice"
    with pytest.raises(BadRequest, match="there are no tools"):
        constraint(BYTES, tool_choice=ToolChoice("required"))


@BOTH
def test_xml_values_are_raw_text_until_their_end(words: Vocabulary) -> None:
    wanted = constraint(words, "qwen3_coder", tools=(WEATHER,), tool_choice=ToolChoice("required"))
    call = GOOD["qwen3_coder"]
    for city in ('say "hi" \\ </b> {x}', "two\nlines\n", "</parameterx> <", "nullable", "日本"):
        assert words.accepts(wanted, call.replace("Ulm", city)), city
    assert not words.accepts(wanted, call.replace("Ulm", "a\n</parameter>\nb"))
    assert not words.accepts(wanted, call.replace("Ulm", "null"))  # parsers read it as null
    where = "<parameter=where>\n{0}\n</parameter>\n</function>"
    assert words.accepts(wanted, call.replace("</function>", where.format('{"lat": 1.5}')))
    assert not words.accepts(wanted, call.replace("</function>", where.format("{}")))


def xml_tool(schema: dict[str, Any], **more: Any) -> Tool:
    return Tool("t", "", {"type": "object", "properties": {"v": schema}, "required": ["v"], **more}, strict=True)


@BOTH
@pytest.mark.parametrize("tool_format", some(["qwen3_coder", "glm47"]))
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "abcd", "a b"], ["a", "abcde", " a", "ab "]),
        ({"type": "string", "pattern": "^a+$"}, ["a", "aaa"], ["", "ab", "ba"]),
        ({"type": "string", "pattern": "b+"}, ["b", "abc"], ["a", "ac"]),
        ({"type": "string", "pattern": "^(x|y)"}, ["x", "y z"], ["z", "ax"]),
        ({"type": "string", "pattern": "x|[$|y]"}, ["ax", "$", "|"], ["z"]),
        ({"type": "string", "pattern": "\\$$"}, ["5$"], ["5$a", "5"]),
        ({"enum": ["a", 1, None]}, ["a", "1", "null"], ["b", '"a"', "2"]),
        ({"const": "only"}, ["only"], ["other"]),
        ({"type": ["string", "null"]}, ["abc"], []),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["abc", "3"], []),
        ({"anyOf": [{"type": "boolean"}, {"type": "integer"}]}, ["true", "3"], ["abc"]),
        ({"type": "array", "items": {"type": "number"}}, ["[18e+88411]", "[-1e999, 2]"], ["[a]"]),  # beyond each float
        ({"$ref": "#/$defs/d"}, ["[true]"], ["[1]", "true"]),
        ({"allOf": [{"$ref": "#/$defs/e"}], "default": "red"}, ["red"], ["green", '"red"']),  # as pydantic 1 writes it
        ({"allOf": [{"type": "string"}, {"enum": ["red"]}]}, ["red"], ["green", '"red"']),
        ({"allOf": [{"type": "string"}, {"minLength": 2}]}, ["ab"], ["a"]),
        ({"allOf": [{"allOf": [{"type": "string", "maxLength": 2}]}]}, ["ab"], ["abc"]),
        ({"anyOf": [{"$ref": "#/$defs/e"}, {"type": "null"}], "title": "V"}, ["red", "null"], ["green", '"red"']),
        ({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^a+$"}]}, ["aa", "null"], ["b", "nil"]),
        ({"type": ["string", "null"], "minLength": 5}, ["abcde", "null"], ["abcd"]),
        ({"anyOf": [{"$ref": "#/$defs/e"}, {"type": "string"}]}, ["red", "green"], []),
        ({"anyOf": [{"$ref": "#/$defs/e"}, {"type": "integer"}]}, ['"red"', "3"], ["red", '"green"']),
        ({}, ["anything"], []),
    ],
)
def test_xml_values_keep_to_their_schema(
    words: Vocabulary, tool_format: str, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    colour = {"type": "string", "enum": ["red", "blue"]}
    tool = xml_tool(schema, **{"$defs": {"d": {"type": "array", "items": {"type": "boolean"}}, "e": colour}})
    wanted = constraint(words, tool_format, tools=(tool,), tool_choice=ToolChoice("required"))
    frame = {
        "qwen3_coder": "<tool_call>\n<function=t>\n<parameter=v>\n{}\n</parameter>\n</function>\n</tool_call>",
        "glm47": "<tool_call>t<arg_key>v</arg_key><arg_value>{}</arg_value></tool_call>",
    }[tool_format]
    for value in good:
        assert words.accepts(wanted, frame.format(value)), value
        (call,) = run(frame.format(value), form=style(tool_format, "null"), tools=(tool,))[1].tool_calls
        read = json.loads(call.arguments)
        assert Draft202012Validator(dict(tool.parameters)).is_valid(read), read
    for value in bad:
        assert not words.accepts(wanted, frame.format(value)), value


def test_dsml_does_not_call_null_a_text_where_it_is_none() -> None:
    tool = xml_tool({"type": ["string", "null"], "pattern": "^a+$"})
    wanted = constraint(BYTES, "deepseek_v4", tools=(tool,), tool_choice=ToolChoice("required"))
    call = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="t">\n<｜DSML｜parameter name="v" string="{}">{}'
    call += "</｜DSML｜parameter>\n"
    end = "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    assert BYTES.accepts(wanted, call.format("false", "null") + end)
    assert BYTES.accepts(wanted, call.format("false", "aa") + end)
    assert not BYTES.accepts(wanted, call.format("true", "null") + end)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (xml_tool({"type": "string", "format": "date"}), ["'format'", "$.properties.v"]),
        (xml_tool({"type": "string", "pattern": "^a|b$"}), ["'pattern'", "$.properties.v"]),
        (xml_tool({"anyOf": [{"type": "string", "minLength": 2}, {"const": "a"}]}), ["'minLength'", "$.properties.v"]),
        (xml_tool({"type": "string"}, minProperties=1), ["'minProperties'", "$"]),
        (Tool("t", "", {"type": "object", "properties": {"a b": {}}}, strict=True), ["'a b'"]),
    ],
)
def test_what_xml_cannot_hold_a_strict_tool_to_is_refused(tool: Tool, words: list[str]) -> None:
    with pytest.raises(BadRequest) as caught:
        constraint(BYTES, "qwen3_coder", tools=(PING, tool), tool_choice=ToolChoice("required"))
    assert caught.value.param == "tools[1].function.parameters"
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("dialect", "name"), [("chat", "function.parameters"), ("messages", "input_schema"), ("responses", "parameters")]
)
def test_a_refused_schema_is_named_as_in_its_dialect(dialect: Dialect, name: str) -> None:
    tool = Tool("t", "", {"properties": {"a": {"not": {}}}}, strict=True)
    with pytest.raises(BadRequest) as caught:
        constraint(BYTES, tools=(PING, tool), dialect=dialect)
    assert caught.value.param == f"tools[1].{name}" and caught.value.message.startswith(f"tools[1].{name}: ")
    wanted = ResponseFormat("json_schema", {"not": {}}, param="text.format.schema")
    with pytest.raises(BadRequest, match=r"^text\.format\.schema: keyword 'not'"):
        constraint(BYTES, response_format=wanted, dialect=dialect)


def test_a_tool_that_is_not_strict_is_held_to_what_can_be_enforced() -> None:
    loose = Tool("t", "", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}})
    wanted = constraint(BYTES, tools=(loose,), tool_choice=ToolChoice("required"))
    frame = '<tool_call>\n{{"name": "t", "arguments": {}}}\n</tool_call>'
    assert BYTES.accepts(wanted, frame.format('{"a": [1]}'))
    assert not BYTES.accepts(wanted, frame.format('{"a": 1}'))
    for parameters in ({"type": "strin"}, {"$ref": "http://x"}, {"type": "array"}):
        wanted = constraint(BYTES, tools=(Tool("t", "", parameters),), tool_choice=ToolChoice("required"))
        assert BYTES.accepts(wanted, frame.format('{"whatever": [1]}'))


def test_a_strict_tool_with_a_bad_schema_is_refused_in_auto_too() -> None:
    for parameters, word in (({"properties": {"a": {"not": {}}}}, "'not'"), ({"type": "array"}, "'type'")):
        with pytest.raises(BadRequest, match=word) as caught:
            constraint(BYTES, tools=(PING, Tool("t", "", parameters, strict=True)))
        assert caught.value.param == "tools[1].function.parameters"


# --- auto ---


@BOTH
@FORMATS
def test_auto_with_a_strict_tool_is_free_until_a_call_opens(words: Vocabulary, tool_format: str) -> None:
    wanted = constraint(words, tool_format, tools=(STRICT, PING))
    good = GOOD[tool_format]
    for text in ("", "1 < 2 {}.", good, "I look. " + good, good + "\n" + good, "a" + good + "b" + good + "c"):
        assert words.accepts(wanted, text), text
    assert not words.begins(wanted, "I look. " + good.replace("2", "22"))
    if tool_format != "llama":  # where nothing but a known name marks a call
        assert not words.begins(wanted, good.replace("get_weather", "get_wether"))
    assert not words.accepts(wanted, good[:-2])


def test_auto_holds_other_tools_to_their_name_only() -> None:
    wanted = constraint(BYTES, tools=(STRICT, Tool("ping", "", {"properties": {"a": {"type": "null"}}})))
    assert BYTES.accepts(wanted, '<tool_call>\n{"name": "ping", "arguments": {"a": 1}}\n</tool_call>')


@BOTH
@pytest.mark.parametrize("tool_format", some((name for name in GOOD if name != "hermes_json"), 5))
def test_a_tool_that_is_not_strict_keeps_its_arguments(words: Vocabulary, tool_format: str) -> None:
    """Beside one that is strict, and where its own schema cannot be enforced."""
    good = GOOD[tool_format]
    other = Tool("other", "", STRICT.parameters, strict=True)
    assert words.accepts(constraint(words, tool_format, tools=(other, WEATHER)), good)
    odd = Tool(WEATHER.name, "", {**WEATHER.parameters, "not": {"type": "null"}, "$ref": "#/none"})
    assert words.accepts(constraint(words, tool_format, tools=(odd,), tool_choice=ToolChoice("required")), good)


def test_auto_without_parallel_calls_ends_after_one() -> None:
    wanted = constraint(BYTES, tools=(STRICT,), parallel_tool_calls=False)
    good = GOOD["hermes_json"]
    assert BYTES.accepts(wanted, "text")
    assert BYTES.accepts(wanted, "text " + good)
    assert not BYTES.begins(wanted, good + "\n")


def test_auto_with_a_response_format_is_either() -> None:
    wanted = constraint(BYTES, tools=(WEATHER,), response_format=OBJECT)
    assert BYTES.accepts(wanted, '{"a": 1}')
    assert BYTES.accepts(wanted, GOOD["hermes_json"])
    assert not BYTES.begins(wanted, "Hello")


# --- words ---


def test_unusual_names_and_text_are_escaped() -> None:
    odd = Tool('say "hi"\\n', "", {"type": "object", "properties": {"ключ": {"const": "</tool_call>"}}})
    wanted = constraint(BYTES, tools=(odd,), tool_choice=ToolChoice("required"))
    call = {"name": odd.name, "arguments": {"ключ": "</tool_call>"}}
    assert BYTES.accepts(wanted, f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>")


@pytest.mark.parametrize("tool_format", ["deepseek_v4", "inkling", "k2_horizon", "minimax_m3"])
def test_what_a_grammar_of_a_new_format_asks_for_is_read(tool_format: str) -> None:
    answer = run(GOOD[tool_format], 3, form=style(tool_format, "null"))[1]
    assert calls(answer) == [("get_weather", {"city": "Ulm", "days": 2})]


@BOTH
def test_tags_of_hy_v4_end_as_its_vocabulary_says(words: Vocabulary) -> None:
    wanted = constraint(words, "hy_v4", tools=(WEATHER, PING), tool_choice=ToolChoice("required"))
    end = ":opensource" if words is TOKENS else ""
    good = f"<tool_calls{end}>\n{GOOD['glm47'].replace('>', f'{end}>')}\n</tool_calls{end}>"
    assert words.accepts(wanted, good) and words.accepts(wanted, good + "\n" + good)
    assert not words.accepts(wanted, good.replace("days", "dais"))
    answer = run(good, 3, form=style("hy_v4", "null"))[1]
    assert json.loads(answer.tool_calls[0].arguments) == {"city": "Ulm", "days": 2}
    none = constraint(words, "hy_v4", tools=(WEATHER,), tool_choice=ToolChoice("none"))
    assert not words.begins(none, good)


def test_a_token_in_the_middle_of_a_marker_is_no_text() -> None:
    """Then calls are held to Hermes' form, which every reader knows."""
    words = Vocabulary("｜DSML｜")
    wanted = constraint(words, "deepseek_v4", tools=(WEATHER,), tool_choice=ToolChoice("required"))
    assert words.accepts(wanted, GOOD["hermes_json"]) and not words.begins(wanted, GOOD["deepseek_v4"])


# --- what is left free before an answer: reasoning in tags ---

THINK = {"reasoning": "think_tag"}


def test_reasoning_tags_that_are_tokens_become_token_ids() -> None:
    opening, closing = (TOKENS.special[tag] for tag in ("<think>", "</think>"))
    for fields, expected in (
        ({"in_reasoning": True}, ((closing,), True, ())),
        ({}, ((closing,), False, (opening,))),
        ({"may_reason": False}, ((), False, ())),
    ):
        each: Any = constraint(TOKENS, **THINK, response_format=OBJECT, **fields)
        assert (each.after, each.wait, each.opens) == expected
        assert TOKENS.accepts(each, "\n\n{}") and not TOKENS.begins(each, "hm")


def test_tags_of_several_tokens() -> None:
    words = Vocabulary("<|channel>", "<channel|>", "<|open|>", "<|close|>", "<|sep|>")
    for ident, opening, closing in (
        ("gemma4", "<|channel>", ["<channel|>"]),
        ("kimi_k3", "<|open|>", ["<|close|>", *"think", "<|sep|>"]),
    ):
        after = tuple(words.backend.encode("".join(closing)).ids)
        assert len(after) == len(closing)
        inside: Any = constraint(words, reasoning=ident, response_format=OBJECT, in_reasoning=True)
        may: Any = constraint(words, reasoning=ident, response_format=OBJECT)
        assert (inside.after, inside.wait, inside.opens) == (after, True, ())
        assert (may.after, may.wait, may.opens) == (after, False, (words.special[opening],))


def test_a_model_whose_tags_are_text_may_not_begin_with_one() -> None:
    """Allowed to write the tag or JSON, weak models begin the tag and never come to the JSON."""
    for may_reason in (True, False):
        wanted = constraint(BYTES, **THINK, response_format=OBJECT, may_reason=may_reason)
        assert BYTES.accepts(wanted, "{}")
        assert not BYTES.begins(wanted, "<")
        forced = constraint(BYTES, **THINK, tools=(PING,), tool_choice=ToolChoice("required"), may_reason=may_reason)
        assert not BYTES.begins(forced, "<thi")


def test_a_block_that_the_prompt_opened_with_a_tag_of_text_is_free_up_to_its_end() -> None:
    for ident, closing in (("think_tag", "</think>"), ("reasoning_tag", "</reasoning>")):
        inside: Any = constraint(BYTES, reasoning=ident, response_format=OBJECT, in_reasoning=True)
        assert inside.after == ()
        assert BYTES.accepts(inside, f"hm, {{}} no\n{closing}\n\n{{}}")
        assert not BYTES.accepts(inside, "{}")


def test_reasoning_before_free_text_with_strict_tools() -> None:
    wanted = constraint(BYTES, **THINK, tools=(STRICT,), in_reasoning=True)
    assert BYTES.accepts(wanted, "maybe <tool_call> x</think>" + GOOD["hermes_json"])
    assert not BYTES.begins(wanted, "hm</think><tool_call>x")


# --- gpt-oss ---

HARMONY = Vocabulary("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")
THOUGHT = "<|channel|>analysis<|message|>Hm, {} <b>?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
WEATHER_CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Ulm"}'


def harmony(**fields: Any) -> Constraint | None:
    return constraint(HARMONY, "harmony", "harmony", **fields)


def test_harmony_json_is_the_final_message() -> None:
    wanted = harmony(response_format=OBJECT)
    assert wanted is not None and not wanted.after and not wanted.opens
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    for before in ("", THOUGHT, THOUGHT + THOUGHT, THOUGHT + preamble):
        assert HARMONY.accepts(wanted, before + FINAL + '{"a": 1}')
        assert not HARMONY.begins(wanted, before + FINAL + "Sure")
        assert not HARMONY.begins(wanted, before + WEATHER_CALL)
    assert not HARMONY.accepts(wanted, THOUGHT)
    assert not HARMONY.begins(wanted, '{"a": 1}')
    assert not HARMONY.begins(wanted, THOUGHT * 9)


def test_harmony_calls() -> None:
    for choice in (ToolChoice("required"), ToolChoice("named", "get_weather")):
        forced = harmony(tools=(WEATHER, PING), tool_choice=choice)
        assert HARMONY.accepts(forced, WEATHER_CALL)
        assert HARMONY.accepts(forced, THOUGHT + WEATHER_CALL)
        assert not HARMONY.begins(forced, FINAL)
        assert not HARMONY.begins(forced, WEATHER_CALL.replace('"Ulm"', "1"))
        ping = WEATHER_CALL.replace("get_weather", "ping")[: -len('{"city": "Ulm"}')] + "{}"
        assert HARMONY.accepts(forced, ping) == (choice.name is None)
    strict = harmony(tools=(STRICT, PING))
    for good in (WEATHER_CALL, FINAL + "Any text, {.", THOUGHT + FINAL + "x"):
        assert HARMONY.accepts(strict, good)
    assert not HARMONY.begins(strict, WEATHER_CALL.replace("city", "town"))
    either = harmony(tools=(WEATHER,), response_format=OBJECT)
    assert HARMONY.accepts(either, WEATHER_CALL) and HARMONY.accepts(either, FINAL + "{}")
    assert not HARMONY.begins(either, FINAL + "x")
    assert harmony(tools=(WEATHER,)) is None
