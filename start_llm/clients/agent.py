"""A coding agent: its name, how its requests are known, and what launching it takes. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Declared = dict[str, Any]
"""Rules as plain data: whoever lists the agents need not import what checks them."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the client connects: the server or the proxy.

    Attributes:
        url: without ``/v1``.
        key: sent as bearer token; any text where the server asks for none.
        model: the served name.
        context, answer: most tokens of a request with its answer, and of an answer.
        sees: the model is shown images.
        scale: what the counts that the Anthropic API tells are multiplied by (CONTEXT_SCALE).
        small: the name of Claude's small model, where the server has another model for it (MODEL_MAP); else empty.
    """

    url: str
    key: str
    model: str
    context: int
    answer: int
    sees: bool = False
    scale: float = 1.0
    small: str = ""

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def reads(self) -> list[str]:
        """What the model reads, as several clients call it."""
        return ["text", "image"] if self.sees else ["text"]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to run a client once.

    Attributes:
        env, defaults: variables to set, and those to set where the user has not set them.
        unset: variables to take away: they would lead the client to another server.
        files: files to write (0600), path to text; all inside the client's private folder.
        initial: the same, but of files that the client goes on with itself: written where there is none yet.
        secrets: variables to set to a random text that nobody else knows, and the file (0600) that keeps it.
        arguments: what stands before the user's own arguments.
    """

    env: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    files: dict[Path, str] = field(default_factory=dict)
    initial: dict[Path, str] = field(default_factory=dict)
    secrets: dict[str, Path] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Own:
    """The user's own set-up of an agent, as far as it makes sense beside another server.

    Not in it: accounts and keys of models, the choice of models, sessions, remembered permissions, hooks.

    Attributes:
        folder: where the agent keeps it, from the user's home; empty: nothing is hidden that could be brought.
        variable: that names another place.
        copied: names of files and folders in it.
        fields: what is taken out of settings files, as dotted keys. The name of a file tells whether it is JSON or
            TOML. A hidden one may lie beside the folder, too.
        anyway: what the agent reads of the user's own without being told, in a sentence.
    """

    folder: str = ""
    variable: str = ""
    copied: tuple[str, ...] = ()
    fields: dict[str, tuple[str, ...]] = field(default_factory=dict)
    anyway: str = ""


@dataclass(frozen=True, slots=True)
class AgentClient:
    """A coding agent.

    Attributes:
        name, title: the word after ``launch``, which is its executable too, and its name in text.
        plan: what it needs to talk to an endpoint, given its private folder.
        node: the Node versions it needs, as told by its package; empty where it needs none.
        first_prompt: about how many tokens its first request has.
        own: what ``--my-config`` brings along.
        requests: how its requests are known, and what it changes in text that was answered already: the fields of
            `prompt.clients.ClientRules`, as in CACHE_RULES_FILE. Empty: nothing in them tells.
    """

    name: str
    title: str
    install: str
    plan: Callable[[Endpoint, Path], LaunchPlan]
    node: str = ""
    first_prompt: int = 0
    own: Own = Own()
    requests: Declared = field(default_factory=dict)


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def rule(name: str, kind: str, place: str, opens: str, **more: Any) -> Declared:
    """The fields of a `prompt.clients.Rule`."""
    return {"name": name, "kind": kind, "place": place, "opens": opens, **more}


def reminder(name: str, place: str) -> Declared:
    """A rule for blocks of text that several agents put before or behind what their user says."""
    return rule(name, "state", place, r"<system-reminder>", closes=r"</system-reminder>[ \t]*$")


CLEARED = rule("cleared_result", "cleared", "whole", r"\[Old tool result content cleared\]\s*\Z", role="tool")
"""A rule for what several agents put in the place of an old tool result."""
