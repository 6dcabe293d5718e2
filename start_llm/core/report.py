"""What a request cost, and why (headers, usage, logs, `/v1/cache`); and what is stored, as people look at it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Miss:
    """Why more was computed than was new."""

    # ``first_turn``, ``diverged``, ``evicted``, ``no_checkpoint``, ``retokenised``, ``policy``, ``store_error``
    # (stored KV could not be read), ``not_restorable`` (the model cannot go on from stored KV), ``unproved`` (an
    # earlier turn has the same words, but other values in a declared place, and nothing proves that it is the same
    # conversation), ``flattened`` (a conversation that was served is written into one message), ...
    reason: str
    token: int  # index of the first prompt token that differs from what was stored
    # `expected`, `found`: text around that token, as stored and as asked for now. What is stored may be another
    # client's: `expected` is set only in a `Background`, for who may read everything.
    expected: str = ""
    found: str = ""
    message: int | None = None  # index of the client's message it lies in, or ``None``
    field: str | None = None  # ``content``, ``reasoning``, ``tool_calls``, ``tools``, ``system``, ...
    rule: str | None = None  # the volatile rule that matched there, if one did
    detail: str = ""  # a sentence for people
    # what the client can do so that the next such prompt is reused (``send session_id``); "" if nothing
    remedy: str = ""
    # the tokens that are stored there; for the server itself, which makes `expected` of them
    stored: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        """The field that differs: ``messages[3].content``; "" if that is not known."""
        if self.message is None:
            return self.field or ""
        return f"messages[{self.message}].{self.field}" if self.field else f"messages[{self.message}]"

    @property
    def summary(self) -> str:
        """Reason, place and remedy in a line; the reason is its first word."""
        where = f" in {self.place}" if self.place else ""
        return f"{self.reason}{where}: {self.remedy}" if self.remedy else f"{self.reason}{where}"

    def as_dict(self, *, words: bool = True) -> dict[str, Any]:
        """Plain JSON types. Without `words` nothing of a conversation is quoted."""
        data = asdict(self)
        del data["stored"]
        return data if words else data | {"expected": "", "found": ""}


@dataclass(frozen=True, slots=True)
class Background:
    """What people may want to know of a request, beside what it cost."""

    note: tuple[str, ...] = ()  # the lines of the update note that its prompt ended with; empty: it had none
    parted: Miss | None = None  # where the prompt left what is stored, also if nothing was computed again by that

    def as_dict(self, *, words: bool, others_words: bool) -> dict[str, Any]:
        """Plain JSON types. `words`: the request's own, `others_words`: those that are stored where it parted."""
        parted = None if self.parted is None else self.parted.as_dict(words=words)
        if parted is not None and not others_words:
            parted["expected"] = ""
        return {"note": list(self.note) if words else [], "parted": parted}


DRAFT_COUNTS = ("forwards", "drafted", "accepted", "copied", "headed", "forced")
_COUNTS = ("prompt", "reused", "computed", "new", "joined", "computed_idle", "copied_bytes", "generated")


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Token counts of one request."""

    prompt: int = 0
    reused: int = 0  # prompt tokens taken from stored KV
    computed: int = 0  # prompt tokens that went through the model between arrival and first token
    # prompt tokens that no earlier request of this owner had sent, and that were not generated for it; the prompt
    # room counts them. Those that a request did not come to, because it ended early, are new when they are sent again
    new: int = 0
    joined: int = 0  # reused tokens that another running request of this owner was computing meanwhile
    computed_idle: int = 0  # tokens that re-anchoring had computed in the idle gap before
    copied_bytes: int = 0  # KV bytes copied to restore
    generated: int = 0
    forwards: int = 0  # passes that decoding them took; beside other requests they are shared
    # `drafted`, `accepted`: proposed tokens that were verified, and those of them that were right: `copied` from the
    # conversation's text, `headed` by a head or a small model, `forced` by a grammar
    drafted: int = 0
    accepted: int = 0
    copied: int = 0
    headed: int = 0
    forced: int = 0
    seconds_queued: float = 0.0
    seconds_prefill: float = 0.0
    session: str = ""  # the conversation that the request was found to belong to
    cut: str = ""  # why the answer ended early, where it is not the client's doing: ``watchdog``, ``repetition``
    repeated: int = 0  # tokens of the period in which the answer, or its reasoning, repeated itself until it was ended
    miss: Miss | None = None  # set where `computed` exceeds `new` by more than a block

    def as_dict(self, *, words: bool = True) -> dict[str, Any]:
        """Plain JSON types; without ``miss``, ``cut`` and ``repeated`` where there is none.

        `words`: what a miss quotes, too.
        """
        data = asdict(self)
        for name in ("miss", "cut", "repeated"):
            if not data[name]:
                del data[name]
        if self.miss is not None:
            data["miss"] = self.miss.as_dict(words=words)
        return data

    def plus(self, other: CacheReport) -> CacheReport:
        """Both requests as one: counts are sums, the rest is the other's where this one has nothing to say."""
        names = (*_COUNTS, *DRAFT_COUNTS, "seconds_prefill")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        first = {name: getattr(self, name) or getattr(other, name) for name in ("miss", "cut", "repeated")}
        return replace(other, **sums, **first)

    def header(self) -> str:
        """The value of ``x-start-llm-cache``."""
        line = f"prompt={self.prompt}; reused={self.reused}; computed={self.computed}; new={self.new}"
        if self.miss is None:
            return line
        place, remedy = self.miss.place, self.miss.remedy
        line += f"; miss={self.miss.reason}" + (f"; at={place}" if place else "")
        return f'{line}; remedy="{remedy}"' if remedy else line


MOST_SEGMENTS = 20_000


class StoredSegment(NamedTuple):
    """A run of tokens behind its parent's."""

    parent: int  # index in `StoredTree.segments`, which is smaller than its own; -1: begins a prompt
    tokens: int  # its length
    memory: int  # bytes of KV in memory, checkpoints included; 0: none
    disk: bool  # has a copy on disk
    age: float  # seconds since a request went through here; -1: none has since the start
    uses: int  # requests that did
    cost: float  # seconds that computing it took


@dataclass(frozen=True, slots=True)
class StoredTree:
    segments: tuple[StoredSegment, ...] = ()  # parents first
    # (name, index of the segment that one of its turns ends in, number), the last used one first: the number tells
    # apart conversations that several clients gave one name
    conversations: tuple[tuple[str, int, int], ...] = ()
    left_out: int = 0  # segments beyond `MOST_SEGMENTS`
    token_bytes: float = 0.0  # of KV for one token, as far as it is known: what a segment on disk takes is told by it

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, one list a field: a tree of 10,000 segments is half as long as with their names."""
        columns = {name: [getattr(segment, name) for segment in self.segments] for name in StoredSegment._fields}
        return {
            **columns,
            "disk": [int(segment.disk) for segment in self.segments],
            "conversations": [list(named) for named in self.conversations],
            "left_out": self.left_out,
            "token_bytes": round(self.token_bytes, 1),
        }
