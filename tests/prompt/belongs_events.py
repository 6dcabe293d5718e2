"""What may happen to a conversation of `test_belongs`. Each event ends with a request, or several."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.prompt.belongs_clients import (
    FILE_NAMES,
    FILES,
    PRIVATE,
    ROLE,
    SKILLS,
    SYSTEM,
    TOOL_NAMES,
    TOOLS,
    Place,
    fill,
    typed_texts,
)
from tests.prompt.belongs_conversation import Conversation, Said, Words, imported

if TYPE_CHECKING:
    from tests.prompt.belongs_world import World


def nothing(world: World, conversation: Conversation, n: int) -> None:
    """Nobody asks."""


def go_on(world: World, conversation: Conversation, n: int) -> None:
    world.turn(conversation, n)


def line_changes(world: World, conversation: Conversation, n: int) -> None:
    """A line of the system text has another value: a new one, one that it had before, or it comes."""
    place = Place(SYSTEM, ("time", "mode", "customer", "branch")[n % 4])
    before = conversation.earlier.get(place, [])
    conversation.set(place, before[n % len(before)] if before and n % 3 == 2 else None)
    world.turn(conversation, n // 4)


def line_goes(world: World, conversation: Conversation, n: int) -> None:
    conversation.take_away(Place(SYSTEM, ("mode", "customer", "branch", "time")[n % 4]))
    world.turn(conversation, n // 4)


def many_lines(world: World, conversation: Conversation, n: int) -> None:
    """A whole list comes, goes or changes."""
    for number in range(0, SKILLS, 1 + n % 2):
        place = Place(SYSTEM, f"skill{number:02}")
        if n % 3 and conversation.values.get(place) is not None:
            conversation.take_away(place)
        else:
            conversation.set(place)
    world.turn(conversation, n // 4)


def message_changes(world: World, conversation: Conversation, n: int) -> None:
    """What a client put into an older message changes, goes, or comes back."""
    places = conversation.places()
    if places:
        place = places[n % len(places)]
        before = conversation.earlier.get(place)  # nothing, in a copy of a conversation that had withdrawn it
        if n % 3 == 0 or before is None:
            conversation.set(place)
        elif n % 3 == 1 and conversation.values[place] is not None:
            conversation.take_away(place)
        else:
            conversation.set(place, before[0])
    world.turn(conversation, n // 4)


def tools_change(world: World, conversation: Conversation, n: int) -> None:
    """A tool comes, goes, is described otherwise, or the list is in another order. aider has files in their place."""
    files = conversation.kind.name == "aider"
    names = FILE_NAMES if files else TOOL_NAMES
    place = Place(FILES if files else TOOLS, names[n % len(names)])
    if n % 4 == 0:
        conversation.set(place)
    elif n % 4 == 1 and conversation.values.get(place) is not None:
        conversation.take_away(place)
    elif n % 4 == 2 and conversation.earlier.get(place):
        conversation.set(place, conversation.earlier[place][0])
    elif place in conversation.values:
        conversation.values[place] = conversation.values.pop(place)
    world.turn(conversation, n // 4)


def retry(world: World, conversation: Conversation, n: int) -> None:
    """The client waits no longer and asks again; the first answer reaches nobody."""
    conversation.say(n)
    world.ask(conversation, n, heard=False)
    if n % 2:
        conversation.set(Place(SYSTEM, "time"))
    world.ask(conversation, n // 2)


def regenerate(world: World, conversation: Conversation, n: int) -> None:
    """The last answer is asked for again, once or several times."""
    if not conversation.history or conversation.history[-1].role != "assistant":
        world.turn(conversation, n)
    for _ in range(1 + n % 3):
        conversation.drop_from(len(conversation.history) - 1)
        if n % 2:
            conversation.set(Place(SYSTEM, "time"))
        world.ask(conversation, n // 2)


def undo(world: World, conversation: Conversation, n: int) -> None:
    """Back by some messages."""
    for _ in range(1 + n % 3):
        while conversation.history and conversation.history[-1].role != "user":
            conversation.history.pop()
        if conversation.history:
            conversation.history.pop()
    world.turn(conversation, n // 3)


def typed(conversation: Conversation) -> list[int]:
    """The places of what the user has typed."""
    return [i for i, said in enumerate(conversation.history) if said.role == "user" and not said.block]


def edit(world: World, conversation: Conversation, n: int) -> None:
    """A question is asked in other words; what came behind it goes, or stays."""
    users = typed(conversation)
    if users:
        index = users[n % len(users)]
        texts = typed_texts(conversation.kind.name)
        text = fill(texts[(n + 3) % len(texts)], conversation.words.new())
        conversation.history[index] = replace(conversation.history[index], text=text)
        if n % 2:
            conversation.drop_from(index + 1)
    world.turn(conversation, n)


def word_edited(world: World, conversation: Conversation, n: int) -> None:
    """A question is asked with another word in it; what came behind it stays."""
    world.turn(conversation, n)
    users = [index for index in typed(conversation) if PRIVATE.search(conversation.history[index].text)]
    if users:
        index = users[n % len(users)]
        said = conversation.history[index]
        conversation.history[index] = replace(said, text=PRIVATE.sub(conversation.words.new(), said.text))
    world.turn(conversation, n // 2)


def first_of_two(world: World, conversation: Conversation, n: int) -> None:
    """Two answers of equal words are made behind a call, and the client keeps the first of them."""
    world.turn(conversation, 0)
    conversation.say(n)
    before = list(conversation.history)
    world.ask(conversation, n)
    kept = conversation.history
    conversation.history = before
    world.ask(conversation, n)
    conversation.history = kept
    if n % 2:
        conversation.set(Place(SYSTEM, "time"))
    world.turn(conversation, n)


def answer_edited(world: World, conversation: Conversation, n: int) -> None:
    answers = [i for i, said in enumerate(conversation.history) if said.role == "assistant" and not said.calls]
    if answers:
        index = answers[n % len(answers)]
        text = f"I changed this by hand: {conversation.words.new()}."
        conversation.history[index] = replace(conversation.history[index], text=text, made=None, reasoning=None)
    world.turn(conversation, n)


def insertion(world: World, conversation: Conversation, n: int) -> None:
    users = typed(conversation)
    if users:
        conversation.numbers += 1
        note = Said(conversation.numbers, "user", f"(A note from the editor: {conversation.words.new()})")
        conversation.history.insert(users[n % len(users)], note)
    world.turn(conversation, n)


def fork(world: World, conversation: Conversation, n: int) -> None:
    """The same history goes on in two ways, the new one perhaps under another name."""
    twin = conversation.fork(Words(world.tag()))
    if n % 2:
        twin.session = f"fork{world.tag_count}"
    world.add(twin)
    world.turn(twin, n // 2)


def stranger(world: World, conversation: Conversation, n: int) -> None:
    """A client that was never served before sends the same words."""
    twin = imported(conversation, Words(world.tag()), n % 2 == 0, n % 3 == 0)
    if n % 3 == 2:
        twin.owner = f"other{world.tag_count}"
    world.add(twin)
    world.turn(twin, n // 2)


def heir(world: World, conversation: Conversation, n: int) -> None:
    """A client with another key sends the same words, values and thoughts, after one of the values has changed."""
    world.turn(conversation, 0)
    conversation.set(Place(SYSTEM, ("customer", "mode", "time")[n % 3]))
    world.turn(conversation, n)
    own = Words(world.tag())
    twin = imported(conversation, own, same_values=True, ours=False)
    pairs = zip(twin.history, conversation.history, strict=True)
    twin.history = [replace(copied, reasoning=said.reasoning) for copied, said in pairs]
    twin.owner = f"heir{world.tag_count}"
    world.add(twin)
    world.turn(twin, n // 2)


def newcomer(world: World, conversation: Conversation, n: int) -> None:
    """A short history of common words, made elsewhere."""
    twin = imported(conversation, Words(world.tag()), n % 2 == 0, True)
    twin.history = [Said(1, "user", "hello"), Said(2, "assistant", "OK.")]
    twin.numbers = 2
    twin.values = {place: value for place, value in twin.values.items() if place.where < 0}
    twin.earlier = {place: values for place, values in twin.earlier.items() if place.where < 0}
    world.add(twin)
    world.turn(twin, n // 2)


def compaction(world: World, conversation: Conversation, n: int) -> None:
    """The client sums its history up and goes on from that, with the last turn or without it."""
    users = typed(conversation)
    if users:
        kept = conversation.history[users[-1] :] if n % 2 else []
        conversation.numbers += 2
        text = f"Summary of the conversation so far: {conversation.words.new()} was looked at."
        summary = Said(conversation.numbers - 1, "user", text)
        conversation.history = [summary, Said(conversation.numbers, "assistant", "OK."), *kept]
    world.turn(conversation, n)


def side_role(world: World, conversation: Conversation, n: int) -> None:
    """The client asks its conversation with another system text, without tools or both; then it goes on."""
    world.turn(conversation, n)
    for number in range(1 + n % 2):
        side = conversation.fork(Words(world.tag()))
        side.toolless = n % 3 != 0
        if n % 3 != 1:
            side.set(ROLE)
        side.say(n)
        world.ask(side, n + number)
    world.turn(conversation, n // 2)


def roles_change(world: World, conversation: Conversation, n: int) -> None:
    """Plan, build, plan: the conversation itself goes on with another system text, and back."""
    for number in range(1 + n % 7):
        if number % 2:
            conversation.take_away(ROLE)
        else:
            conversation.set(ROLE)
        conversation.toolless = n % 4 == 1 and not number % 2
        world.turn(conversation, n + number)
    conversation.take_away(ROLE)
    conversation.toolless = False
    world.turn(conversation, n // 2)


def one_shots(world: World, conversation: Conversation, n: int) -> None:
    """Requests of one message with the conversation's system text, a clock in it."""
    for _ in range(1 + 2 * (n % 3)):
        conversation.set(Place(SYSTEM, "time"))
        side = conversation.fork(Words(world.tag()))
        side.history = []
        side.say(n)
        world.ask(side, n)


def long_talk(world: World, conversation: Conversation, n: int) -> None:
    """Several turns, a line or a sentence that tells the time changes in each."""
    for number in range(2 + n % 5):
        conversation.ticks += n
        conversation.set(Place(SYSTEM, ("time", "clock")[n % 2]))
        world.turn(conversation, n + number)


def clear(world: World, conversation: Conversation, n: int) -> None:
    """Old tool results are taken out of the history, or come back into it."""
    if conversation.kind.clears:
        results = [i for i, said in enumerate(conversation.history) if said.role == "tool"][:-1]
        for index in results[: 1 + n % 3]:
            said = conversation.history[index]
            conversation.history[index] = replace(said, cleared=n % 4 != 3)
    world.turn(conversation, n)


def block_messages(world: World, conversation: Conversation, n: int) -> None:
    """Messages of one declared block only come, change and go, two of them in a row, at the end and in the middle."""
    if conversation.kind.alone is not None:
        blocks = [said for said in conversation.history if said.block]
        if n % 3 == 0 or not blocks:
            conversation.say(n)
            at = len(conversation.history) if n % 2 else max(0, len(conversation.history) - 1)
            for _ in range(1 + n % 2):
                conversation.say_block(at)
        else:
            place = Place(blocks[n % len(blocks)].number, conversation.kind.alone)
            if n % 3 == 1:
                conversation.take_away(place)
            else:
                conversation.set(place)
    world.turn(conversation, n // 2)


NOTHINGS = ("false", "null", '""', "[]", "{}", "0")


def default_comes(world: World, conversation: Conversation, n: int) -> None:
    """A call of the history gets a member that says nothing, or loses it: another call, or the one that was made."""
    calling = [index for index, said in enumerate(conversation.history) if said.calls]
    if calling:
        index = calling[n % len(calling)]
        said = conversation.history[index]
        arguments = json.loads(said.calls[0].arguments)
        if "dry_run" in arguments and n % 3 == 0:
            del arguments["dry_run"]
        else:
            arguments["dry_run"] = json.loads(NOTHINGS[n % len(NOTHINGS)])
        call = replace(said.calls[0], arguments=json.dumps(arguments))
        before = said if said.made is not None else said.edited
        changed = replace(said, calls=(call, *said.calls[1:]), made=None, reasoning=None, edited=before)
        if before is not None and before.matches(changed):
            changed = replace(changed, made=before.made)
        conversation.history[index] = changed
    world.turn(conversation, n)


def copied(world: World, conversation: Conversation, n: int) -> None:
    """The same customer's other conversation begins with a copy of this one, in which a value is another one."""
    own = Words(world.tag())
    twin = imported(conversation, own, same_values=True, ours=n % 2 == 0)
    twin.owner, twin.ticks = conversation.owner, conversation.ticks + 7000
    twin.session = f"copy{world.tag_count}" if n % 3 == 2 else None
    twin.set(Place(SYSTEM, ("customer", "clock", "mode")[n % 3]))
    world.add(twin)
    world.turn(twin, n // 2)


def guessed(world: World, conversation: Conversation, n: int) -> None:
    """Another key sends what it guesses of this conversation, word for word or nearly so."""
    world.turn(conversation, n // 2)
    world.guess(conversation, n)


def restart(world: World, conversation: Conversation, n: int) -> None:
    world.restart()
    world.turn(conversation, n)


Event = Callable[["World", Conversation, int], None]
_IN_ORDER = (
    nothing, go_on, line_changes, go_on, message_changes, line_goes, tools_change, long_talk, regenerate, fork,
    stranger, heir, newcomer, restart, one_shots, retry, edit, word_edited, first_of_two, undo, compaction, clear,
    many_lines, insertion, answer_edited, block_messages, default_comes, copied,
    guessed, side_role, roles_change,
)  # fmt: skip
EVENTS: tuple[tuple[str, Event], ...] = tuple((event.__name__.replace("_", " "), event) for event in _IN_ORDER)
