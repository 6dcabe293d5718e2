"""Calls written as each family's chat template writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Arguments = Mapping[str, Any]
Calls = Sequence[tuple[str, Arguments]]
Render = Callable[[Calls], str]


def _each(one: Callable[[str, Arguments], str], before: str = "", between: str = "", behind: str = "") -> Render:
    """All calls, each written by `one`."""
    return lambda calls: before + between.join(one(name, args) for name, args in calls) + behind


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _members(form: str, args: Arguments) -> str:
    """All arguments in a form with the places KEY and VALUE."""
    return "".join(form.replace("KEY", key).replace("VALUE", _text(value)) for key, value in args.items())


def _in_json(form: str, before: str = "", between: str = "", behind: str = "", *, ascii_only: bool = True) -> Render:
    """Calls in a form with the places NAME and ARGUMENTS."""

    def one(name: str, args: Arguments) -> str:
        return form.replace("NAME", name).replace("ARGUMENTS", json.dumps(args, ensure_ascii=ascii_only))

    return _each(one, before, between, behind)


hermes = _in_json('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', "", "\n", ascii_only=False)
mistral_list = _in_json('{"name": "NAME", "arguments": ARGUMENTS}', "[TOOL_CALLS][", ", ", "]")
_HARMONY = "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>"
_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"
_FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>"
deepseek = _in_json(_DEEPSEEK, _SECTION[0], "", _SECTION[1])
deepseek_fenced = _in_json(_FENCED, _SECTION[0], "\n", _SECTION[1])
_INKLING = '<|message_model|>NAME<|content_invoke_tool_json|>{"name": "NAME", "args": ARGUMENTS}<|end_message|>'


def _tagged(form: str, member: str, before: str = "", between: str = "", behind: str = "") -> Render:
    """Calls in a form with the places NAME and MEMBERS; for `member` see `_members`."""

    def one(name: str, args: Arguments) -> str:
        return form.replace("NAME", name).replace("MEMBERS", _members(member, args))

    return _each(one, before, between, behind)


def _keyed(outer: str, key: str, value: str, before: str = "", behind: str = "") -> Render:
    form, member = f"<{outer}>NAME\nMEMBERS</{outer}>", f"<{key}>KEY</{key}>\n<{value}>VALUE</{value}>\n"
    return _tagged(form, member, before, "\n", behind)


glm = _keyed("tool_call", "arg_key", "arg_value")
qwen = _tagged(
    "<tool_call>\n<function=NAME>\nMEMBERS</function>\n</tool_call>",
    "<parameter=KEY>\nVALUE\n</parameter>\n",
    between="\n",
)


def _invoked(outer: str, call: str, param: str) -> Render:
    form, member = f'<{call} name="NAME">\nMEMBERS</{call}>\n', f'<{param} name="KEY">VALUE</{param}>\n'
    return _tagged(form, member, f"<{outer}>\n", "", f"</{outer}>")


def _python(name: str, args: Arguments) -> str:
    values = ((k, json.dumps(v, ensure_ascii=False) if isinstance(v, str) else repr(v)) for k, v in args.items())
    return f"{name}({', '.join(f'{key}={value}' for key, value in values)})"


def kimi_k2(calls: Calls) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(args)}<|tool_call_end|>"
        for index, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def kimi_k3(calls: Calls) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    body = ""
    for index, (name, args) in enumerate(calls):
        inner = "".join(
            f'<|open|>argument key="{k}" type="{kinds[type(v)]}"<|sep|>{_text(v)}<|close|>argument<|sep|>'
            for k, v in args.items()
        )
        body += f'<|open|>call tool="{name}" index="{index}"<|sep|>{inner}<|close|>call<|sep|>'
    return f"<|open|>tools<|sep|>{body}<|close|>tools<|sep|>"


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(v, quote) for v in value) + "]"
    return json.dumps(value)


def _called(before: str, quote: str, behind: str) -> Render:
    return _each(lambda name, args: f"{before}call:{name}{_gemma(dict(args), quote)}{behind}")


def _dsml(name: str, args: Arguments) -> str:
    inner = "".join(
        f'<｜DSML｜ parameter name="{k}" string="{json.dumps(isinstance(v, str))}">{_text(v)}</｜DSML｜ parameter>\n'
        for k, v in args.items()
    )
    return f'<｜DSML｜ invoke name="{name}">\n{inner}</｜DSML｜ invoke>\n'


deepseek_v41 = _each(_dsml, "<｜DSML｜ calls>\n", "", "</｜DSML｜ calls>")


def deepseek_v4(calls: Calls) -> str:
    return deepseek_v41(calls).replace("｜ calls>", "｜tool_calls>").replace("｜DSML｜ ", "｜DSML｜")


_MARK = "]<]minimax[>["


def _minimax(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        inner = "".join(_minimax(key, part) for key, part in value.items())
    elif isinstance(value, list):
        inner = "".join(_minimax("item", part) for part in value)
    else:
        inner = _text(value)
    return f"{_MARK}<{name}>{inner}{_MARK}</{name}>"


def _minimax_m3(name: str, args: Arguments) -> str:
    inner = "".join(_minimax(key, value) for key, value in args.items())
    return f'{_MARK}<invoke name="{name}">{inner}{_MARK}</invoke>\n'


RENDER: dict[str, Render] = {
    "hermes_json": hermes,
    "json_tools": hermes,
    "qwen3_coder": qwen,
    "glm47": glm,
    "glm4_native": glm,
    "laguna": glm,
    "longcat": _keyed("longcat_tool_call", "longcat_arg_key", "longcat_arg_value"),
    "glm4_xml": _in_json("<tool_call><name>NAME</name><arguments>ARGUMENTS</arguments></tool_call>", "", "\n"),
    "llama_xml": _in_json("<function=NAME>ARGUMENTS</function>", "", "\n"),
    "llama": _each(lambda name, args: _python(f"{name}.call", args), "<|python_tag|>", "; "),
    "pythonic": _each(_python, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "mistral": _in_json("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
    "deepseek": deepseek,
    "kimi_k2": kimi_k2,
    "kimi_k3": kimi_k3,
    "minimax_m2": _invoked("minimax:tool_call", "invoke", "parameter"),
    "muse_spark": _invoked("atem:function_calls", "atem:invoke", "atem:parameter"),
    "minicpm5": _tagged(
        '<function name="NAME">MEMBERS</function>', '<param name="KEY"><![CDATA[VALUE]]></param>', between="\n"
    ),
    "gemma4": _called("<|tool_call>", '<|"|>', "<tool_call|>"),
    "function_gemma": _called("<start_function_call>", "<escape>", "<end_function_call>"),
    "harmony": _in_json(_HARMONY),
    "deepseek_v4": deepseek_v4,
    "hy_v4": _keyed(
        *(f"{name}:opensource" for name in ("tool_call", "arg_key", "arg_value")),
        "<tool_calls:opensource>",
        "\n</tool_calls:opensource>",
    ),
    "inkling": _in_json(_INKLING),
    "k2_horizon": _keyed("ifm|tool_call", "ifm|arg_key", "ifm|arg_value", "<ifm|tool_calls>\n", "\n</ifm|tool_calls>"),
    "minimax_m3": _each(_minimax_m3, f"{_MARK}<tool_call>\n", "", f"{_MARK}</tool_call>"),
}
