"""What the oracle says: a function of the tokens that it sees. Copied into the checkpoint as `oracle_answers.py`.

A system text with ``[[say: text]]`` is answered with the text. All other cues stand in the text of user messages (tool
responses are not read for cues):

- ``[[script]]raw 1[[next]]raw 2[[end]]``: the k-th assistant turn after that message is the k-th raw text, verbatim,
  with ``{truth}`` and ``{find: text}`` replaced as below, and ``{after: text}`` by the first word (letters, digits,
  ``-``) behind the last such text in the visible history (cues left out), nothing if there is none, and ``{images}`` by
  the names of the images in it, made of what their places hold. ``{think}``, ``{/tool_call}`` and their like become
  marks: a server spells these in letters where they stand in a user's text. When the script has run out: ``Done.``, if
  no cue follows.
- ``[[truth]]``: SHA-256 (hex, 16 digits) of all visible tokens up to and including ``<|im_start|>assistant\\n``.
- ``[[find: text]]``, any number: ``find: 2@5 0@-1``, how often each text occurs in the visible history (cues left out)
  and the index of the last message that holds it.
- ``[[long N]]``: N tokens of filler.
- none of these: ``Answer 1a2b3c4d.``, from the hash of what stands after the last assistant turn.

The last three are read in the messages after the last assistant turn.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

PAD, END_OF_TEXT, START, END = 0, 1, 2, 3
NO_THINKING = "<think>\n\n</think>\n\n"
MISMATCH = "!!STATE MISMATCH: "
FILLER = " the"
MEMO_LIMIT = 64 if "ORACLE_FORGETS" in os.environ else 4096
"""Answers. 4,096 are 13 MB of tokens that go all at once: a soak looked at the oracle's memory, not the server's."""
LONGEST_BLOCK = 64  # tokens in a pass that verifies a draft
FIRST_SEEN = 1 << 20
"""Tokens from here on are what an oracle with eyes sees of an image."""

SAY = re.compile(r"\[\[say: (.*?)\]\]")
SCRIPT = re.compile(r"\[\[script\]\](.*?)\[\[end\]\]", re.DOTALL)
FIND = re.compile(r"\[\[find: (.*?)\]\]", re.DOTALL)
INLINE_FIND = re.compile(r"\{find: (.*?)\}", re.DOTALL)
INLINE_AFTER = re.compile(r"\{after: (.*?)\}", re.DOTALL)
INLINE_MARK = re.compile(r"\{(/?(?:think|tool_call))\}")
IMAGE = re.compile(r"<image-([0-9a-f]{8})>")
LONG = re.compile(r"\[\[long (\d+)\]\]")
TOOL_RESPONSE = re.compile(r"<tool_response>.*?</tool_response>", re.DOTALL)
THOUGHT = re.compile(r"^\s*<think>.*?</think>\s*", re.DOTALL)


def truth(tokens: np.ndarray) -> str:
    """SHA-256 of token ids as little-endian int32, its first 64 bits: all of it is fifty tokens of each answer."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()[:16]


def image_name(seen: np.ndarray) -> str:
    """What the oracle calls an image whose places hold this."""
    return truth(seen)[:8]


def split_messages(text: str) -> list[tuple[str, str]]:
    """ChatML text to (role, body); the open generation prompt at its end is left out."""
    messages = []
    for part in text.split("<|im_start|>")[1:-1]:
        role, _, body = part.partition("\n")
        messages.append((role, body.rsplit("<|im_end|>", 1)[0]))
    return messages


def _without_cues(body: str) -> str:
    return FIND.sub("", SCRIPT.sub("", body))


def find(messages: list[tuple[str, str]], text: str) -> str:
    """``count@last``: occurrences of `text` outside cues, and the index of the last message with it (-1: none)."""
    counts = [_without_cues(body).count(text) for _, body in messages]
    return f"{sum(counts)}@{max((i for i, n in enumerate(counts) if n), default=-1)}"


def after(messages: list[tuple[str, str]], text: str) -> str:
    """The first word behind the last `text`; empty if it does not occur."""
    seen = "\n".join(_without_cues(body) for _, body in messages)
    _, _, behind = seen.rpartition(text)
    word = re.search(r"[\w-]+", behind) if text in seen else None
    return word[0] if word else ""


def compose(messages: list[tuple[str, str]], fingerprint: str) -> str:
    """The answer to a conversation."""
    for role, body in messages:
        if role == "system" and (said := SAY.search(body)):
            return str(said[1])
    asks = [TOOL_RESPONSE.sub("", body) if role == "user" else "" for role, body in messages]
    scripted = max((i for i, body in enumerate(asks) if SCRIPT.search(body)), default=-1)
    turns = [i for i, (role, _) in enumerate(messages) if role == "assistant"]
    if scripted >= 0:
        texts = SCRIPT.findall(asks[scripted])[-1].split("[[next]]")
        k = sum(i > scripted for i in turns)
        if k < len(texts):
            raw = INLINE_MARK.sub(r"<\1>", texts[k]).replace("{truth}", fingerprint)
            raw = INLINE_AFTER.sub(lambda match: after(messages, match[1]), raw)
            raw = raw.replace("{images}", ", ".join(IMAGE.findall("\n".join(body for _, body in messages))) or "none")
            return INLINE_FIND.sub(lambda match: find(messages, match[1]), raw)
    current = messages[turns[-1] + 1 :] if turns else messages
    asked = "\n".join(SCRIPT.sub("", body) for body in asks[len(messages) - len(current) :])
    parts = [fingerprint] if "[[truth]]" in asked else []
    if wanted := FIND.findall(asked):
        parts.append("find: " + " ".join(find(messages, text) for text in wanted))
    if long := LONG.search(asked):
        parts.append(FILLER * int(long[1]))
    if parts:
        return "\n".join(parts)
    if scripted >= 0:
        return "Done."
    return f"Answer {hashlib.sha256(repr(current).encode()).hexdigest()[:8]}."


class Answers:
    """Next tokens. Owned by the thread that runs the model."""

    def __init__(self, tokenizer: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        self.opening = np.array(self.encode("<|im_start|>assistant\n"), dtype="<i4")
        self.no_thinking = self.encode(NO_THINKING)
        self.words = [self.encode(f" {word}")[0] for word in ("the", "of", "and", "to", "in", "is", "that", "for")]
        self.memo: dict[str, list[list[int]]] = {}
        self.pending: Counter[tuple[str, int]] = Counter()
        self.named: tuple[np.ndarray, str] = (np.zeros(0, dtype="<i4"), "")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def base_logits(self, size: int, other: float) -> np.ndarray:
        """Logits of tokens that were not chosen: under a grammar that forbids the chosen one, the shortest way out."""
        logits = np.full(size, other, dtype=np.float32)
        logits[END] = 12.0
        for text, value in {"}": 10.0, "]": 9.0, '"': 8.0, ":": 7.0, "0": 2.0, ",": 1.0}.items():
            logits[self.encode(text)[0]] = value
        logits[PAD] = -12.0
        return logits

    def steps(self, history: np.ndarray, length: int, problem: str | None) -> tuple[bool, list[int]]:
        """Was this a decode pass, and what is next: at each of the new tokens if all of them may belong to an answer,
        else behind the last one."""
        starts = np.flatnonzero(history == START)
        behind = int(starts[-1]) + len(self.opening) if len(starts) else 0
        if not 1 < length <= LONGEST_BLOCK or len(history) - length < behind:
            decode, token = self.step(history, length, problem)
            return decode, [token]
        first, reply = len(history) - length, self._given_reply()
        prompt, tails = history[:behind], (history[behind : first + i + 1] for i in range(length))
        found = [self._answer(prompt, tail, 1, problem, reply) for tail in tails]
        return any(decode for decode, _ in found), [token for _, token in found]

    def step(self, history: np.ndarray, length: int, problem: str | None) -> tuple[bool, int]:
        """For the visible tokens, the last `length` new in this pass: was this a decode step, and what is next."""
        starts = np.flatnonzero(history == START)
        if not len(starts):
            return self._free_running(history, length)
        after = int(starts[-1]) + len(self.opening)
        return self._answer(history[:after], history[after:], length, problem, self._given_reply())

    def _answer(
        self, prompt: np.ndarray, tail: np.ndarray, length: int, problem: str | None, reply: str
    ) -> tuple[bool, int]:
        """As `step`. `tail`: what stands behind the prompt's opening of an answer."""
        if not np.array_equal(prompt[-len(self.opening) :], self.opening) or (tail[:-1] <= END).any():
            return False, END
        key = self._name(prompt)
        decode = length == 1 and self._consume((key, len(tail) - 1))
        if len(tail) and tail[-1] <= END:
            return decode, END
        generated = tail.tolist()
        token = self._garbled(generated, problem) if problem else self._continue(key, prompt, generated, reply)
        self._expect((key, len(tail)))
        return decode, token

    def _name(self, prompt: np.ndarray) -> str:
        """Its truth; each position of each pass asks for the same one."""
        if not np.array_equal(self.named[0], prompt):
            self.named = prompt.copy(), truth(prompt)
        return self.named[1]

    def _consume(self, key: tuple[str, int]) -> bool:
        if not self.pending[key]:
            del self.pending[key]
            return False
        self.pending[key] -= 1
        return True

    def _expect(self, key: tuple[str, int]) -> None:
        if len(self.pending) > MEMO_LIMIT * 16:
            self.pending.clear()
        self.pending[key] += 1

    def _free_running(self, history: np.ndarray, length: int) -> tuple[bool, int]:
        """Text without chat markers: words drawn by the hash of all of it, about 16 of them."""
        before = truth(history[:-1])
        decode = length == 1 and self._consume((before, -1))
        digest = truth(history)
        self._expect((digest, -1))
        draw = int(digest[:8], 16)
        return decode, END if draw % 16 == 0 else self.words[draw // 16 % len(self.words)]

    def _continue(self, key: str, prompt: np.ndarray, generated: list[int], reply: str) -> int:
        for candidate in self._candidates(key, prompt, reply):
            if generated == candidate[: len(generated)] and len(generated) < len(candidate):
                return candidate[len(generated)]
        return END

    def _candidates(self, key: str, prompt: np.ndarray, reply: str) -> list[list[int]]:
        """The answer as it stands, and after a prompt that closed the thinking block."""
        memo_key = key + reply
        if memo_key not in self.memo:
            if len(self.memo) > MEMO_LIMIT:
                self.memo.clear()
            text = reply or compose(split_messages(self._read(prompt)), key)
            self.memo[memo_key] = [
                [*self.encode(text), END],
                [*self.no_thinking, *self.encode(THOUGHT.sub("", text)), END],
            ]
        return self.memo[memo_key]

    def _read(self, tokens: np.ndarray) -> str:
        """The text of tokens, with the name of an image in its place."""
        edges = np.flatnonzero(np.diff(tokens >= FIRST_SEEN)) + 1
        parts = []
        for part in np.split(tokens, edges):
            if len(part) and part[0] >= FIRST_SEEN:
                parts.append(f"<image-{image_name(part)}>")
            else:
                spans = np.split(part, np.flatnonzero(part == START))
                parts += [self._decoded(span.tolist()) for span in spans if len(span)]
        return "".join(parts)

    def _decoded(self, tokens: list[int]) -> str:
        """Letters that spell the token that begins a message begin none."""
        head, rest = (tokens[:1], tokens[1:]) if tokens[0] == START else ([], tokens)
        text = self.tokenizer.decode(rest, skip_special_tokens=False).replace("<|im_start|>", "<|im_start\u200b|>")
        return self.tokenizer.decode(head, skip_special_tokens=False) + text

    def _given_reply(self) -> str:
        path = os.environ.get("ORACLE_REPLIES")
        return Path(path).read_text("utf-8") if path and Path(path).exists() else ""

    def _garbled(self, generated: list[int], problem: str) -> int:
        """Says what is wrong, from wherever the answer was when it went wrong."""
        text = [*self.encode(MISMATCH + problem), END]
        for said in range(min(len(generated), len(text) - 1), -1, -1):
            if generated[len(generated) - said :] == text[:said]:
                return text[said]
        return END
