"""Sends each conversation to a node, and to another one if that fails before it has begun to answer. Part of LiteLLM's
process, around LiteLLM.

`fleet` picks the node, and `outcome.Hooks` has LiteLLM take that node's entry. A request is sent again only as long as
nothing of an answer has gone to the client, and never to the same node twice. If the connection broke after the request
had been sent, or the node said 500, nothing, or HTML, it is sent again once: a request that kills its server must not
kill all of them. A stream that breaks later ends with an error in the words of its dialect.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from start_llm.core.errors import StartLLMError, Unavailable
from start_llm.core.protocol import openai_error
from start_llm.proxy.asgi import (
    BODY,
    START,
    dialect_of,
    error_answer,
    last_event,
    off_the_loop,
    replay,
    says_something,
)
from start_llm.proxy.fleet import (
    ELSEWHERE,
    MOST_BREAKS,
    NODE_HEADER,
    Choice,
    NodeFleet,
    broken,
)
from start_llm.proxy.outcome import RequestOutcome, current, node_of_response
from start_llm.proxy.routing import RouteKey, fields_of, route_key

_LOOK_SECONDS = 0.5
# At the beginning of a line: the model may write the same words.
_ENDS = re.compile(
    rb"^(data: \[DONE\]|event: (message_stop|error|response\.(completed|failed|incomplete))|data: \{\"error\": ?\{)",
    re.MULTILINE,
)
_TAIL_BYTES = 4096


class _Routed(NamedTuple):
    """A request, and what of it decides where it goes."""

    key: RouteKey
    holder: str | None  # the node that has the response which it goes on from
    body: bytes


class Balancer:
    """ASGI middleware, within `bodies.RequestBodies`: a body comes in one message.

    `holders`: names of nodes by the ids of LiteLLM's entries.
    """

    def __init__(self, app: ASGIApp, *, fleet: NodeFleet, holders: Mapping[str, str]) -> None:
        self._app = app
        self._fleet = fleet
        self._holders = holders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dialect, outcome = dialect_of(scope), current.get()
        if scope["type"] == "lifespan":
            self._fleet.watch()
        if dialect is None or outcome is None or outcome.of_fallback:
            await self._app(scope, receive, send)
            return
        body = (await receive())["body"]
        answer = _NodeAnswer(dialect, send)
        try:
            routed = await off_the_loop(len(body), self._read, body, Headers(scope=scope))
            while await self._send_once(scope, routed, receive, answer, outcome):
                outcome.forget_failure()
        except StartLLMError as error:  # no node is left
            outcome.failed, outcome.status = True, error.status
            outcome.error = outcome.error or openai_error(error)["error"]
            await answer.refuse(scope, receive, error)
        finally:
            outcome.node = ""

    async def _send_once(
        self, scope: Scope, routed: _Routed, receive: Receive, answer: _NodeAnswer, outcome: RequestOutcome
    ) -> bool:
        """Sends the request to one node. Whether it is to be sent to another one. Raises Unavailable."""
        choice = await self._ask_node(scope, routed, receive, answer, outcome)
        if not outcome.failed and answer.says_nothing:
            outcome.failed = outcome.is_lost = True
        if not outcome.failed:
            await answer.finish(None)
            return False
        goes_elsewhere = self._blame(choice, outcome)
        if goes_elsewhere and not answer.has_begun:
            answer.drop()
            return True
        if outcome.is_lost and not answer.has_begun and (len(self._fleet.members) > 1 or answer.says_nothing):
            raise Unavailable(broken(choice.node, "")["message"])
        await answer.finish(outcome.error or broken(choice.node, answer.dialect))
        return False

    def _blame(self, choice: Choice, outcome: RequestOutcome) -> bool:
        """Leaves the node out if it is to blame for a failure. Whether another node may be asked."""
        is_faulty = outcome.status == 500 and outcome.error is not None  # LiteLLM's own faults are not the node's
        at_node = outcome.is_lost or is_faulty or outcome.status in ELSEWHERE
        if at_node:
            self._fleet.failed(choice.node.name)
        outcome.breaks += is_faulty or (outcome.is_lost and not outcome.is_unsent)
        if not (at_node or outcome.reason):
            return False
        outcome.tried.add(choice.node.name)
        return outcome.breaks < MOST_BREAKS and len(outcome.tried) < len(self._fleet.members)

    async def _ask_node(
        self, scope: Scope, routed: _Routed, receive: Receive, answer: _NodeAnswer, outcome: RequestOutcome
    ) -> Choice:
        """Chooses a node and has LiteLLM ask it; `outcome` says how that ended. Raises Unavailable."""
        key, holder, body = routed
        anthropic = answer.dialect == "messages"
        choice = await self._fleet.pick(key, outcome.tried, holder=holder, explain=body, anthropic=anthropic)
        outcome.node = choice.node.name
        with self._fleet.sending(choice) as begun:
            send = answer.begin(choice, begun)
            inner = dict(scope) | {"state": dict(scope.get("state") or {})}
            asking = asyncio.ensure_future(self._app(inner, replay(body, receive), send))
            try:
                is_frozen = await self._wait(asking, choice, answer, outcome.tried)
            finally:
                asking.cancel()
        if is_frozen:
            answer.end()
            await asyncio.wait((asking,), timeout=_LOOK_SECONDS)  # LiteLLM may say more of it on its way out
            outcome.failed = outcome.is_lost = True
        return choice

    def _read(self, body: bytes, headers: Headers) -> _Routed:
        given = fields_of(body, is_json=True)
        holder = node_of_response(given.get("previous_response_id"), self._holders)
        return _Routed(route_key(given, headers), holder, body)

    async def _wait(
        self, asking: asyncio.Future[None], choice: Choice, answer: _NodeAnswer, tried: Collection[str]
    ) -> bool:
        """Until LiteLLM has answered. Whether the node is frozen, and nothing more is to be expected of it."""
        while True:
            done, _ = await asyncio.wait((asking,), timeout=_LOOK_SECONDS)
            if done:
                asking.result()
                return False
            if self._fleet.gives_up(choice.node.name, tried, begun=answer.has_begun):
                return True


class _NodeAnswer:
    """A `Send` for what LiteLLM answers, node after node. It keeps an error back until `drop` or `finish`.

    The head goes out with the first piece of the body, so it names the node that this piece is from. A sign of life may
    be that piece, and then another node may answer: a comment in the stream names that one.
    """

    def __init__(self, dialect: str, send: Send) -> None:
        self.dialect, self._send = dialect, send
        self._head_sent = self._is_stream = False
        self._head: Message | None = None  # of an answer, until the first piece of its body
        self._kept: list[Message] = []  # an error, head and body
        self._tail = b""  # the last bytes of a stream that were sent
        self._asked = 0  # nodes, and ends of them
        self.has_begun = False  # something of an answer has gone to the client

    def begin(self, choice: Choice, begun: Any) -> Send:
        """For what comes from that node. Once it has been given up, whatever it still says goes nowhere."""
        self._choice, self._begun = choice, begun
        self.end()
        asked = self._asked

        async def send(message: Message) -> None:
            if asked == self._asked:
                await self(message)

        return send

    def end(self) -> None:
        """Nothing more is taken from the node that was asked last."""
        self._asked += 1

    @property
    def says_nothing(self) -> bool:
        """Neither an answer nor an error has come."""
        return not self.has_begun and not self._kept

    async def __call__(self, message: Message) -> None:
        if message["type"] == START:
            await self._start(message)
        elif self._kept:
            self._kept.append(message)
        elif message["type"] == BODY:
            await self._pass_on(message)
        else:
            await self._send(message)

    async def _start(self, message: Message) -> None:
        if message["status"] >= 400:
            self._kept = [message]
        elif not self._head_sent:
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            headers = [*message.get("headers", ()), (NODE_HEADER.encode(), self._choice.label.encode())]
            self._head = dict(message) | {"headers": headers}
        elif self._is_stream:
            comment = f": {NODE_HEADER}: {self._choice.label}\n\n".encode()
            await self._send({"type": BODY, "body": comment, "more_body": True})

    async def _send_head(self) -> None:
        if self._head is not None:
            head, self._head, self._head_sent = self._head, None, True
            await self._send(head)

    async def _pass_on(self, message: Message) -> None:
        body = message.get("body", b"")
        if not self.has_begun and body.lstrip().startswith(b"<"):  # a page for people
            self.end()
            return
        if not self._is_stream and not body and not self.has_begun:
            return
        if not self._is_stream:
            self.has_begun = True
            self._begun()
            await self._send_head()
            await self._send(message)
            return
        if _is_error(body):
            self._kept = [message]
            return
        if says_something(message):
            self.has_begun = True
            self._begun()
        self._tail = (self._tail + body)[-_TAIL_BYTES:]
        # The end is written by `finish`, when it is known how the answer has ended.
        if body:
            await self._send_head()
            await self._send(dict(message) | {"more_body": True})

    def drop(self) -> None:
        """Another node is asked: the client never sees this error."""
        self._kept, self._head = [], None

    async def finish(self, error: dict[str, Any] | None) -> None:
        """Nothing more comes. `error`: what has gone wrong, where something has."""
        await self._send_head()
        if not self._head_sent:
            for message in self._kept:
                await self._send(message)
        elif self._is_stream:
            body = b"".join(message.get("body", b"") for message in self._kept)
            if error is not None or not _ENDS.search(self._tail + body):
                body = last_event(self.dialect, error or broken(self._choice.node, self.dialect))
            await self._send({"type": BODY, "body": body, "more_body": False})

    async def refuse(self, scope: Scope, receive: Receive, error: StartLLMError) -> None:
        if self._head_sent:
            await self.finish(openai_error(error)["error"])
        else:
            await error_answer(scope["path"], error)(scope, receive, self._send)


def _is_error(body: bytes) -> bool:
    """An error as a part of a stream, LiteLLM's or the node's."""
    return body.startswith((b"event: error", b"event: response.failed", b'data: {"error"', b'{"error"'))
