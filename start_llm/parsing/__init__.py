"""From generated tokens to events. `registry` names the formats, `stream` runs them, `detokenise` comes before it.

A tool-call format is one file in `tools`: its openers, and a coroutine that reads from a `Source` and writes a `Call`.
"""
