"""Oracle checkpoints of many families: a template in the family's form, an answer in its call format."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.oracle import build_oracle
from tests.parsing.formats import RENDER, deepseek_fenced, mistral_list

PARIS = [("get_weather", {"city": "Paris"})]

_TEMPLATE = r"""{%- if tools %}{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- 'Tools:' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for tool_call in message.tool_calls or [] %}{%- set tool_call = tool_call.function %}CALL{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

_JSON = "tool_call.arguments | tojson"
_EACH = "{%- for key, value in tool_call.arguments | items %}"


def _keyed(outer: str, key: str, value: str) -> str:
    each = f"{_EACH}{{{{- '<{key}>' + key + '</{key}>\\n<{value}>' + value + '</{value}>\\n' }}}}{{%- endfor %}}"
    return f"{{{{- '\\n<{outer}>' + tool_call.name + '\\n' }}}}{each}{{{{- '</{outer}>' }}}}"


def _tagged(outer: str, call: str, param: str) -> str:
    each = f"{_EACH}{{{{- '<{param} name=\"' + key + '\">' + value + '</{param}>\\n' }}}}{{%- endfor %}}"
    opened = f"<{outer}>\\n" if outer else ""
    closed = f"\\n</{outer}>" if outer else ""
    return f"{{{{- '{opened}<{call} name=\"' + tool_call.name + '\">\\n' }}}}{each}{{{{- '</{call}>{closed}' }}}}"


def _around(before: str, between: str, after: str) -> str:
    return f"{{{{- '{before}' + tool_call.name + '{between}' }}}}{{{{- {_JSON} }}}}{{{{- '{after}' }}}}"


HERMES = _around(r"\n<tool_call>\n{\"name\": \"", r"\", \"arguments\": ", r"}\n</tool_call>").replace('\\"', '"')
CALLS = {
    "hermes": HERMES,
    "xml": f"{{{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}}}{_EACH}"
    "{{- '<parameter=' + key + '>\\n' + value + '\\n</parameter>\\n' }}{%- endfor %}"
    "{{- '</function>\\n</tool_call>' }}",
    "keyed": _keyed("tool_call", "arg_key", "arg_value"),
    "longcat": _keyed("longcat_tool_call", "longcat_arg_key", "longcat_arg_value"),
    "llama": _around('{"name": "', '", "parameters": ', "}"),
    "python": _around("<|python_tag|>", ".call(", ")"),
    "mistral": _around("[TOOL_CALLS]", "[ARGS]", ""),
    "mistral_list": _around('[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]"),
    "harmony": _around("<|start|>assistant<|channel|>commentary to=functions.", "<|message|>", "<|call|>"),
    "deepseek": _around(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi": _around(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "gemma4": _around("<|tool_call>call:", "", "<tool_call|>"),
    "function_gemma": _around("<start_function_call>call:", "", "<end_function_call>"),
    "pythonic": _around("<|tool_call_start|>[", "(", ")]<|tool_call_end|>"),
    "minimax": _tagged("minimax:tool_call", "invoke", "parameter"),
    "minicpm": _tagged("", "function", "param"),
}


def bare_json(calls: Any) -> str:
    return "".join(json.dumps({"name": name, "arguments": args}) for name, args in calls)


def llama_json(calls: Any) -> str:
    return "".join(json.dumps({"name": name, "parameters": args}) for name, args in calls)


@dataclass(frozen=True)
class Caller:
    """
    Attributes:
        name: of the model, by which its family is known.
        family: which that is.
        call: how the template writes a call, out of `CALLS`.
        answers: what the model writes.
        format: what that is; ``None``: it has no mark.
    """

    name: str
    family: str
    call: str
    answers: Callable[[Any], str]
    format: str | None

    def reply(self) -> str:
        return self.answers(PARIS)


CALLERS = (
    Caller("Qwen3-8B", "qwen3", "hermes", RENDER["hermes_json"], "json_tools"),
    Caller("Qwen3-Coder-30B", "qwen3", "xml", RENDER["qwen3_coder"], "qwen3_coder"),
    Caller("GLM-4.7", "glm4", "keyed", RENDER["glm47"], "glm47"),
    Caller("Llama-3.1-8B", "llama", "llama", llama_json, "llama"),
    Caller("Llama-3.2-3B", "llama", "python", RENDER["llama"], "llama"),
    Caller("gemma-4-12b", "gemma", "gemma4", RENDER["gemma4"], "gemma4"),
    Caller("functiongemma-270m", "gemma", "function_gemma", RENDER["function_gemma"], "function_gemma"),
    Caller("Devstral-Small", "mistral", "mistral", RENDER["mistral"], "mistral"),
    Caller("Mistral-7B-v0.3", "mistral", "mistral_list", mistral_list, "mistral"),
    Caller("gpt-oss-20b", "gpt-oss", "harmony", RENDER["harmony"], "harmony"),
    Caller("DeepSeek-V3.1", "deepseek", "deepseek", RENDER["deepseek"], "deepseek"),
    Caller("DeepSeek-R1-0528", "deepseek", "deepseek", deepseek_fenced, "deepseek"),
    Caller("Kimi-K2", "kimi", "kimi", RENDER["kimi_k2"], "kimi_k2"),
    Caller("MiniMax-M2", "minimax", "minimax", RENDER["minimax_m2"], "minimax_m2"),
    Caller("MiniCPM5-8B", "minicpm", "minicpm", RENDER["minicpm5"], "minicpm5"),
    Caller("LongCat-Flash", "longcat", "longcat", RENDER["longcat"], "longcat"),
    Caller("LFM2-8B", "lfm2", "pythonic", RENDER["pythonic"], "pythonic"),
    Caller("Nemotron-3-Nano", "nemotron", "xml", RENDER["qwen3_coder"], "qwen3_coder"),
    Caller("Laguna-XS", "laguna", "keyed", RENDER["laguna"], "glm47"),
    Caller("Some-Model", "generic", "hermes", bare_json, None),
)


def build_caller(folder: Path, name: str, call: str) -> Path:
    """An oracle of that name whose template writes calls so."""
    path = build_oracle(folder / name)
    template = _TEMPLATE.replace("CALL", CALLS[call])
    (path / "chat_template.jinja").write_text(template, "utf-8")
    settings = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}), "utf-8")
    return path
