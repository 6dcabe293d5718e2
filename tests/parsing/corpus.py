"""Malformed and awkward output as models really write it, with what must come of it, written by hand.

The tools are those of `helpers.TOOLS`: read(path, limit, follow, ratio, tags, options, note), bash(command),
write(path, content), now().
"""

from __future__ import annotations

from dataclasses import dataclass
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


LS = '{"name": "bash", "arguments": {"command": "ls"}}'

TAGS = (
    Case("closing tag missing at the end", f"<tool_call>\n{LS}", calls=_bash("ls")),
    Case("closing tag missing, prose follows", f"<tool_call>{LS}\nDone.", calls=_bash("ls")),
    Case("opening tag missing", f"{LS}\n</tool_call>", calls=_bash("ls")),
    Case("opening tag missing after prose", f"Listing.\n{LS}\n</tool_call>", content="Listing.", calls=_bash("ls")),
    Case("both tags missing", LS, calls=_bash("ls")),
    Case(
        "both tags missing, a list",
        f'[{LS}, {{"name": "now", "arguments": {{}}}}]\nDone.',
        calls=(*_bash("ls"), ("now", {})),
    ),
    Case("a list that is no call", '[\n{"name": "bash"}]\n[1]', content='[\n{"name": "bash"}]\n[1]'),
    Case("both tags missing, Llama's key", '{"name": "bash", "parameters": {"command": "ls"}}', calls=_bash("ls")),
    Case("opening tag three times", f"<tool_call><tool_call>\n<tool_call>{LS}</tool_call>", calls=_bash("ls")),
    Case("closing tag twice", f"<tool_call>{LS}</tool_call>\n</tool_call>", calls=_bash("ls")),
    Case("closing tag written as an opening one", f"<tool_call>{LS}<tool_call>", calls=_bash("ls")),
    Case(
        "two calls, the first not closed",
        f'<tool_call>{LS}\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>',
        calls=(*_bash("ls"), ("now", {})),
    ),
    Case(
        "two calls in one pair of tags",
        f'<tool_call>{LS}\n{{"name": "now", "arguments": {{}}}}</tool_call>',
        calls=(*_bash("ls"), ("now", {})),
    ),
    Case("a list in the tags", f"<tool_call>[{LS}]</tool_call>", calls=_bash("ls")),
    Case("the same call twice", f"<tool_call>{LS}</tool_call>\n<tool_call>{LS}</tool_call>", calls=_bash("ls") * 2),
    Case(
        "the same tool twice, other arguments",
        f"<tool_call>{LS}</tool_call>" + f"<tool_call>{LS}</tool_call>".replace("ls", "ls -a"),
        calls=(*_bash("ls"), *_bash("ls -a")),
    ),
    Case("a leaked end of turn", f"<tool_call>{LS}</tool_call><|im_end|>", calls=_bash("ls")),
    Case("a leaked end of turn instead of the closing tag", f"<tool_call>{LS}<|im_end|>\n", calls=_bash("ls")),
    Case("a leaked turn start before", f"<|im_start|>assistant\n<tool_call>{LS}</tool_call>", calls=_bash("ls")),
    Case("a leaked turn start inside", f"<tool_call><|im_start|>{LS}</tool_call>", calls=_bash("ls")),
    Case("a leaked end of text", "Hello.<|endoftext|>", content="Hello."),
    Case("several leaked ends", "Hello.<|im_end|>\n<|endoftext|>\n", content="Hello."),
    Case(
        "an end of turn between calls",
        f'<tool_call>{LS}</tool_call><|im_end|>\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>',
        calls=(*_bash("ls"), ("now", {})),
    ),
)

JSON = (
    Case(
        "a trailing comma",
        '<tool_call>{"name": "bash", "arguments": {"command": "ls",},}</tool_call>',
        calls=_bash("ls"),
    ),
    Case(
        "a missing comma",
        '<tool_call>{"name": "read", "arguments": {"limit": 3 "path": "a"}}</tool_call>',
        calls=(("read", {"limit": 3, "path": "a"}),),
    ),
    Case(
        "Python's literals",
        '<tool_call>{"name": "read", "arguments": {"path": "a", "follow": True, "note": None}}</tool_call>',
        calls=_read("a", follow=True, note=None),
    ),
    Case(
        "single quotes",
        "<tool_call>{'name': 'bash', 'arguments': {'command': 'echo \"a\"'}}</tool_call>",
        calls=_bash('echo "a"'),
    ),
    Case(
        "an apostrophe in single quotes",
        "<tool_call>{'name': 'bash', 'arguments': {'command': 'echo it\\'s'}}</tool_call>",
        calls=_bash("echo it's"),
    ),
    Case(
        "keys without quotes",
        '<tool_call>{"name": "read", "arguments": {path: "a", limit: 2}}</tool_call>',
        calls=_read("a", limit=2),
    ),
    Case(
        "arguments as a JSON string",
        '<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>',
        calls=_bash("ls"),
    ),
    Case("arguments as a bare string", '<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>', calls=_bash("ls")),
    Case("arguments null", '<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=(("now", {}),)),
    Case("no arguments", '<tool_call>{"name": "now"}</tool_call>', calls=(("now", {}),)),
    Case(
        "arguments before the name",
        '<tool_call>{"arguments": {"command": "ls"}, "name": "bash"}</tool_call>',
        calls=_bash("ls"),
    ),
    Case("arguments beside the name", '<tool_call>{"name": "bash", "command": "ls"}</tool_call>', calls=_bash("ls")),
    Case(
        "OpenAI's nesting",
        '<tool_call>{"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}</tool_call>',
        calls=_bash("ls"),
    ),
    Case("a brace too many", f"<tool_call>{LS}}}</tool_call>", calls=_bash("ls")),
    Case(
        "a brace missing", '<tool_call>{"name": "bash", "arguments": {"command": "ls"}</tool_call>', calls=_bash("ls")
    ),
    Case(
        "two braces missing", '<tool_call>{"name": "bash", "arguments": {"command": "ls"</tool_call>', calls=_bash("ls")
    ),
    Case(
        "cut inside a string",
        '<tool_call>{"name": "write", "arguments": {"path": "a", "content": "one\\ntw',
        calls=(("write", {"path": "a", "content": "one\ntw"}),),
    ),
    Case("cut after a backslash", '<tool_call>{"name": "bash", "arguments": {"command": "a\\', calls=_bash("a")),
    Case("cut inside a key", '<tool_call>{"name": "read", "arguments": {"path": "a", "lim', calls=_read("a")),
    Case("cut after a key", '<tool_call>{"name": "read", "arguments": {"path": "a", "limit":', calls=_read("a")),
    Case(
        "cut inside a literal",
        '<tool_call>{"name": "read", "arguments": {"path": "a", "follow": tr',
        calls=_read("a", follow=True),
    ),
    Case("cut before the name is whole", '<tool_call>{"name": "ba', content='<tool_call>{"name": "ba'),
    Case(
        "cut inside a string, then closed and another call",
        f'<tool_call>{{"name": "read", "arguments": {{"path": "a</tool_call>\n<tool_call>{LS}</tool_call>',
        calls=(*_read("a"), *_bash("ls")),
    ),
    Case(
        "the closing tag as content",
        '<tool_call>{"name": "bash", "arguments": {"command": "grep \'</tool_call>\' x"}}</tool_call>',
        calls=_bash("grep '</tool_call>' x"),
    ),
    Case(
        "quotes that are not escaped",
        '<tool_call>{"name": "bash", "arguments": {"command": "echo "hi there" > f"}}</tool_call>',
        calls=_bash('echo "hi there" > f'),
    ),
    Case(
        "a raw line break in a string",
        '<tool_call>{"name": "bash", "arguments": {"command": "a\nb\tc"}}</tool_call>',
        calls=_bash("a\nb\tc"),
    ),
    Case(
        "an escape that JSON does not know",
        '<tool_call>{"name": "bash", "arguments": {"command": "grep \\d+ \\$x"}}</tool_call>',
        calls=_bash("grep \\d+ \\$x"),
    ),
    Case(
        "triple quotes",
        '<tool_call>{"name": "write", "arguments": {"path": "a", "content": """x = "1"\ny"""}}</tool_call>',
        calls=(("write", {"path": "a", "content": 'x = "1"\ny'}),),
    ),
    Case(
        "deep escapes stay as they are",
        '<tool_call>{"name": "bash", "arguments": {"command": "sed \\"s/\\\\\\\\n/x/\\""}}</tool_call>',
        calls=_bash('sed "s/\\\\n/x/"'),
    ),
    Case("a fence inside the tags", f"<tool_call>\n```json\n{LS}\n```\n</tool_call>", calls=_bash("ls")),
    Case(
        "a number as a string",
        '<tool_call>{"name": "read", "arguments": {"path": "a", "limit": "5"}}</tool_call>',
        calls=_read("a", limit=5),
    ),
    Case(
        "a boolean as a string",
        '<tool_call>{"name": "read", "arguments": {"path": "a", "follow": "false"}}</tool_call>',
        calls=_read("a", follow=False),
    ),
    Case(
        "a list as a string",
        '<tool_call>{"name": "read", "arguments": {"path": "a", "tags": "[\\"x\\"]"}}</tool_call>',
        calls=_read("a", tags=["x"]),
    ),
    Case(
        "one thing where a list is due",
        '<tool_call>{"name": "read", "arguments": {"path": "a", "tags": "x"}}</tool_call>',
        calls=_read("a", tags=["x"]),
    ),
    Case(
        "a number where a string is due",
        '<tool_call>{"name": "bash", "arguments": {"command": 42}}</tool_call>',
        calls=_bash("42"),
    ),
    Case(
        "an object where a string is due",
        '<tool_call>{"name": "write", "arguments": {"path": "a", "content": {"k": [1, 2]}}}</tool_call>',
        calls=(("write", {"path": "a", "content": '{"k": [1, 2]}'}),),
    ),
    Case(
        "an unknown tool", '<tool_call>{"name": "grep", "arguments": {"q": 1}}</tool_call>', calls=(("grep", {"q": 1}),)
    ),
    Case(
        "an unknown tool, cut",
        'So: <tool_call>{"name": "grep", "arguments": {"q": ',
        content='So: <tool_call>{"name": "grep", "arguments": {"q": ',
    ),
    Case("no call at all in the tags", "<tool_call>what now?</tool_call>", content="<tool_call>what now?</tool_call>"),
    Case(
        "a namespace before the name",
        f"<tool_call>{LS}</tool_call>".replace("bash", "functions.bash"),
        calls=_bash("ls"),
    ),
)

XML = (
    Case("no wrapper", "<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>", calls=_bash("ls")),
    Case(
        "only the closing wrapper",
        "Now:\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        content="Now:",
        calls=_bash("ls"),
    ),
    Case(
        "parameter not closed",
        "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</function>\n</tool_call>",
        calls=_bash("ls"),
    ),
    Case(
        "parameter not closed before the next",
        "<tool_call>\n<function=read>\n<parameter=path>\na\n<parameter=limit>\n3\n</parameter>\n</function>\n</tool_call>",
        calls=_read("a", limit=3),
    ),
    Case(
        "function not closed",
        "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</tool_call>",
        calls=_bash("ls"),
    ),
    Case(
        "function opened twice",
        "<tool_call>\n<function=bash>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        calls=_bash("ls"),
    ),
    Case("cut inside a value", "<tool_call>\n<function=bash>\n<parameter=command>\nls -", calls=_bash("ls -")),
    Case("cut inside a closing tag", "<function=bash>\n<parameter=command>\nls\n</param", calls=_bash("ls\n</param")),
    Case(
        "the closing tag as content",
        "<tool_call>\n<function=bash>\n<parameter=command>\ngrep '</parameter>' x\n</parameter>\n</function>\n"
        "</tool_call>",
        calls=_bash("grep '</parameter>' x"),
    ),
    Case(
        "closed, then prose instead of a closing tag",
        "<function=bash>\n<parameter=command>\nls\n</parameter>\nThat lists the files.",
        calls=_bash("ls"),
    ),
    Case(
        "content with markup, indentation and blank lines",
        "<tool_call>\n<function=write>\n<parameter=path>\na.html\n</parameter>\n<parameter=content>\n"
        '  <p>&amp; "x"</p>\n\n'
        "\n</parameter>\n</function>\n</tool_call>",
        calls=(("write", {"path": "a.html", "content": '  <p>&amp; "x"</p>\n\n'}),),
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
    Case("no parameters", "<tool_call>\n<function=now>\n</function>\n</tool_call>", calls=(("now", {}),)),
    Case(
        "a leaked end of turn",
        "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter><|im_end|>",
        calls=_bash("ls"),
    ),
    Case(
        "two functions in one wrapper",
        "<tool_call>\n<function=now>\n</function>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
        calls=(("now", {}), *_bash("ls")),
    ),
)

GLM = (
    Case(
        "the legacy form",
        "<tool_call>bash <arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>",
        calls=_bash("ls"),
    ),
    Case(
        "opening tag missing",
        "bash<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>",
        calls=_bash("ls"),
    ),
    Case(
        "closing tag missing",
        "Sure.\n<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n",
        content="Sure.",
        calls=_bash("ls"),
    ),
    Case("value not closed", "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</tool_call>", calls=_bash("ls")),
    Case(
        "value not closed before the next key",
        "<tool_call>read<arg_key>path</arg_key><arg_value>a<arg_key>limit</arg_key><arg_value>3</arg_value></tool_call>",
        calls=_read("a", limit=3),
    ),
    Case("value tag missing", "<tool_call>bash<arg_key>command</arg_key>ls</arg_value></tool_call>", calls=_bash("ls")),
    Case("no arguments", "<tool_call>now</tool_call>", calls=(("now", {}),)),
    Case("JSON after the name", '<tool_call>bash\n{"command": "ls"}</tool_call>', calls=_bash("ls")),
    Case("opening tag three times", "<tool_call><tool_call><tool_call>now</tool_call>", calls=(("now", {}),)),
    Case(
        "its own markup as content",
        "<tool_call>bash<arg_key>command</arg_key><arg_value>grep '</arg_value>' a</arg_value></tool_call>",
        calls=_bash("grep '</arg_value>' a"),
    ),
    Case("cut inside a value", "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls", calls=_bash("ls")),
    Case("cut after the name", "<tool_call>bash\n", content="<tool_call>bash\n"),
    Case(
        "GLM-4's own XML",
        '<tool_call><name>bash</name><arguments>{"command": "ls"}</arguments></tool_call>',
        calls=_bash("ls"),
    ),
)

FENCED = (
    Case("only a call object in a fence", f"```json\n{LS}\n```", calls=_bash("ls")),
    Case("the same without a language", f"\n```\n{LS}\n```\n", calls=_bash("ls")),
    Case("an example in a fence", f"So:\n```json\n{LS}\n```", content=f"So:\n```json\n{LS}\n```"),
    Case("other JSON in a fence", '```json\n{"name": "x"}\n```', content='```json\n{"name": "x"}\n```'),
)

TEXT = (
    Case("a mention in backticks", "Use `<tool_call>` for that.", content="Use `<tool_call>` for that."),
    Case(
        "a whole call in backticks",
        f"Write `<tool_call>{LS}</tool_call>`.",
        content=f"Write `<tool_call>{LS}</tool_call>`.",
    ),
    Case(
        "a whole call in a fence",
        f"So:\n```xml\n<tool_call>\n{LS}\n</tool_call>\n```\nOk?",
        content=f"So:\n```xml\n<tool_call>\n{LS}\n</tool_call>\n```\nOk?",
    ),
    Case(
        "a call after a fence",
        f"So:\n```\nls\n```\n<tool_call>{LS}</tool_call>",
        content="So:\n```\nls\n```",
        calls=_bash("ls"),
    ),
    Case("a mention in prose", "The <tool_call> tag opens a call.", content="The <tool_call> tag opens a call."),
    Case("no tools in the request", "Call <function=bash> now.", content="Call <function=bash> now.", tools=False),
    Case(
        "JSON that only looks like a call", '{"name": "bash", "version": 3}', content='{"name": "bash", "version": 3}'
    ),
    Case("JSON of an unknown tool", '{"name": "npm", "arguments": {}}', content='{"name": "npm", "arguments": {}}'),
    Case("a tool's name in prose", "I will read and bash.", content="I will read and bash."),
    Case("a lone closing tag", "a </tool_call> b", content="a </tool_call> b"),
    Case("an ampersand and angles", "if a < b && c > d: <b>", content="if a < b && c > d: <b>"),
    Case(
        "text before, between and after",
        f"One.\n\n<tool_call>{LS}</tool_call>\n\nTwo.",
        content="One.",
        calls=_bash("ls"),
    ),
    Case("the word null before a tag", "null<|im_end|>", content="null"),
    Case("an end of turn in the middle", "Hello.<|im_end|>\nMore <b>.", content="Hello.\nMore <b>."),
    Case("an end of turn between two words", "one<|im_end|>two", content="onetwo"),
    Case("the own turn begun again", "Hello.<|im_end|>\n<|im_start|>assistant\nMore.", content="Hello.\nMore."),
    Case("the user's turn, played by the model", "Hello.<|im_end|>\n<|im_start|>user\nAnd you?", content="Hello."),
    Case("the user's turn without an end of the own one", "Hello.\n<|im_start|>user\nAnd you?", content="Hello.\n"),
    Case(
        "the user's turn in Llama's tokens",
        "Hello.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nAnd you?",
        content="Hello.",
    ),
    Case(
        "the own turn begun again in Llama's tokens",
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.",
        content="Hello.",
    ),
    Case("the user's turn in Gemma's tokens", "Hi.<end_of_turn>\n<start_of_turn>user\nx", content="Hi."),
    Case("the user's turn inside a thought", "<think>hm<|im_end|>\n<|im_start|>user\nx</think>y", reasoning="hm"),
    Case(
        "a tool's result, played by the model",
        f"<tool_call>{LS}</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\na.txt\n</tool_response>\n"
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        calls=_bash("ls"),
    ),
    Case(
        "a tool's result without turn tokens",
        f"<tool_call>{LS}</tool_call>\n<tool_response>\na.txt\n</tool_response>\n"
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        calls=_bash("ls"),
    ),
    Case("a mention of results", "It comes as <tool_response>.", content="It comes as <tool_response>."),
    Case(
        "a fence behind a call, with an example",
        f"<tool_call>{LS}</tool_call>\nIn code:\n```\n<tool_call>{LS.replace('ls', 'rm x')}</tool_call>\n```",
        calls=_bash("ls"),
    ),
    Case(
        "another call behind some text",
        f"First.\n<tool_call>{LS}</tool_call>\nAnd then:\n<tool_call>{LS.replace('ls', 'pwd')}</tool_call>\nDone.",
        content="First.",
        calls=(*_bash("ls"), *_bash("pwd")),
    ),
    Case(
        "talk about turn tokens",
        "ChatML ends a turn with <|im_end|> and goes on.",
        content="ChatML ends a turn with <|im_end|> and goes on.",
    ),
)

REASONING = (
    Case(
        "thinking, then a call",
        f"<think>\nhm\n</think>\n\n<tool_call>{LS}</tool_call>",
        calls=_bash("ls"),
        reasoning="hm",
    ),
    Case("opened by the template", "hm\n</think>\n\nHi.", content="Hi.", reasoning="hm", inside=True),
    Case("opened twice", "<think>\nhm\n</think>\nHi.", content="Hi.", reasoning="hm", inside=True),
    Case("closed twice", "<think>hm</think>\n</think>\n\nHi.", content="Hi.", reasoning="hm"),
    Case("never closed", "<think>\nhm, well", reasoning="hm, well"),
    Case("other tags", "<thinking>\nhm\n</thinking>\n\nHi.", content="Hi.", reasoning="hm"),
    Case("other tags again", "\n<reasoning>hm</reasoning>Hi.", content="Hi.", reasoning="hm"),
    Case("other tags, opened twice", "<thinking><thinking>hm</thinking>Hi.", content="Hi.", reasoning="hm"),
    Case(
        "other tags after the own ones",
        "<think>a</think>\n<thinking>b</thinking>Hi.",
        content="Hi.",
        reasoning="a\nb",
    ),
    Case(
        "other tags behind text",
        "Use these: <thinking>x</thinking>",
        content="Use these: <thinking>x</thinking>",
    ),
    Case("other tags closed like the own ones", "<thinking>a </think> b</thinking>Hi.", "Hi.", (), "a </think> b"),
    Case("talk about tags", "The <think> tag, and </think>, too.", content="The <think> tag, and </think>, too."),
    Case("talk about tags in quotes", 'It has "<think>" and (</think>).', content='It has "<think>" and (</think>).'),
    Case(
        "a call talked about inside",
        f"<think>I could write <tool_call>{LS}</tool_call> now.</think>Hi.",
        content="Hi.",
        reasoning=f"I could write <tool_call>{LS}</tool_call> now.",
    ),
    Case(
        "a call planned in a fence inside",
        f"<think>So:\n```\n<tool_call>{LS}</tool_call>\n```\n</think>Hi.",
        content="Hi.",
        reasoning=f"So:\n```\n<tool_call>{LS}</tool_call>\n```",
    ),
    Case("closed, never opened", "Fine.\n</think>\n\nHi.", content="Fine.\nHi."),
    Case("a call inside", f"hm\n<tool_call>\n{LS}\n</tool_call>", calls=_bash("ls"), reasoning="hm", inside=True),
    Case(
        "a call inside, closed after it",
        f"hm\n<tool_call>\n{LS}\n</tool_call>\n</think>\n\nOk.",
        calls=_bash("ls"),
        reasoning="hm",
        inside=True,
    ),
    Case(
        "a call planned inside and made after",
        f"<think>so\n<tool_call>{LS}</tool_call>\n</think>\n<tool_call>{LS}</tool_call>",
        calls=_bash("ls"),
        reasoning="so",
    ),
    Case(
        "a mention inside", "<think>use <tool_call> maybe</think>Hi.", content="Hi.", reasoning="use <tool_call> maybe"
    ),
    Case("interleaved", "<think>a</think>One.<think>b</think>Two.", content="One.Two.", reasoning="a\nb"),
    Case("a leaked end of turn inside", "<think>hm<|im_end|>", reasoning="hm"),
    Case("an empty block", "<think>\n\n</think>\n\nHi.", content="Hi."),
)

FAMILIES = (
    Case("Mistral, cut", '[TOOL_CALLS]bash[ARGS]{"command": "ls', calls=_bash("ls"), form="mistral"),
    Case(
        "Mistral, with an id",
        '[TOOL_CALLS]bash[CALL_ID]abc123456[ARGS]{"command": "ls"}',
        calls=_bash("ls"),
        form="mistral",
    ),
    Case(
        "Mistral, prose after",
        '[TOOL_CALLS]bash[ARGS]{"command": "ls"}\nDone now.',
        calls=_bash("ls"),
        form="mistral",
    ),
    Case(
        "Mistral, a mention",
        "It starts with [TOOL_CALLS] in the text.",
        "It starts with [TOOL_CALLS] in the text.",
        form="mistral",
    ),
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
    Case(
        "Python, JSON's literals",
        '<|tool_call_start|>[read(path="a", follow=true)]<|tool_call_end|>',
        calls=_read("a", follow=True),
        form="pythonic",
    ),
    Case(
        "Python, single quotes",
        "<|tool_call_start|>[bash(command='echo \"x\"')]<|tool_call_end|>",
        calls=_bash('echo "x"'),
        form="pythonic",
    ),
    Case("Llama, by position", '<|python_tag|>read("a", 3)', calls=_read("a", limit=3), form="llama"),
    Case("Llama, a bare word", "<|python_tag|>bash(ls)", calls=_bash("ls"), form="llama"),
    Case("Llama, by position and key", "<|python_tag|>read('a', tags=['x'])", "", _read("a", tags=["x"]), form="llama"),
    Case("Llama, more arguments than parameters", '<|python_tag|>bash("ls", 2)', "", _bash("ls"), form="llama"),
    Case("Llama, one key twice", '<|python_tag|>bash(command="ls", command="rm")', "", _bash("ls"), form="llama"),
    Case("Llama, a list", "[read(path='a', limit=3), now()]", "", (*_read("a", limit=3), ("now", {})), form="llama"),
    Case("Llama, a list by position", '[bash("ls")]', calls=_bash("ls"), form="llama"),
    Case("Llama, a list behind text", "So:\n[now()]", "So:", (("now", {}),), form="llama"),
    Case("Llama, a list over lines", "[\n  bash(\n    command='ls',\n  ),\n]", "", _bash("ls"), form="llama"),
    Case("Llama, a long string", "[bash(command='''a\nb''')]", "", _bash("a\nb"), form="llama"),
    Case("Llama, a list cut", "[bash(command='ls -", calls=_bash("ls -"), form="llama"),
    Case("Llama 4's marks", "<|python_start|>[now()]<|python_end|>", "", (("now", {}),), form="llama"),
    Case(
        "Llama, JSON twice",
        f'{LS.replace("arguments", "parameters")}; {{"name": "now", "parameters": {{}}}}',
        calls=(*_bash("ls"), ("now", {})),
        form="llama",
    ),
    Case("Llama, JSON in a list", f"[{LS}]", calls=_bash("ls"), form="llama"),
    Case("Llama, a link", "[read](http://x) it", "[read](http://x) it", form="llama"),
    Case("Llama, a remark", "[read(the docs)]", "[read(the docs)]", form="llama"),
    Case("Llama, another key", "[bash(cmd='ls')]", "[bash(cmd='ls')]", form="llama"),
    Case("Llama, another tool", "[grep(q='ls')]", "[grep(q='ls')]", form="llama"),
    Case("Llama, a list of numbers", "[1, 2]\n[x]\n- [ ] y", "[1, 2]\n[x]\n- [ ] y", form="llama"),
    Case("Llama, in the middle of a line", "Call [now()] then.", "Call [now()] then.", form="llama"),
    Case("another model's list", "[now()]", "[now()]"),
    Case(
        "Llama, JSON after the tag",
        '<|python_tag|>{"name": "bash", "parameters": {"command": "ls"}}<|eom_id|>',
        calls=_bash("ls"),
        form="llama",
    ),
    Case(
        "Llama, code after the tag",
        "<|python_tag|>print(1 + 1)\nx = 2",
        "<|python_tag|>print(1 + 1)\nx = 2",
        form="llama",
    ),
    Case(
        "MiniMax, cut",
        '<minimax:tool_call>\n<invoke name="bash">\n<parameter name="command">ls',
        calls=_bash("ls"),
        form="minimax_m2",
    ),
    Case("another family's call", f"<tool_call>{LS}</tool_call>", calls=_bash("ls"), form="mistral"),
)

CASES = (*TAGS, *JSON, *XML, *GLM, *FENCED, *TEXT, *REASONING, *FAMILIES)
