"""Malformed and awkward output as models really write it, with what must come of it, written by hand.

The tools are those of `helpers.TOOLS`: read(path, limit, follow, ratio, tags, options, note), bash(command),
write(path, content), now().
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

Calls = tuple[tuple[str, dict[str, Any]], ...]


@dataclass(frozen=True)
class Case:
    """`text` is the model's; `content`, `calls` and `reasoning` are what the client gets."""

    name: str
    text: str
    content: str = ""
    calls: Calls = ()
    reasoning: str | None = None
    form: str = "hermes_json"
    inside: bool = False
    tools: bool = True


def _bash(command: str) -> Calls:
    return (("bash", {"command": command}),)


def _read(path: str, **more: Any) -> Calls:
    return (("read", {"path": path, **more}),)


def _write(path: str, content: str) -> Calls:
    return (("write", {"path": path, "content": content}),)


NOW: Calls = (("now", {}),)
LS = '{"name": "bash", "arguments": {"command": "ls"}}'
CALL = f"<tool_call>\n{LS}\n</tool_call>"
PWD = CALL.replace("ls", "pwd")
RESULT = "<tool_response>\na.txt\n</tool_response>"
BASH = LS.replace("arguments", "parameters")
NOW_JSON = '{"name": "now", "arguments": {}}'


def _kept(name: str, text: str, **more: Any) -> Case:
    """Text that is no call: the client gets it as it is."""
    return Case(name, text, text, **more)


def _thought(name: str, thought: str) -> Case:
    """Nothing in it is a call."""
    return Case(name, f"<think>{thought}</think>Hi.", "Hi.", reasoning=thought)


def _python(name: str, call: str, calls: Calls) -> Case:
    return Case(name, f"<|tool_call_start|>[{call}]<|tool_call_end|>", calls=calls, form="pythonic")


def _tagged(name: str, inside: str, calls: Calls) -> Case:
    return Case(name, f"<tool_call>{inside}</tool_call>", calls=calls)


def _asked(name: str, tool: str, arguments: str, calls: Calls) -> Case:
    """A call in JSON. `arguments`: all that stands behind their key, right or wrong."""
    return _tagged(name, f'{{"name": "{tool}", "arguments": {arguments}}}', calls)


TAGS = (
    Case("closing tag missing at the end", f"<tool_call>\n{LS}", calls=_bash("ls")),
    Case("closing tag missing, prose follows", f"<tool_call>{LS}\nDone.", calls=_bash("ls")),
    Case("opening tag missing", f"{LS}\n</tool_call>", calls=_bash("ls")),
    Case("opening tag missing after prose", f"Listing.\n{LS}\n</tool_call>", content="Listing.", calls=_bash("ls")),
    Case("both tags missing", LS, calls=_bash("ls")),
    Case("both tags missing, a list", f"[{LS}, {NOW_JSON}]\nDone.", calls=(*_bash("ls"), *NOW)),
    _kept("a list that is no call", '[\n{"name": "bash"}]\n[1]'),
    Case("both tags missing, Llama's key", BASH, calls=_bash("ls")),
    Case("opening tag three times", f"<tool_call><tool_call>\n<tool_call>{LS}</tool_call>", calls=_bash("ls")),
    Case("closing tag twice", f"<tool_call>{LS}</tool_call>\n</tool_call>", calls=_bash("ls")),
    Case("closing tag written as an opening one", f"<tool_call>{LS}<tool_call>", calls=_bash("ls")),
    _tagged("two calls, the first not closed", f"{LS}\n<tool_call>{NOW_JSON}", (*_bash("ls"), *NOW)),
    _tagged("two calls in one pair of tags", f"{LS}\n{NOW_JSON}", (*_bash("ls"), *NOW)),
    _tagged("a list in the tags", f"[{LS}]", _bash("ls")),
    Case("the same call twice", f"<tool_call>{LS}</tool_call>\n<tool_call>{LS}</tool_call>", calls=_bash("ls") * 2),
    _tagged(
        "the same tool twice, other arguments",
        f"{LS}</tool_call><tool_call>{LS.replace('ls', 'ls -a')}",
        (*_bash("ls"), *_bash("ls -a")),
    ),
    Case("a leaked end of turn", f"<tool_call>{LS}</tool_call><|im_end|>", calls=_bash("ls")),
    Case("a leaked end of turn instead of the closing tag", f"<tool_call>{LS}<|im_end|>\n", calls=_bash("ls")),
    Case("a leaked turn start before", f"<|im_start|>assistant\n<tool_call>{LS}</tool_call>", calls=_bash("ls")),
    _tagged("a leaked turn start inside", f"<|im_start|>{LS}", _bash("ls")),
    Case("a leaked end of text", "Hello.<|endoftext|>", content="Hello."),
    Case("several leaked ends", "Hello.<|im_end|>\n<|endoftext|>\n", content="Hello."),
    _tagged("an end of turn between calls", f"{LS}</tool_call><|im_end|>\n<tool_call>{NOW_JSON}", (*_bash("ls"), *NOW)),
)

JSON = (
    _asked("a trailing comma", "bash", '{"command": "ls",},', _bash("ls")),
    _asked("a missing comma", "read", '{"limit": 3 "path": "a"}', (("read", {"limit": 3, "path": "a"}),)),
    _asked(
        "Python's literals", "read", '{"path": "a", "follow": True, "note": None}', _read("a", follow=True, note=None)
    ),
    _tagged("single quotes", "{'name': 'bash', 'arguments': {'command': 'echo \"a\"'}}", _bash('echo "a"')),
    _tagged(
        "an apostrophe in single quotes",
        "{'name': 'bash', 'arguments': {'command': 'echo it\\'s'}}",
        _bash("echo it's"),
    ),
    _asked("keys without quotes", "read", '{path: "a", limit: 2}', _read("a", limit=2)),
    _asked("arguments as a JSON string", "bash", '"{\\"command\\": \\"ls\\"}"', _bash("ls")),
    _asked("arguments as a bare string", "bash", '"ls"', _bash("ls")),
    _asked("arguments null", "now", "null", NOW),
    _tagged("no arguments", '{"name": "now"}', NOW),
    _tagged("arguments before the name", '{"arguments": {"command": "ls"}, "name": "bash"}', _bash("ls")),
    _tagged("arguments beside the name", '{"name": "bash", "command": "ls"}', _bash("ls")),
    _tagged("OpenAI's nesting", f'{{"type": "function", "function": {LS}}}', _bash("ls")),
    _asked("a brace too many", "bash", '{"command": "ls"}}', _bash("ls")),
    _asked("a brace missing", "bash", '{"command": "ls"', _bash("ls")),
    _tagged("two braces missing", '{"name": "bash", "arguments": {"command": "ls"', _bash("ls")),
    Case(
        "cut inside a string",
        '<tool_call>{"name": "write", "arguments": {"path": "a", "content": "one\\ntw',
        calls=_write("a", "one\ntw"),
    ),
    Case("cut after a backslash", '<tool_call>{"name": "bash", "arguments": {"command": "a\\', calls=_bash("a")),
    Case("cut inside a key", '<tool_call>{"name": "read", "arguments": {"path": "a", "lim', calls=_read("a")),
    Case("cut after a key", '<tool_call>{"name": "read", "arguments": {"path": "a", "limit":', calls=_read("a")),
    Case(
        "cut inside a literal",
        '<tool_call>{"name": "read", "arguments": {"path": "a", "follow": tr',
        calls=_read("a", follow=True),
    ),
    _kept("cut before the name is whole", '<tool_call>{"name": "ba'),
    Case(
        "cut inside a string, then closed and another call",
        f'<tool_call>{{"name": "read", "arguments": {{"path": "a</tool_call>\n<tool_call>{LS}</tool_call>',
        calls=(*_read("a"), *_bash("ls")),
    ),
    _asked(
        "the closing tag as content", "bash", '{"command": "grep \'</tool_call>\' x"}', _bash("grep '</tool_call>' x")
    ),
    _asked("quotes that are not escaped", "bash", '{"command": "echo "hi there" > f"}', _bash('echo "hi there" > f')),
    _asked("a raw line break in a string", "bash", '{"command": "a\nb\tc"}', _bash("a\nb\tc")),
    _asked("an escape that JSON does not know", "bash", '{"command": "grep \\d+ \\$x"}', _bash("grep \\d+ \\$x")),
    _asked("triple quotes", "write", '{"path": "a", "content": """x = "1"\ny"""}', _write("a", 'x = "1"\ny')),
    _asked(
        "deep escapes stay as they are", "bash", '{"command": "sed \\"s/\\\\\\\\n/x/\\""}', _bash('sed "s/\\\\n/x/"')
    ),
    _tagged("a fence inside the tags", f"\n```json\n{LS}\n```\n", _bash("ls")),
    _asked("a number as a string", "read", '{"path": "a", "limit": "5"}', _read("a", limit=5)),
    _asked("a boolean as a string", "read", '{"path": "a", "follow": "false"}', _read("a", follow=False)),
    _asked("a list as a string", "read", '{"path": "a", "tags": "[\\"x\\"]"}', _read("a", tags=["x"])),
    _asked("one thing where a list is due", "read", '{"path": "a", "tags": "x"}', _read("a", tags=["x"])),
    _asked("a number where a string is due", "bash", '{"command": 42}', _bash("42")),
    _asked("an object where a string is due", "write", '{"path": "", "content": {"k": [1]}}', _write("", '{"k": [1]}')),
    _asked("an unknown tool", "grep", '{"q": 1}', (("grep", {"q": 1}),)),
    _kept("an unknown tool, cut", 'So: <tool_call>{"name": "grep", "arguments": {"q": '),
    _kept("no call at all in the tags", "<tool_call>what now?</tool_call>"),
    _tagged("a namespace before the name", '{"name": "functions.bash", "arguments": {"command": "ls"}}', _bash("ls")),
)

PARAMETER = "<parameter=command>\nls\n</parameter>\n"
FUNCTION = f"<function=bash>\n{PARAMETER}</function>"
XML = (
    Case("no wrapper", FUNCTION, calls=_bash("ls")),
    Case("only the closing wrapper", f"Now:\n{FUNCTION}\n</tool_call>", "Now:", _bash("ls")),
    _tagged("parameter not closed", "\n<function=bash>\n<parameter=command>\nls\n</function>\n", _bash("ls")),
    _tagged(
        "parameter not closed before the next",
        "\n<function=read>\n<parameter=path>\na\n<parameter=limit>\n3\n</parameter>\n</function>\n",
        _read("a", limit=3),
    ),
    _tagged("function not closed", f"\n<function=bash>\n{PARAMETER}", _bash("ls")),
    _tagged("function opened twice", f"\n<function=bash>\n{FUNCTION}\n", _bash("ls")),
    Case("cut inside a value", "<tool_call>\n<function=bash>\n<parameter=command>\nls -", calls=_bash("ls -")),
    Case("cut inside a closing tag", "<function=bash>\n<parameter=command>\nls\n</param", calls=_bash("ls\n</param")),
    _tagged(
        "the closing tag as content",
        f"\n{FUNCTION}\n".replace("ls", "grep '</parameter>' x"),
        _bash("grep '</parameter>' x"),
    ),
    Case("closed, then prose instead of a closing tag", f"<function=bash>\n{PARAMETER}That is it.", calls=_bash("ls")),
    _tagged(
        "content with markup, indentation and blank lines",
        "\n<function=write>\n<parameter=path>\na.html\n</parameter>\n<parameter=content>\n"
        '  <p>&amp; "x"</p>\n\n\n</parameter>\n</function>\n',
        _write("a.html", '  <p>&amp; "x"</p>\n\n'),
    ),
    Case(
        "values on the tag's line",
        "<function=read><parameter=path>a</parameter><parameter=limit>3</parameter></function>",
        calls=_read("a", limit=3),
    ),
    Case("JSON in the function tag", '<function=bash>{"command": "ls"}</function>', calls=_bash("ls")),
    Case(
        "types from the schema",
        "<function=read><parameter=path>12</parameter><parameter=follow>True</parameter><parameter=tags>['a', 'b']"
        "</parameter><parameter=note>null</parameter></function>",
        calls=_read("12", follow=True, tags=["a", "b"], note=None),
    ),
    _tagged("no parameters", "\n<function=now>\n</function>\n", NOW),
    Case("a leaked end of turn", f"<tool_call>\n<function=bash>\n{PARAMETER.strip()}<|im_end|>", calls=_bash("ls")),
    _tagged("two functions in one wrapper", f"\n<function=now>\n</function>\n{FUNCTION}\n", (*NOW, *_bash("ls"))),
)

KEY, VALUE = "<arg_key>command</arg_key>", "<arg_value>ls</arg_value>"
GLM = (
    _tagged("the legacy form", f"bash {KEY}{VALUE}", _bash("ls")),
    Case("opening tag missing", f"bash{KEY}\n{VALUE}\n</tool_call>", calls=_bash("ls")),
    Case("closing tag missing", f"Sure.\n<tool_call>bash\n{KEY}\n{VALUE}\n", "Sure.", _bash("ls")),
    _tagged("value not closed", f"bash{KEY}<arg_value>ls", _bash("ls")),
    _tagged(
        "value not closed before the next key",
        "read<arg_key>path</arg_key><arg_value>a<arg_key>limit</arg_key><arg_value>3</arg_value>",
        _read("a", limit=3),
    ),
    _tagged("value tag missing", f"bash{KEY}ls</arg_value>", _bash("ls")),
    _tagged("no arguments", "now", NOW),
    _tagged("JSON after the name", 'bash\n{"command": "ls"}', _bash("ls")),
    Case("opening tag three times", "<tool_call><tool_call><tool_call>now</tool_call>", calls=NOW),
    _tagged(
        "its own markup as content",
        f"bash{KEY}{VALUE}".replace("ls", "grep '</arg_value>' x"),
        _bash("grep '</arg_value>' x"),
    ),
    Case("cut inside a value", f"<tool_call>bash\n{KEY}\n<arg_value>ls", calls=_bash("ls")),
    _kept("cut after the name", "<tool_call>bash\n"),
    _tagged("GLM-4's own XML", '<name>bash</name><arguments>{"command": "ls"}</arguments>', _bash("ls")),
)

FENCED = (
    Case("only a call object in a fence", f"```json\n{LS}\n```", calls=_bash("ls")),
    Case("the same without a language", f"\n```\n{LS}\n```\n", calls=_bash("ls")),
    _kept("an example in a fence", f"So:\n```json\n{LS}\n```"),
    _kept("other JSON in a fence", '```json\n{"name": "x"}\n```'),
)

HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
TEXT = (
    _kept("a mention in backticks", "Use `<tool_call>` for that."),
    _kept("a whole call in backticks", f"Write `<tool_call>{LS}</tool_call>`."),
    _kept("a whole call in a fence", f"So:\n```xml\n<tool_call>\n{LS}\n</tool_call>\n```\nOk?"),
    Case("a call after a fence", f"So:\n```\nls\n```\n<tool_call>{LS}</tool_call>", "So:\n```\nls\n```", _bash("ls")),
    _kept("a mention in prose", "The <tool_call> tag opens a call."),
    _kept("no tools in the request", "Call <function=bash> now.", tools=False),
    _kept("JSON that only looks like a call", '{"name": "bash", "version": 3}'),
    _kept("JSON of an unknown tool", '{"name": "npm", "arguments": {}}'),
    _kept("a tool's name in prose", "I will read and bash."),
    _kept("a lone closing tag", "a </tool_call> b"),
    _kept("an ampersand and angles", "if a < b && c > d: <b>"),
    Case("text before, between and after", f"One.\n\n<tool_call>{LS}</tool_call>\n\nTwo.", "One.", _bash("ls")),
    Case("the word null before a tag", "null<|im_end|>", content="null"),
    Case("an end of turn in the middle", "Hello.<|im_end|>\nMore <b>.", content="Hello.\nMore <b>."),
    Case("an end of turn between two words", "one<|im_end|>two", content="onetwo"),
    Case("the own turn begun again", "Hello.<|im_end|>\n<|im_start|>assistant\nMore.", content="Hello.\nMore."),
    Case("the user's turn, played by the model", "Hello.<|im_end|>\n<|im_start|>user\nAnd you?", content="Hello."),
    Case("the user's turn without an end of the own one", "Hello.\n<|im_start|>user\nAnd you?", content="Hello.\n"),
    Case("the user's turn in Llama's tokens", f"Hi.<|eot_id|>{HEADER.format('user')}And you?", content="Hi."),
    Case("the own turn begun again in Llama's tokens", f"{HEADER.format('assistant')}Hello.", content="Hello."),
    Case("the user's turn in Gemma's tokens", "Hi.<end_of_turn>\n<start_of_turn>user\nx", content="Hi."),
    Case("the user's turn inside a thought", "<think>hm<|im_end|>\n<|im_start|>user\nx</think>y", reasoning="hm"),
    Case("a tool's result, by the model", f"{CALL}<|im_end|>\n<|im_start|>user\n{RESULT}\n{PWD}", "", _bash("ls")),
    Case("a tool's result without turn tokens", f"{CALL}\n{RESULT}\n{PWD}", calls=_bash("ls")),
    _kept("a mention of results", "It comes as <tool_response>."),
    Case("a fence behind a call, with an example", f"{CALL}\nIn code:\n```\n{PWD}\n```", calls=_bash("ls")),
    Case("another call behind some text", f"First.\n{CALL}\nThen:\n{PWD}\nDone.", "First.", _bash("ls") + _bash("pwd")),
    _kept("talk about turn tokens", "ChatML ends a turn with <|im_end|> and goes on."),
)

REASONING = (
    Case("thinking, then a call", f"<think>\nhm\n</think>\n\n<tool_call>{LS}</tool_call>", "", _bash("ls"), "hm"),
    Case("opened by the template", "hm\n</think>\n\nHi.", content="Hi.", reasoning="hm", inside=True),
    Case("opened twice", "<think>\nhm\n</think>\nHi.", content="Hi.", reasoning="hm", inside=True),
    Case("closed twice", "<think>hm</think>\n</think>\n\nHi.", content="Hi.", reasoning="hm"),
    Case("never closed", "<think>\nhm, well", reasoning="hm, well"),
    Case("other tags", "<thinking>\nhm\n</thinking>\n\nHi.", content="Hi.", reasoning="hm"),
    Case("other tags again", "\n<reasoning>hm</reasoning>Hi.", content="Hi.", reasoning="hm"),
    Case("other tags, opened twice", "<thinking><thinking>hm</thinking>Hi.", content="Hi.", reasoning="hm"),
    Case("other tags after the own ones", "<think>a</think>\n<thinking>b</thinking>Hi.", "Hi.", (), "a\nb"),
    _kept("other tags behind text", "Use these: <thinking>x</thinking>"),
    Case("other tags closed like the own ones", "<thinking>a </think> b</thinking>Hi.", "Hi.", (), "a </think> b"),
    _kept("talk about tags", "The <think> tag, and </think>, too."),
    _kept("talk about tags in quotes", 'It has "<think>" and (</think>).'),
    _thought("a call talked about inside", f"I could write <tool_call>{LS}</tool_call> now."),
    _thought("a call planned in a fence inside", f"So:\n```\n<tool_call>{LS}</tool_call>\n```"),
    Case("closed, never opened", "Fine.\n</think>\n\nHi.", content="Fine.\nHi."),
    Case("a call inside", f"hm\n<tool_call>\n{LS}\n</tool_call>", calls=_bash("ls"), reasoning="hm", inside=True),
    Case("a call inside, closed after it", f"hm\n{CALL}\n</think>\n\nOk.", "", _bash("ls"), "hm", inside=True),
    Case("a call planned inside and made after", f"<think>so\n{CALL}\n</think>\n{CALL}", "", _bash("ls"), "so"),
    _thought("a mention inside", "use <tool_call> maybe"),
    Case("interleaved", "<think>a</think>One.<think>b</think>Two.", content="One.Two.", reasoning="a\nb"),
    Case("a leaked end of turn inside", "<think>hm<|im_end|>", reasoning="hm"),
    Case("an empty block", "<think>\n\n</think>\n\nHi.", content="Hi."),
    Case("closed on the line of the answer, never opened", "hm</think>Hi", content="hmHi"),
    Case("a sign that might begin a tag", "<think>a < b", reasoning="a < b"),
    Case("indentation", "  in\n\n  more\n\n</think>\n  x", "  x", reasoning="  in\n\n  more", inside=True),
    _kept("a mention in backticks", "Say `<think>` and `</think>`."),
    Case("nothing but a thought", "x", reasoning="x", inside=True),
)

CALLED_X = "<tool_callx>read\n<arg_keyx>path</arg_keyx>\n<arg_valuex>a</arg_valuex>\n</tool_callx>"
FAMILIES = (
    Case("Mistral, cut", '[TOOL_CALLS]bash[ARGS]{"command": "ls', calls=_bash("ls"), form="mistral"),
    Case("Mistral, with an id", '[TOOL_CALLS]bash[CALL_ID]abc[ARGS]{"command": "ls"}', "", _bash("ls"), form="mistral"),
    Case("Mistral, prose after", '[TOOL_CALLS]bash[ARGS]{"command": "ls"}\nDone now.', "", _bash("ls"), form="mistral"),
    _kept("Mistral, a mention", "It starts with [TOOL_CALLS] in the text.", form="mistral"),
    Case(
        "Kimi, without a section",
        '<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|>',
        calls=_bash("ls"),
        form="kimi_k2",
    ),
    Case(
        "Kimi, cut",
        '<|tool_calls_section_begin|><|tool_call_begin|>bash:0<|tool_call_argument_begin|>{"command": "ls',
        calls=_bash("ls"),
        form="kimi_k2",
    ),
    Case("Gemma, cut", '<|tool_call>call:bash{command:<|"|>ls', calls=_bash("ls"), form="gemma4"),
    Case(
        "Gemma, a bare word",
        "<start_function_call>call:bash{command:ls -la}<end_function_call>",
        calls=_bash("ls -la"),
        form="function_gemma",
    ),
    _python("Python, JSON's literals", 'read(path="a", follow=true)', _read("a", follow=True)),
    _python("Python, single quotes", "bash(command='echo \"x\"')", _bash('echo "x"')),
    _kept("another model's list", "[now()]"),
    Case(
        "MiniMax, cut",
        '<minimax:tool_call>\n<invoke name="bash">\n<parameter name="command">ls',
        calls=_bash("ls"),
        form="minimax_m2",
    ),
    _kept("tags with an ending of no checkpoint", f"<tool_callsx>\n{CALLED_X}\n</tool_callsx>", form="hy_v4"),
    Case("another family's call", f"<tool_call>{LS}</tool_call>", calls=_bash("ls"), form="mistral"),
)

LLAMA = (
    Case("Llama, by position", '<|python_tag|>read("a", 3)', calls=_read("a", limit=3)),
    Case("Llama, a bare word", "<|python_tag|>bash(ls)", calls=_bash("ls")),
    Case("Llama, by position and key", "<|python_tag|>read('a', tags=['x'])", calls=_read("a", tags=["x"])),
    Case("Llama, more arguments than parameters", '<|python_tag|>bash("ls", 2)', calls=_bash("ls")),
    Case("Llama, one key twice", '<|python_tag|>bash(command="ls", command="rm")', calls=_bash("ls")),
    Case("Llama, a list", "[read(path='a', limit=3), now()]", calls=(*_read("a", limit=3), *NOW)),
    Case("Llama, a list by position", '[bash("ls")]', calls=_bash("ls")),
    Case("Llama, a list behind text", "So:\n[now()]", content="So:", calls=NOW),
    Case("Llama, a list over lines", "[\n  bash(\n    command='ls',\n  ),\n]", calls=_bash("ls")),
    Case("Llama, a long string", "[bash(command='''a\nb''')]", calls=_bash("a\nb")),
    Case("Llama, a list cut", "[bash(command='ls -", calls=_bash("ls -")),
    Case("Llama 4's marks", "<|python_start|>[now()]<|python_end|>", calls=NOW),
    Case("Llama, JSON twice", f'{BASH}; {{"name": "now", "parameters": {{}}}}', calls=(*_bash("ls"), *NOW)),
    Case("Llama, JSON in a list", f"[{LS}]", calls=_bash("ls")),
    _kept("Llama, a link", "[read](http://x) it"),
    _kept("Llama, a remark", "[read(the docs)]"),
    _kept("Llama, another key", "[bash(cmd='ls')]"),
    _kept("Llama, another tool", "[grep(q='ls')]"),
    _kept("Llama, a list of numbers", "[1, 2]\n[x]\n- [ ] y"),
    _kept("Llama, in the middle of a line", "Call [now()] then."),
    Case("Llama, JSON after the tag", f"<|python_tag|>{BASH}<|eom_id|>", calls=_bash("ls")),
    _kept("Llama, code after the tag", "<|python_tag|>print(1 + 1)\nx = 2"),
)

_ANALYSIS, _FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
_CALL = "<|channel|>commentary to=functions.{}<|message|>{}<|call|>"
HARMONY = (
    Case("a thought, then text", f"{_ANALYSIS}hm<|end|><|start|>assistant{_FINAL}Hi.<|return|>", "Hi.", (), "hm"),
    Case(
        "a thought, words and a call",
        f"{_ANALYSIS}hm<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"command":"ls"}<|call|>',
        "Let me see.",
        _bash("ls"),
        "hm",
    ),
    Case(
        "a call that is cut",
        '<|start|>assistant to=functions.bash<|channel|>commentary json<|message|>{"command":"ls',
        calls=_bash("ls"),
    ),
    Case("a call that is no JSON", _CALL.format("bash", "not JSON"), calls=_bash("not JSON")),
    _kept("plain text", "plain text"),
    Case("the user's turn", f"{_FINAL}Hi.<|end|><|start|>user<|message|>And you?", "Hi."),
    Case(
        "a tool's result, played by the model",
        f"{_CALL.format('now', '{}')}<|start|>functions.now to=assistant<|channel|>commentary<|message|>noon<|end|>"
        f"<|start|>assistant{_FINAL}Noon.",
        calls=NOW,
    ),
    Case("two thoughts", f"{_ANALYSIS}a<|end|>{_ANALYSIS}b", reasoning="a\nb"),
)

CASES = (
    *TAGS,
    *JSON,
    *XML,
    *GLM,
    *FENCED,
    *TEXT,
    *REASONING,
    *FAMILIES,
    *(replace(case, form="llama") for case in LLAMA),
    *(replace(case, form="harmony") for case in HARMONY),
)
