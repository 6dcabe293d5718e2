# ruff: noqa: E501
"""A small real tokenizer, and chat templates that behave like those of well-known model families."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from start_llm.prompt.hf import HFTemplate, HFTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. def add(a, b): return a + b\n\n",
    '{"name": "read", "arguments": {"path": "src/calc.py", "limit": 2000}}\n<think>\nLet me see.\n</think>\n\n',
    "system user assistant tool model Current time is 2026-11-21 08:20 UTC. Today's date is 2026-11-21.\n",
    "I'll look at the helper first. Fixed: `add` in src/calc.py subtracted instead of adding; tests pass now.\n",
    "<tool_call>\n<function=read>\n<parameter=path>\n</parameter>\n</function>\n</tool_call> <tool_response>",
] * 4

SPECIALS = [
    "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<bos>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>",
    "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
]  # fmt: skip

_TOOLS_BLOCK = """{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}
{{- messages[0].content + '\n\n' }}{%- endif %}{{- '# Tools\n<tools>' }}{%- for tool in tools %}
{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"""

_CALLS = """{%- for call in message.tool_calls or [] %}{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}{%- else %}{{- call.function.arguments | tojson }}
{%- endif %}{{- '}\n</tool_call>' }}{%- endfor %}"""

CHATML = (
    _TOOLS_BLOCK
    + """{%- for message in messages %}{%- if not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}"""
    + _CALLS
    + """{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
)

_QWEN_LOOP = """{%- set ns = namespace(last=messages|length - 1, seek=true) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.seek and message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set ns.seek = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content or '' %}{%- set reasoning = message.reasoning_content or '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if SHOW %}{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- content }}{%- endif %}CALLS{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}{%- endfor %}""".replace("CALLS", _CALLS)

QWEN3 = (
    _TOOLS_BLOCK
    + _QWEN_LOOP.replace("SHOW", "loop.index0 > ns.last and reasoning")
    + """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""
)

QWEN35 = (
    _TOOLS_BLOCK
    + _QWEN_LOOP.replace("SHOW", "(preserve_thinking is defined and preserve_thinking) or loop.index0 > ns.last")
    + """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}
{%- else %}{{- '<think>\n' }}{%- endif %}{%- endif %}"""
)

GLM4 = """[gMASK]<sop>{%- if tools %}<|system|>
# Tools
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|user|>
{{ message.content }}
{%- elif message.role == 'assistant' %}<|assistant|>
{%- if message.reasoning_content %}{{ '\n<think>' + message.reasoning_content.strip() + '</think>' }}{%- else %}
<think></think>{%- endif %}
{%- if message.content.strip() %}{{ '\n' + message.content.strip() }}{%- endif %}
{%- for call in message.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name }}
{%- for k, v in call.function.arguments.items() %}{{- '\n<arg_key>' + k + '</arg_key>\n<arg_value>' }}
{{- v if v is string else v | tojson }}{{- '</arg_value>' }}{%- endfor %}{{- '\n</tool_call>' }}{%- endfor %}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- elif message.role == 'system' %}<|system|>
{{ message.content }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}"""

LLAMA3 = """{{- '<|begin_of_text|>' }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{%- if tools %}{%- for t in tools %}{{- t | tojson }}{{- '\n\n' }}
{%- endfor %}{%- endif %}{{- system + '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}
{%- elif message.tool_calls %}{%- if message.tool_calls|length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' + message.content }}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

GEMMA = """{{- '<bos>' }}{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{%- if message.role == 'assistant' %}{%- set role = 'model' %}{%- else %}{%- set role = message.role %}{%- endif %}
{{- '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

MISTRAL = """{{- '<s>' }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' }}{%- if loop.first and system %}{{- system + '\n\n' }}{%- endif %}
{{- message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id is not defined or message.tool_call_id|length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- '[TOOL_RESULTS]{"content": ' + message.content|tojson + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content if message.content }}
{%- if message.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}
{%- if call.id|length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments|tojson + ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}{%- endif %}{{- '</s>' }}
{%- else %}{{- raise_exception('Only user, assistant and tool roles are supported') }}{%- endif %}{%- endfor %}"""

HARMONY = """{{- '<|start|>system<|message|>Reasoning: medium<|end|>' }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{%- if system or tools %}{{- '<|start|>developer<|message|>' + system }}{%- for t in tools or [] %}{{- '\n' + (t | tojson) }}{%- endfor %}{{- '<|end|>' }}{%- endif %}
{%- set ns = namespace(last=-1, tool='') %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.tool_calls %}{%- if message.tool_calls|length > 1 %}{{- raise_exception('one call') }}{%- endif %}
{%- if message.content and message.thinking %}{{- raise_exception('Cannot pass both content and thinking') }}{%- endif %}
{%- if (message.content or message.thinking) and loop.index0 > ns.last %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}{%- endif %}
{%- set ns.tool = message.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + ns.tool + '<|channel|>commentary json<|message|>' + message.tool_calls[0].function.arguments|tojson + '<|call|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- elif message.role == 'tool' %}
{%- if not ns.tool %}{{- raise_exception('no call before') }}{%- endif %}
{{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' + message.content|tojson + '<|end|>' }}
{%- elif message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

TEMPLATES: dict[str, str] = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "qwen35": QWEN35,
    "glm4": GLM4,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "harmony": HARMONY,
}
EOS = {
    "chatml": ["<|im_end|>"],
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "qwen35": ["<|im_end|>", "<|endoftext|>"],
    "glm4": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "llama3": ["<|eot_id|>"],
    "gemma": ["<end_of_turn>"],
    "mistral": ["</s>"],
    "harmony": ["<|return|>", "<|call|>"],
}


@lru_cache(maxsize=1)
def fast_tokenizer() -> Any:
    """Byte-level BPE of 600 tokens, with the specials of all families."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def model(family: str) -> tuple[HFTemplate, HFTokenizer]:
    tokenizer = fast_tokenizer()
    eos = [tokenizer.convert_tokens_to_ids(name) for name in EOS[family]]
    return HFTemplate(tokenizer, TEMPLATES[family]), HFTokenizer(tokenizer, eos)
