"""Chat templates of the oracle: ChatML with Hermes tools; they differ in what they do to reasoning.

- ``plain``: reasoning of every past turn is shown.
- ``qwen3``: reasoning before the last user message is dropped.
- ``seeing``: as ``plain``, and content may be a list of parts, texts and images.
- ``xml``: as ``plain``, with calls in Qwen's XML.
"""

from __future__ import annotations

_HEAD = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n\nYou may call one or more functions to help with the task.\n\n' }}
    {{- 'The functions, inside <tools></tools>:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nCALL_FORM<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""

_LAST_QUERY = r"""{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
"""

_MESSAGES = r"""{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content or message.reasoning or '' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if reasoning and (SHOW_REASONING) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if not loop.first or content %}
                {{- '\n' }}
            {%- endif %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            ONE_CALL
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

_CONTENT = "{%- set content = message.content if message.content is string else '' %}"
_PARTS = r"""{%- set parts = namespace(text='') %}
    {%- if message.content is string %}
        {%- set parts.text = message.content %}
    {%- else %}
        {%- for part in message.content or [] %}
            {%- set image = '<|vision_start|><|image_pad|><|vision_end|>' %}
            {%- set parts.text = parts.text + (part.text if part.type == 'text' else image) %}
        {%- endfor %}
    {%- endif %}
    {%- set content = parts.text %}"""

_JSON_FORM = r"""For each call, answer with a JSON object inside <tool_call></tool_call>:\n<tool_call>\n' }}
    {{- '{"name": <name>, "arguments": <arguments>}\n</tool_call>"""
_XML_FORM = r"""Each call:\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n' }}
    {{- '</tool_call>"""
_JSON_CALL = r"""{{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}"""
_XML_CALL = r"""{{- '<tool_call>\n<function=' + tool_call.name + '>\n' }}
            {%- for key, value in tool_call.arguments | items %}
                {{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}"""


def _with_reasoning(condition: str, form: str = _JSON_FORM, call: str = _JSON_CALL) -> str:
    messages = _MESSAGES.replace("SHOW_REASONING", condition).replace("ONE_CALL", call)
    return _HEAD.replace("CALL_FORM", form) + _LAST_QUERY + messages


TEMPLATES = {
    "plain": _with_reasoning("true"),
    "qwen3": _with_reasoning("loop.index0 > ns.last"),
    "seeing": _with_reasoning("true").replace(_CONTENT, _PARTS),
    "xml": _with_reasoning("true", _XML_FORM, _XML_CALL),
}
