"""Random requests of every route, and what the model says to them."""

from __future__ import annotations

import json
from typing import NamedTuple
from urllib.parse import quote

from tests.fuzz import bodies
from tests.fuzz.bodies import LAST
from tests.fuzz.tape import TEXTS, Make, Tape, anything, mapping

BODIES: dict[str, Make] = {
    "/v1/chat/completions": bodies.chat,
    "/api/v0/chat/completions": bodies.chat,
    "/v1/messages": bodies.messages,
    "/v1/responses": bodies.responses,
    "/v1/completions": bodies.completions,
    "/v1/messages/count_tokens": bodies.messages,
    "/v1/responses/input_tokens": bodies.responses,
    "/v1/cache/explain": lambda tape: tape.pick([bodies.chat, bodies.completions, bodies.messages, bodies.responses])(
        tape
    ),
    "/api/chat": bodies.ollama_chat,
    "/api/generate": bodies.ollama_generate,
    "/api/embed": bodies.embeddings,
    **dict.fromkeys(["/api/show", "/api/create", "/api/copy", "/api/push"], bodies.ollama_show),
    "/v1/embeddings": bodies.embeddings,
    "/v1/audio/speech": bodies.speech,
    "/v1/audio/transcriptions": bodies.transcription,
    **dict.fromkeys(["/v1/models/load", "/v1/models/unload", "/v1/models/pin"], bodies.administration),
    "/page/models/pull": bodies.fetched,
    "/page/models/stop": mapping(["a"], anything),
    "/page/models/change": mapping(["a", "changes"], anything),  # names no model: nothing is written or removed
    "/page/models/remove": mapping(["a"], anything),
    "/page/requests/{}/cancel": mapping(["a"], anything),
    "/page/settings": mapping(["name", "value"], anything),
}
"""What is sent by POST."""
FORMS = ["/v1/audio/transcriptions"]
OFTEN = ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"]
OFTEN += OFTEN[:3]
SOMETIMES = [path for path in BODIES if path not in OFTEN and not path.startswith(("/v1/models", "/page"))]
SELDOM = ["/v1/models/load", "/v1/models/unload", "/v1/models/pin", "/page/models/pull", "/page/models/stop"]
SELDOM += ["/page/requests/{}/cancel", "/page/settings", "/page/models/change", "/page/models/remove"]
IDS = ["/v1/responses/{}", "/v1/responses/{}/input_items", "/v1/cache/requests/{}", "/v1/models/{}"]
IDS += ["/page/requests/{}"]
PATHS = [
    *IDS, "/", "/page/{}", "/page/stored", "/page/models", "/page/agents", "/page/settings", "/page/nodes", "/health",
    "/metrics", "/v1/models", "/v1/loads", "/api/v0/models", "/api/v0/models/{}", "/props", "/slots",
    "/v1/cache/requests", "/page/models/search", "/api/delete",
    "/api/tags", "/api/ps", "/api/version", "/openapi.json", "/docs", "/nowhere", "/v1/{}",
]  # fmt: skip
"""What is read, and deleted where it can be. The page's feed has no end, and is not asked for."""
METHODS = ["GET", "GET", "GET", "DELETE", "HEAD", "POST", "PUT"]
HEADERS: dict[str, list[str]] = {
    "anthropic-version": ["2023-06-01", "x"], "anthropic-beta": ["x"], "x-session-id": ["s", "x" * 2_000, "é"],
    "session_id": ["s"], "x-claude-code-session-id": ["s"], "x-openwebui-chat-id": ["s"],
    "x-claude-code-agent-id": ["a"], "Authorization": ["Bearer k", "x"], "x-api-key": ["k"],
    "Origin": ["http://x", "x://[", "null"], "Content-Type": ["application/json; charset=utf-8", "text/plain", "/"],
    "Content-Encoding": ["identity", "gzip"], "X-Forwarded-For": ["1.2.3.4"], "Host": ["localhost", "x.example", "["],
    "User-Agent": ["claude-cli/1.0", "Mozilla/5.0 x", "/", "é" * 50],
}  # fmt: skip
PEERS = [*["127.0.0.1"] * 7, "10.9.8.7"]

# --- what a model may say ---

CALLED = ["f", "g", "read", "zzz"]
SAID = ['{"a": 1}', '{"a": "1", "b": [1e400]}', "{", '{"input": "x"}', '{"path": null}', "[5]"]
SAID += ['{"a": {"b": [1, "x"]}}']
LONG = ['{"a": ' + "9" * 4_400 + "}", '{"a":' * 1_200 + "1" + "}" * 1_200]
WORDS = [
    "Hello. ", "<think>\n", "\n</think>\n", "```json\n", '{"a": 1}', "<tool_call>", "<function=f>", "\x00", "é", "[",
    "", "\U0001f600", "x" * 300, "</tool_call>", "<|im_start|>", "NaN", "\n\n",
]  # fmt: skip


def answer(tape: Tape) -> tuple[str, ...]:
    said = []
    for _ in range(tape.below(4)):
        if tape.below(3):
            arguments = tape.pick(LONG) if tape.below(100) == 99 else tape.pick(SAID)
            said.append(f'<tool_call>\n{{"name": "{tape.pick(CALLED)}", "arguments": {arguments}}}\n</tool_call>')
        else:
            said.append(tape.pick(WORDS))
    return tuple(said)


class Request(NamedTuple):
    """
    Attributes:
        peer: the client's address.
        said: what the model says to it, in pieces.
    """

    method: str
    path: str
    body: bytes
    headers: dict[str, str]
    peer: str
    said: tuple[str, ...] = ()


def request(tape: Tape) -> Request:
    said = answer(tape)
    headers = {}
    for _ in range(tape.pick([0, 0, 0, 0, 0, 0, 0, 1, 1, 2])):
        name = tape.pick(list(HEADERS))
        headers[name] = tape.pick(HEADERS[name])
    peer = tape.pick(PEERS)
    kind = tape.below(64)
    if kind >= 60:
        return Request(tape.pick(METHODS), _path(tape), b"", headers, peer, said)
    path = tape.pick(OFTEN if kind < 44 else SOMETIMES if kind < 59 else SELDOM)
    body = BODIES[path](tape)
    if path in FORMS:
        sent = _form(tape, body if isinstance(body, dict) else {"file": body})
        return Request("POST", path, sent, {"Content-Type": tape.pick(FORM_TYPES)} | headers, peer, said)
    return Request("POST", path, json.dumps(body).encode(), headers, peer, said)


FORM_TYPES = [*["multipart/form-data; boundary=b"] * 9, "multipart/form-data", 'multipart/form-data; boundary="']


def _form(tape: Tape, fields: dict[str, object]) -> bytes:
    """Each value is a text or its JSON, the file one with a name; now and then the end is missing."""
    parts = []
    for name, value in fields.items():
        said = value if isinstance(value, str) else json.dumps(value)
        named = '; filename="a.wav"' if name == "file" and tape.below(20) != 19 else ""
        parts.append(f'--b\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n{said}\r\n')
    end = "" if tape.below(20) == 19 else "--b--\r\n"
    return ("".join(parts) + end).encode("utf-8", "surrogatepass")


def _path(tape: Tape) -> str:
    path = tape.pick(PATHS)
    return path.replace("{}", quote(tape.pick([LAST, *TEXTS]), safe="", errors="surrogatepass"))
