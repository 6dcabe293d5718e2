"""From generated tokens to events: `choice` takes tokens, `stream` reads their text, `registry` names the formats.

A tool-call format is a `ToolFormat` in `tools`: its openers, and a coroutine that reads calls from the source.
`structured` makes grammars of what a request demands of its answer.
"""
