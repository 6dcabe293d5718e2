"""Who answers a request: a node, or another one if that fails before it has begun to answer; the server past LiteLLM if
LiteLLM itself fails. Part of LiteLLM's process, around LiteLLM.

`fleet` picks the node, and `outcome.Hooks` has LiteLLM take that node's entry. A request is sent again only as long as
nothing of an answer has gone to the client, and never to the same node twice. If the connection broke after the request
had been sent, or the node said 500, nothing, or HTML, it is sent again once: a request that kills its server must not
kill all of them. A stream that breaks later ends with an error in the words of its dialect.

The server says by a header which errors are its own: the request is sound, and another node may answer it.

LiteLLM reads much of a body on the way and ends with a status of 500 where it does not understand it. Such a request is
put to the server, which answers it, or says in a sentence what is wrong, as it does at its own port.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from start_llm.core.errors import StartLLMError, Unavailable
from start_llm.core.protocol import openai_error
from start_llm.proxy import asgi
from start_llm.proxy.elsewhere import BACK_HEADER
from start_llm.proxy.fleet import ELSEWHERE, MOST_BREAKS, NODE_HEADER, Choice, NodeFleet, broken
from start_llm.proxy.outcome import RequestOutcome, current, node_of_response
from start_llm.proxy.own_fields import for_provider
from start_llm.proxy.passthrough import ServerRoutes
from start_llm.proxy.routing import RouteKey, fields_of, route_key

_LOOK_SECONDS = 0.5
# At the beginning of a line: the model may write the same words.
_ENDS = re.compile(
    rb"^(data: \[DONE\]|event: (message_stop|error|response\.(completed|failed|incomplete))|data: \{\"error\": ?\{)",
    re.MULTILINE,
)
_TAIL_BYTES = 4096
_ERRORS = (b"event: error", b"event: response.failed", b'data: {"error"', b'{"error"')
"""How an error begins as a part of a stream, LiteLLM's or the node's."""


class _Client:
    """A `Receive` of who asks, behind the body. It remembers whether the client has left."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.has_left = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.has_left = self.has_left or message["type"] == "http.disconnect"
        return message


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that is being answered."""

    scope: Scope
    client: _Client
    body: bytes
    answer: _HeldAnswer
    outcome: RequestOutcome
    key: RouteKey
    holder: str | None  # the node that has the response which it goes on from
    is_forwarded: bool  # it goes past LiteLLM


@dataclass(frozen=True, slots=True)
class Balancer:
    """ASGI middleware, within `bodies.RequestBodies`: a body comes in one message. A request has a `RequestOutcome`."""

    app: ASGIApp
    fleet: NodeFleet
    holders: Mapping[str, str]  # names of nodes by the ids of LiteLLM's entries
    server: ServerRoutes  # asks the server past LiteLLM
    elsewhere: Collection[str] = ()  # names of models that LiteLLM asks another provider for

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Conversations, and what goes past LiteLLM, are sent to nodes until one answers; all else goes on as it is."""
        path, outcome = asgi.asked_for(scope), RequestOutcome()
        forwarded = path in asgi.FORWARDED
        if scope["type"] == "lifespan":
            self.fleet.watch()
        elif scope["type"] == "http":
            current.set(outcome)  # of the task that the server runs this request in
        if not forwarded and path not in asgi.CONVERSATIONS:
            await self.app(scope, receive, send)
            return
        body, client = (await receive())["body"], _Client(receive)
        sent = await asgi.off_the_loop(len(body), self._for_provider, path, body, Headers(scope=scope))
        if sent is not None:
            await self.app(asgi.with_body(scope, sent), asgi.replay(sent, client), send)
            return
        answer = _HeldAnswer("chat/completions" if forwarded else path, send, shows_pages=forwarded)
        key, holder = await asgi.off_the_loop(len(body), self._read, body, Headers(scope=scope))
        asked = _Asked(scope, client, body, answer, outcome, key, holder, forwarded)
        try:
            while await self._send_once(asked):
                outcome.forget_failure()
        except StartLLMError as error:  # no node is left
            await answer.refuse(scope, client, error)

    def _for_provider(self, path: str, body: bytes, headers: Headers) -> bytes | None:
        """The body for another provider; ``None``: it names no model of one."""
        given = {} if not self.elsewhere or path in asgi.FORWARDED or BACK_HEADER in headers else json.loads(body)
        return json.dumps(for_provider(path, given)).encode() if given.get("model") in self.elsewhere else None

    def _read(self, body: bytes, headers: Headers) -> tuple[RouteKey, str | None]:
        """What decides where a request goes; nothing where there is one node."""
        if len(self.fleet.members) == 1:
            return RouteKey("", (), ""), None
        given = fields_of(body, is_json=headers.get("content-type") == asgi.JSON)
        return route_key(given, headers), node_of_response(given.get("previous_response_id"), self.holders)

    async def _send_once(self, asked: _Asked) -> bool:
        """Sends the request to one node. True: it shall be sent to another node, too. Raises Unavailable."""
        outcome, answer = asked.outcome, asked.answer
        choice = await self._ask_node(asked)
        if asked.client.has_left:
            return False
        await self._ask_past_litellm(asked, choice)
        if not outcome.failed and answer.says_nothing:
            outcome.failed = outcome.is_lost = True
        if outcome.failed and self._blame(choice, outcome) and not answer.has_begun:
            return True
        await self._end(asked, choice)
        return False

    async def _ask_past_litellm(self, asked: _Asked, choice: Choice) -> None:
        """What LiteLLM fails at by itself is put to its node, which answers it, or says in a sentence what is wrong."""
        outcome, answer = asked.outcome, asked.answer
        at_node = (outcome.is_lost or outcome.status in ELSEWHERE) and len(self.fleet.members) > 1
        if answer.error_status < 500 or outcome.error is not None or at_node or asked.is_forwarded:
            return
        outcome.failed = outcome.is_lost = False
        send = answer.begin(choice.label, lambda: None)
        await self._until_given_up(asked, choice, self._forward(asked, send))

    async def _forward(self, asked: _Asked, send: Send) -> None:
        response = await self.server.forward(Request(asked.scope, asgi.replay(asked.body, asked.client)))
        await response(asked.scope, asked.client, send)

    async def _end(self, asked: _Asked, choice: Choice) -> None:
        """Nobody else is asked: the client gets what came from the node, or the server's word. Raises Unavailable."""
        outcome, answer, node = asked.outcome, asked.answer, choice.node.name
        is_node_lost = outcome.is_lost and len(self.fleet.members) > 1
        if outcome.is_lost and not answer.has_begun and (is_node_lost or answer.says_nothing):
            raise Unavailable(broken(node, "")["message"])
        await answer.finish(outcome.error or broken(node, answer.dialect) if outcome.failed else None)

    def _blame(self, choice: Choice, outcome: RequestOutcome) -> bool:
        """Leaves the node out if it is to blame for a failure. Whether another node may be asked."""
        is_faulty = outcome.status == 500 and outcome.error is not None  # LiteLLM's own faults are not the node's
        at_node = outcome.is_lost or is_faulty or outcome.status in ELSEWHERE
        if at_node:
            self.fleet.failed(choice.node.name)
        outcome.breaks += is_faulty or (outcome.is_lost and not outcome.is_unsent)
        if not (at_node or outcome.reason) or len(self.fleet.members) == 1:
            return False
        outcome.tried.add(choice.node.name)
        return outcome.breaks < MOST_BREAKS and len(outcome.tried) < len(self.fleet.members)

    async def _ask_node(self, asked: _Asked) -> Choice:
        """Chooses a node and has LiteLLM ask it; the outcome says how that ended. Raises Unavailable."""
        outcome, answer, fleet = asked.outcome, asked.answer, self.fleet
        explain, anthropic = None if asked.is_forwarded else asked.body, answer.dialect == "messages"
        choice = await fleet.pick(asked.key, outcome.tried, holder=asked.holder, explain=explain, anthropic=anthropic)
        outcome.node = choice.node.name
        with fleet.sending(choice) as begun:
            send = answer.begin(choice.label, begun)
            asking = self._forward(asked, send) if asked.is_forwarded else self._ask_litellm(asked, send)
            await self._until_given_up(asked, choice, asking)
        return choice

    async def _until_given_up(self, asked: _Asked, choice: Choice, attempt: Coroutine[Any, Any, None]) -> None:
        """Waits for the end of an attempt. A node that is frozen is given up: nothing more is to be expected of it."""
        outcome, answer, asking = asked.outcome, asked.answer, asyncio.ensure_future(attempt)
        try:
            while not (await asyncio.wait((asking,), timeout=_LOOK_SECONDS))[0]:
                if self.fleet.gives_up(choice.node.name, outcome.tried, begun=answer.has_begun):
                    break
            else:
                asking.result()
        finally:
            asking.cancel()
        if not asking.done():
            answer.end()
            await asyncio.wait((asking,), timeout=_LOOK_SECONDS)  # LiteLLM may say more of it on its way out
            outcome.failed = outcome.is_lost = True

    async def _ask_litellm(self, asked: _Asked, send: Send) -> None:
        scope = dict(asked.scope) | {"state": dict(asked.scope.get("state") or {})}
        await self.app(scope, asgi.replay(asked.body, asked.client), send)


class _HeldAnswer:
    """A `Send` for what LiteLLM answers, attempt after attempt. It keeps an error back until `finish`.

    The head goes out with the first piece of the body, so it names who this piece is from. A sign of life may be that
    piece, and then somebody else may answer: a comment in the stream names that one.

    Attributes:
        kept: an error, head and body.
        has_begun: something of an answer has gone to the client.
    """

    def __init__(self, dialect: str, send: Send, *, shows_pages: bool) -> None:
        """`shows_pages`: an answer may begin like a page for people."""
        self.dialect, self.send = dialect, send
        self._shows_pages = shows_pages
        self.has_begun = False
        self.kept: list[Message] = []
        self._head_sent = self._is_stream = False
        self._head: Message | None = None  # of an answer, until the first piece of its body
        self._tail = b""  # the last bytes of a stream that were sent
        self._asked = 0  # attempts, and ends of them
        self._label = ""

    def begin(self, label: str, begun: Callable[[], None]) -> Send:
        """For what comes from one attempt. Once that has been given up, whatever it still says goes nowhere.

        Args:
            label: of the header that says where the answer is from; without a label there is none.
            begun: is called with the first piece of an answer.
        """
        self._label, self._begun = label, begun
        self.kept, self._head = [], None  # of an earlier attempt: the client never sees it
        self.end()
        asked = self._asked

        async def send(message: Message) -> None:
            if asked == self._asked:
                await self._take(message)

        return send

    def end(self) -> None:
        """Nothing more is taken from who was asked last."""
        self._asked += 1

    @property
    def says_nothing(self) -> bool:
        """Neither an answer nor an error has come."""
        return not self.has_begun and not self.kept

    @property
    def error_status(self) -> int:
        """Of an error that can still have a status; else 0."""
        is_whole = self.kept and self.kept[0]["type"] == asgi.START and not self._head_sent
        return int(self.kept[0]["status"]) if is_whole else 0

    async def _take(self, message: Message) -> None:
        """A message of the attempt that counts."""
        if message["type"] == asgi.START:
            await self._start(message)
        elif self.kept:
            self.kept.append(message)
        elif message["type"] == asgi.BODY:
            await self._pass_on(message)
        else:
            await self.send(message)

    async def _start(self, message: Message) -> None:
        """A head: that of an error is kept, the first one of an answer waits for its body, a later one is a comment."""
        if message["status"] >= 400:
            self.kept = [message]
        elif not self._head_sent:
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            said = [(NODE_HEADER.encode(), self._label.encode())] if self._label else []
            self._head = dict(message) | {"headers": [*message.get("headers", ()), *said]}
        elif self._is_stream and self._label:
            comment = f": {NODE_HEADER}: {self._label}\n\n".encode()  # clients pass it over, people find it
            await self.send({"type": asgi.BODY, "body": comment, "more_body": True})

    async def _send_head(self) -> None:
        if self._head is not None:
            head, self._head, self._head_sent = self._head, None, True
            await self.send(head)

    async def _pass_on(self, message: Message) -> None:
        """A piece of an answer's body. A page for people is no answer, and neither is an empty body."""
        body = message.get("body", b"")
        if not (self.has_begun or self._shows_pages) and body.lstrip().startswith(b"<"):
            self.end()
            return
        if not self._is_stream and not body and not self.has_begun:
            return
        if self._is_stream and body.startswith(_ERRORS):
            self.kept = [message]
            return
        if not self._is_stream or asgi.says_something(message):
            self.has_begun = True
            self._begun()
        if self._is_stream:
            self._tail = (self._tail + body)[-_TAIL_BYTES:]
            message = dict(message) | {"more_body": True}  # `finish` writes the end, when it is known how it has ended
        if body or not self._is_stream:
            await self._send_head()
            await self.send(message)

    async def finish(self, error: dict[str, Any] | None) -> None:
        """Nothing more comes. `error`: what has gone wrong, where something has."""
        await self._send_head()
        if not self._head_sent:
            for message in self.kept:
                await self.send(message)
        elif self._is_stream:
            body = b"".join(message.get("body", b"") for message in self.kept)
            if error is not None or not _ENDS.search(self._tail + body):
                body = asgi.last_event(self.dialect, error or broken(self._label.partition(";")[0], self.dialect))
            await self.send({"type": asgi.BODY, "body": body, "more_body": False})

    async def refuse(self, scope: Scope, receive: Receive, error: StartLLMError) -> None:
        """`error` as the whole answer, or as the last event of a stream that has begun."""
        if self._head_sent:
            await self.finish(openai_error(error)["error"])
        else:
            await asgi.error_answer(scope["path"], error)(scope, receive, self.send)
