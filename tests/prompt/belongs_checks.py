"""The properties that every prompt must have, checked on its text. They know the truth: which answer was made where.

(a) nothing in it stems from another conversation, and nothing that this one has taken back;
(b) every value that the request carries is in it, and the newest of a place stands last;
(c) what was withdrawn is told as withdrawn;
(d) it is not much longer than what was sent;
(e) with no answer of ours in the request, and under ``strict``, it is the template's rendering;
(f) what another key is told of it is what a new server tells (`belongs_world`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product

from start_llm.core.messages import Message, Tool
from tests.prompt.belongs_clients import CLEARED, FILES, SYSTEM, SYSTEM_LINES, TOOLS, Place, files_text, private_words
from tests.prompt.belongs_conversation import Made, Said, Sent, arguments_of, declared_words
from tests.prompt.belongs_reading import (
    Shown,
    count,
    frames,
    last_mention,
    messages_read,
    rendering,
    renderings,
    tags,
    texts_of,
    without_notes,
)

SLACK = 64
_DEFAULT = '"dry_run"'
_OUR_ID = re.compile("call[0-9a-f]{24}")
_NOW = re.compile(re.escape(SYSTEM_LINES["clock"]).replace(r"\{\}", r"\d\d:\d\d:\d\d"))


@dataclass
class Truth:
    """What is known of a server: all answers that it made, and all tags that clients sent to it."""

    family: str
    policy: str
    context: int
    made: list[Made] = field(default_factory=list)
    tags: set[str] = field(default_factory=set)
    orders: set[tuple[str, ...]] = field(default_factory=set)

    def saw(self, sent: Sent) -> None:
        self.tags |= tags(texts_of(sent.request.messages, sent.request.tools))
        self.orders.add(tuple(tool.name for tool in sent.request.tools))


@dataclass(frozen=True)
class Seen:
    """A prompt, and what is true of its request.

    Attributes:
        base: the deepest answer of ours that the request carries on the same path.
        equal: answers of ours to requests that were word for word the same.
        alike: the one of them that no name, key or other answer tells from this conversation.
    """

    sent: Sent
    text: str
    tokens: int
    thinking: bool
    base: Made | None
    equal: tuple[Made, ...]
    alike: Made | None


def seen(truth: Truth, sent: Sent, text: str, tokens: int, thinking: bool) -> Seen:
    base = base_of(sent.history)
    equal = _equal(truth, sent) if base is None else ()
    alike = _deepest_alone([made for made in equal if not _stands_against(sent, made)])
    return Seen(sent, text, tokens, thinking, base, equal, alike)


def problems(truth: Truth, prompt: Seen) -> Iterator[str]:
    """What is wrong with a prompt, each beginning with the property's letter."""
    if truth.policy == "strict" or (prompt.base is None and not prompt.equal):
        yield from _as_sent(truth, prompt)
    if truth.policy != "strict":
        yield from _foreign(prompt)
        yield from _places(truth, prompt)
        yield from _in_its_place(truth, prompt)
        yield from _length(truth, prompt)


# --- the truth ----------------------------------------------------------------------


def base_of(history: Sequence[Said]) -> Made | None:
    for index in range(len(history) - 1, -1, -1):
        made = history[index].made
        if made is None or len(made.history) != index:
            continue
        if all(one.matches(other) for one, other in zip(made.history, history[:index], strict=True)):
            return made
    return None


def _deepest_alone(found: Sequence[Made]) -> Made | None:
    """The deepest one that no other one of its depth can be taken for."""
    depths = Counter(len(made.history) for made in found)
    return max((made for made in found if depths[len(made.history)] == 1), key=lambda m: len(m.history), default=None)


def _equal(truth: Truth, sent: Sent) -> tuple[Made, ...]:
    """Answers to requests that are word for word the same as this request up to there."""
    faces, aside = [_face(message) for message in _own_messages(sent)], _aside(sent)
    found: list[Made] = []
    for made in truth.made:
        before = _own_messages(made.sent)
        if len(before) >= len(faces) or faces[len(before)] != _face(made.answer) or aside != _aside(made.sent):
            continue
        if [_face(message) for message in before] == faces[: len(before)]:
            found.append(made)
    return tuple(found)


def _stands_against(sent: Sent, made: Made) -> bool:
    """The key, the session's name, or ids that this server or another one of its kind made for other calls."""
    mine, theirs = sent.request, made.sent.request
    sessions = {mine.session, theirs.session} - {None}
    ids = _ids(_own_messages(sent)[len(_own_messages(made.sent))])
    other = ids != _ids(made.answer) and any(_OUR_ID.fullmatch(one) for one in ids)
    return mine.owner != theirs.owner or len(sessions) > 1 or other


def _ids(answer: Message) -> list[str]:
    return [call.id.replace("_", "") for call in answer.tool_calls]  # some clients leave that out


def _own_messages(sent: Sent) -> list[Message]:
    """The system text and the conversation's own messages."""
    said = zip(sent.request.messages, sent.said, strict=True)
    return [message for index, (message, own) in enumerate(said) if index == 0 or own is not None]


def _aside(sent: Sent) -> tuple[object, ...]:
    files = [m.content for m, own in zip(sent.request.messages[1:], sent.said[1:], strict=True) if own is None]
    return sent.request.tools, tuple(files) if sent.transient is None else ()


def _face(message: Message) -> tuple[object, ...]:
    text = message.content.rpartition("</think>")[2].strip() if message.role == "assistant" else message.content.strip()
    if text.startswith("x-anthropic-billing-header") and message.role == "system":
        text = text.partition("\n")[2]
    calls = tuple((call.name, arguments_of(call)) for call in message.tool_calls)
    # Of two conversations of one owner that differ in the time only, either may go on as the other.
    return message.role, _NOW.sub("", text) if message.role == "system" else text, calls


def _made_here(prompt: Seen) -> list[Made]:
    """The base and what the server answered before it, or one that the request cannot be told from."""
    base = prompt.base or prompt.alike
    return [*(said.made for said in base.history if said.made is not None), base] if base is not None else []


def remembered(prompt: Seen) -> frozenset[str]:
    """Words that later prompts of this conversation may show though their requests do not carry them."""
    request = prompt.sent.request
    own = private_words(" ".join(texts_of(request.messages, request.tools)))
    return frozenset(declared_words(prompt.sent) | (_allowed(prompt) - own))


def _allowed(prompt: Seen) -> set[str]:
    request = prompt.sent.request
    words = private_words(" ".join(texts_of(request.messages, request.tools)))
    for made in _made_here(prompt):
        words |= made.declared | private_words(made.answer.reasoning or "")
        words |= private_words(" ".join(call.id for call in made.answer.tool_calls))
    for said in prompt.sent.history:
        if said.cleared:
            words |= private_words(said.text)
    if prompt.alike is not None:
        sent = prompt.alike.sent.request
        words |= private_words(" ".join(texts_of(sent.messages, sent.tools)))
    return words


# --- (a) to (e) -----------------------------------------------------------------------


def _foreign(prompt: Seen) -> Iterator[str]:
    allowed = _allowed(prompt)
    for word in sorted(private_words(prompt.text) - allowed):
        at = prompt.text.index(word)
        yield f"(a) {word!r} is not of this conversation: ...{prompt.text[max(0, at - 60) : at + 30]!r}..."


def _places(truth: Truth, prompt: Seen) -> Iterator[str]:
    sent, text = prompt.sent, prompt.text
    notes = frames(text, truth.tags)
    own = "\n".join(texts_of(sent.request.messages, sent.request.tools))
    for place, value in sent.values.items():
        name = _name(place)
        older = [old for old in sent.earlier.get(place, ()) if old not in own]
        if value is None:
            for old in older if place not in sent.stamps else ():
                mention = last_mention(text, old, notes, name, place.where)
                if (
                    old in text
                    and mention is not None
                    and not mention.gone
                    and not _newer_files(prompt, place, mention.at)
                ):
                    yield f"(c) {old!r} was withdrawn, nothing says so"
            continue
        line = SYSTEM_LINES[place.label].format(value) if place.where == SYSTEM else value
        mention = last_mention(text, value, notes, name, place.where)
        if not _says(text, line, value) or mention is None:
            yield f"(b) {line!r} is not in the prompt"
            continue
        if mention.gone:
            yield f"(b) {value!r} holds again, the prompt says that it is gone"
        late = [old for old in older if text.rfind(old) > mention.at]
        if late:
            yield f"(b) {value!r} holds, but the last that is said is {late}"


def _name(place: Place) -> str | None:
    """What a note may call the place by, as a pattern of a line's part.

    A line of the system text begins with it: a reminder that is told of may have the same words further on.
    """
    if place.where == SYSTEM:
        return r"^[-+\s]*" + re.escape(SYSTEM_LINES[place.label].partition("{}")[0].strip())
    return re.escape(place.label) if place.where == TOOLS else None


def _says(text: str, line: str, value: str) -> bool:
    """The line stands there, or was told by what is new in it: the value among its own words, the rest further up."""
    before, _, behind = line.partition(value)
    around = f"{before[-20:]}{value}{behind[:20]}"
    return line in text or (around in text and before in text and behind in text)


def _newer_files(prompt: Seen, place: Place, at: int) -> bool:
    """aider's block stands behind it as sent. It says of itself that nothing else is true of the files."""
    block = files_text(prompt.sent.values) if place.where == FILES else None
    return block is not None and prompt.text.rfind(block.strip()) > at


def _in_its_place(truth: Truth, prompt: Seen) -> Iterator[str]:
    """The conversation's messages are there, each in its place and with its own words."""
    sent = prompt.sent
    pairs = [
        (message, said)
        for index, (message, said) in enumerate(zip(sent.request.messages, sent.said, strict=True))
        if index and (said is not None or (message.role == "user" and sent.transient is not None))
        if said is None or not said.block
    ]
    read = [shown for shown in messages_read(prompt.text)[1:] if not _is_block(sent, shown, truth)]
    if [shown.role for shown in read] != [message.role for message, _ in pairs]:
        roles = [message.role for message, _ in pairs]
        yield f"(b) the messages are {roles}, the prompt shows {[shown.role for shown in read]}"
        return
    answered = max((i for i, (message, _) in enumerate(pairs) if message.role == "assistant"), default=-1)
    for index, ((message, said), shown) in enumerate(zip(pairs, read, strict=True)):
        if message.role == "assistant":
            right = all(part in shown.body for part in _parts(message))
            right = right and (_DEFAULT in shown.body) == any(_DEFAULT in call.arguments for call in message.tool_calls)
        else:
            body = without_notes(shown.body, truth.tags).strip()
            right = body in (_as_written(sent, message, said) if index <= answered else {message.content.strip()})
        if not right:
            yield f"(b) message {index}, a {message.role}'s: {message.content!r} was sent, {shown.body!r} is shown"


def _is_block(sent: Sent, shown: Shown, truth: Truth) -> bool:
    """A message of a declared block only: what it says is looked for by `_places`."""
    return shown.role == "user" and without_notes(shown.body, truth.tags).strip() in sent.blocks


def _parts(answer: Message) -> Iterator[str]:
    yield answer.content.rpartition("</think>")[2].strip()
    for call in answer.tool_calls:
        for name, value in json.loads(call.arguments).items():
            yield value if isinstance(value, str) and value else f'"{name}": {json.dumps(value)}'


def _as_written(sent: Sent, message: Message, said: Said | None) -> set[str]:
    """All that the client has ever written for this message."""
    if said is None:
        return {message.content.strip()}
    forms, write = (
        (sent.kind.result, sent.kind.result_text) if said.role == "tool" else (sent.kind.user, sent.kind.user_text)
    )
    places = [Place(said.number, label) for label in forms]
    options = [(None, sent.values.get(place), *sent.earlier.get(place, ())) for place in places]
    texts = {write(said.text, said.number, dict(zip(places, values, strict=True))) for values in product(*options)}
    return {text.strip() for text in (*texts, *([CLEARED] if said.cleared else []))}


def _length(truth: Truth, prompt: Seen) -> Iterator[str]:
    request = prompt.sent.request
    plain_text = rendering(request.messages, request.tools, truth.family, prompt.thinking)
    if len(prompt.text) <= len(plain_text) + SLACK and not truth.context:
        return  # Counting tokens takes longer than all else here.
    plain, shown = count(plain_text), count(prompt.text)
    limit = 1.1 * plain + SLACK
    full = _given_back(truth, prompt)
    if shown > limit and full is not None:
        limit += max(0, count(full) - plain)
    if shown > limit and _head(prompt.text) != _head(plain_text):
        limit += count(_head(prompt.text))  # a head that was sent before may stay, and the new one stands in a note
    if shown > limit:
        yield f"(d) {plain} tokens were sent, {shown} are shown, {limit:.0f} are allowed"
    if plain <= truth.context < prompt.tokens:
        yield f"(d) {plain} tokens were sent, {prompt.tokens} are shown, the context has {truth.context}"


def _head(text: str) -> str:
    return text[: text.find("<|im_end|>")]


def fits(truth: Truth, sent: Sent, thinking: bool) -> bool:
    """Whether the request as it was sent is within the context."""
    plain = rendering(sent.request.messages, sent.request.tools, truth.family, thinking)
    return not truth.context or count(plain) <= truth.context


def _given_back(truth: Truth, prompt: Seen) -> str | None:
    """The request with its own reasoning and the results that its client cleared, as far as they are shown."""
    here = set(map(id, _made_here(prompt)))
    messages: list[Message] = []
    for message, said in zip(prompt.sent.request.messages, prompt.sent.said, strict=True):
        if said is not None and said.made is not None and id(said.made) in here and not message.reasoning:
            thought = said.made.answer.reasoning
            if thought and thought in prompt.text and thought not in message.content:
                message = replace(message, reasoning=thought)
        if said is not None and said.cleared and said.text in prompt.text:
            message = replace(message, content=said.text)
        messages.append(message)
    if messages == list(prompt.sent.request.messages):
        return None
    return rendering(messages, prompt.sent.request.tools, truth.family, prompt.thinking)


def _as_sent(truth: Truth, prompt: Seen) -> Iterator[str]:
    request = prompt.sent.request
    wanted: list[str] = []
    for messages in _without_telemetry(truth, prompt.sent):
        for tools in _orders(truth, request.tools):
            for text in renderings(messages, tools, truth.family, prompt.thinking):
                if text == prompt.text:
                    return
                wanted.append(text)
    same = next((i for i, (a, b) in enumerate(zip(wanted[0], prompt.text, strict=False)) if a != b), None)
    at = same if same is not None else min(len(wanted[0]), len(prompt.text))
    near = slice(max(0, at - 60), at + 120)
    yield f"(e) not what was sent. Sent: ...{wanted[0][near]!r}... Shown: ...{prompt.text[near]!r}..."


def _without_telemetry(truth: Truth, sent: Sent) -> Iterator[tuple[Message, ...]]:
    messages = sent.request.messages
    first, _, rest = messages[0].content.partition("\n")
    if truth.policy == "strict" or not first.startswith("x-anthropic-billing-header"):
        yield messages
        return
    for content in (rest, f"\n{rest}"):
        yield (replace(messages[0], content=content), *messages[1:])


def _orders(truth: Truth, tools: Sequence[Tool]) -> Iterator[Sequence[Tool]]:
    """The tools as sent, or in an order that was sent before."""
    yield tools
    if truth.policy != "strict" and len(tools) > 1:
        yield from (order for order in permutations(tools) if tuple(tool.name for tool in order) in truth.orders)
