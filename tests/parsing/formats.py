"""Calls written as each family's chat template writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Calls = Sequence[tuple[str, Mapping[str, Any]]]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _in_json(form: str, between: str = "", *, ascii_only: bool = True) -> Callable[[Calls], str]:
    """Calls in a form with the places NAME and ARGUMENTS."""

    def render(calls: Calls) -> str:
        texts = [(name, json.dumps(args, ensure_ascii=ascii_only)) for name, args in calls]
        return between.join(form.replace("NAME", name).replace("ARGUMENTS", text) for name, text in texts)

    return render


_HERMES = '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'
hermes = _in_json(_HERMES, "\n", ascii_only=False)
mistral = _in_json("[TOOL_CALLS]NAME[ARGS]ARGUMENTS")
_HARMONY = "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>"
_DEEPSEEK = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"
_FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>"


def deepseek(calls: Calls, form: str = _DEEPSEEK, between: str = "") -> str:
    return f"<｜tool▁calls▁begin｜>{_in_json(form, between)(calls)}<｜tool▁calls▁end｜>"


def deepseek_fenced(calls: Calls) -> str:
    return deepseek(calls, _FENCED, "\n")


def qwen(calls: Calls) -> str:
    def one(name: str, args: Mapping[str, Any]) -> str:
        params = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in args.items())
        return f"<tool_call>\n<function={name}>\n{params}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _keyed(outer: str, key: str, value: str) -> Callable[[Calls], str]:
    def render(calls: Calls) -> str:
        blocks = []
        for name, args in calls:
            body = "".join(f"<{key}>{k}</{key}>\n<{value}>{_text(v)}</{value}>\n" for k, v in args.items())
            blocks.append(f"<{outer}>{name}\n{body}</{outer}>")
        return "\n".join(blocks)

    return render


def _python(value: Any) -> str:
    return repr(value) if not isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def pythonic(calls: Calls) -> str:
    body = ", ".join(f"{name}({', '.join(f'{k}={_python(v)}' for k, v in args.items())})" for name, args in calls)
    return f"<|tool_call_start|>[{body}]<|tool_call_end|>"


def llama_python(calls: Calls) -> str:
    return "<|python_tag|>" + "; ".join(
        f"{name}.call({', '.join(f'{k}={_python(v)}' for k, v in args.items())})" for name, args in calls
    )


def mistral_list(calls: Calls) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": args} for name, args in calls])


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


def _invoked(outer: str, call: str, param: str) -> Callable[[Calls], str]:
    def render(calls: Calls) -> str:
        body = ""
        for name, args in calls:
            inner = "".join(f'<{param} name="{k}">{_text(v)}</{param}>\n' for k, v in args.items())
            body += f'<{call} name="{name}">\n{inner}</{call}>\n'
        return f"<{outer}>\n{body}</{outer}>" if outer else body

    return render


def minicpm5(calls: Calls) -> str:
    return "\n".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{k}"><![CDATA[{_text(v)}]]></param>' for k, v in args.items())
        + "</function>"
        for name, args in calls
    )


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(v, quote) for v in value) + "]"
    return json.dumps(value)


def gemma4(calls: Calls) -> str:
    quote = '<|"|>'
    return "".join(f"<|tool_call>call:{name}{_gemma(dict(args), quote)}<tool_call|>" for name, args in calls)


def function_gemma(calls: Calls) -> str:
    return "".join(
        f"<start_function_call>call:{name}{_gemma(dict(args), '<escape>')}<end_function_call>" for name, args in calls
    )


def _suffixed(calls: Calls) -> str:
    text = _keyed("tool_call:opensource", "arg_key:opensource", "arg_value:opensource")(calls)
    return f"<tool_calls:opensource>{text}\n</tool_calls:opensource>"


def k2_horizon(calls: Calls) -> str:
    text = _keyed("ifm|tool_call", "ifm|arg_key", "ifm|arg_value")(calls)
    return f"<ifm|tool_calls>\n{text}\n</ifm|tool_calls>"


def inkling(calls: Calls) -> str:
    return "".join(
        f"<|message_model|>{name}<|content_invoke_tool_json|>{json.dumps({'name': name, 'args': args})}<|end_message|>"
        for name, args in calls
    )


def deepseek_v41(calls: Calls) -> str:
    def one(name: str, args: Mapping[str, Any]) -> str:
        inner = "".join(
            f'<｜DSML｜ parameter name="{k}" string="{json.dumps(isinstance(v, str))}">{_text(v)}'
            "</｜DSML｜ parameter>\n"
            for k, v in args.items()
        )
        return f'<｜DSML｜ invoke name="{name}">\n{inner}</｜DSML｜ invoke>\n'

    return "<｜DSML｜ calls>\n" + "".join(one(*call) for call in calls) + "</｜DSML｜ calls>"


def deepseek_v4(calls: Calls) -> str:
    return deepseek_v41(calls).replace("｜ calls>", "｜tool_calls>").replace("｜DSML｜ ", "｜DSML｜")


def _minimax(name: str, value: Any) -> str:
    mark = "]<]minimax[>["
    if isinstance(value, Mapping):
        inner = "".join(_minimax(key, part) for key, part in value.items())
    elif isinstance(value, list):
        inner = "".join(_minimax("item", part) for part in value)
    else:
        inner = _text(value)
    return f"{mark}<{name}>{inner}{mark}</{name}>"


def minimax_m3(calls: Calls) -> str:
    mark, text = "]<]minimax[>[", ""
    for name, args in calls:
        inner = "".join(_minimax(key, value) for key, value in args.items())
        text += f'{mark}<invoke name="{name}">{inner}{mark}</invoke>\n'
    return f"{mark}<tool_call>\n{text}{mark}</tool_call>"


RENDER: dict[str, Callable[[Calls], str]] = {
    "hermes_json": hermes,
    "json_tools": hermes,
    "qwen3_coder": qwen,
    "glm47": _keyed("tool_call", "arg_key", "arg_value"),
    "glm4_native": _keyed("tool_call", "arg_key", "arg_value"),
    "laguna": _keyed("tool_call", "arg_key", "arg_value"),
    "longcat": _keyed("longcat_tool_call", "longcat_arg_key", "longcat_arg_value"),
    "glm4_xml": _in_json("<tool_call><name>NAME</name><arguments>ARGUMENTS</arguments></tool_call>", "\n"),
    "llama_xml": _in_json("<function=NAME>ARGUMENTS</function>", "\n"),
    "llama": llama_python,
    "pythonic": pythonic,
    "mistral": mistral,
    "deepseek": deepseek,
    "kimi_k2": kimi_k2,
    "kimi_k3": kimi_k3,
    "minimax_m2": _invoked("minimax:tool_call", "invoke", "parameter"),
    "muse_spark": _invoked("atem:function_calls", "atem:invoke", "atem:parameter"),
    "minicpm5": minicpm5,
    "gemma4": gemma4,
    "function_gemma": function_gemma,
    "harmony": _in_json(_HARMONY),
    "deepseek_v4": deepseek_v4,
    "hy_v4": _suffixed,
    "inkling": inkling,
    "k2_horizon": k2_horizon,
    "minimax_m3": minimax_m3,
}
