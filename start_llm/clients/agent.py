"""A coding agent: its name, how its requests are known, and what launching it takes. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Declared = dict[str, Any]
"""Rules as plain data: whoever lists the agents need not import what checks them."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the client connects: the server or the proxy."""

    url: str  # without ``/v1``
    key: str  # sent as bearer token; any text where the server asks for none
    model: str  # the served name
    context: int  # most tokens of a request with its answer
    answer: int  # most tokens of an answer
    sees: bool = False  # the model is shown images
    scale: float = 1.0  # what the counts that the Anthropic API tells are multiplied by (CONTEXT_SCALE)
    small: str = ""  # the name of Claude's small model, where the server has another model for it (MODEL_MAP)

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def reads(self) -> list[str]:
        """What the model reads, as several clients call it."""
        return ["text", "image"] if self.sees else ["text"]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How to run a client once. All files lie in the client's private folder and are their owner's only (0600)."""

    env: dict[str, str] = field(default_factory=dict)  # variables to set
    defaults: dict[str, str] = field(default_factory=dict)  # variables to set where the user has not set them
    unset: tuple[str, ...] = ()  # variables to take away: they would lead the client to another server
    files: dict[Path, str] = field(default_factory=dict)  # path to text
    initial: dict[Path, str] = field(default_factory=dict)  # written where there is none yet: the client changes them
    secrets: dict[str, Path] = field(default_factory=dict)  # variables with a random text, and the file that keeps it
    arguments: tuple[str, ...] = ()  # what stands before the user's own arguments


@dataclass(frozen=True, slots=True)
class UserConfig:
    """The user's own set-up of an agent, as far as it makes sense beside another server.

    Not in it: accounts and keys of models, the choice of models, sessions, remembered permissions, hooks.
    """

    folder: str = ""  # where the agent keeps it, from the user's home; empty: nothing is hidden that could be brought
    variable: str = ""  # that names another place
    copied: tuple[str, ...] = ()  # names of files and folders in it
    # What is taken out of settings files, as dotted keys. The name of a file tells whether it is JSON or TOML. A hidden
    # one may lie beside the folder, too.
    fields: dict[str, tuple[str, ...]] = field(default_factory=dict)
    always_read: str = ""  # what the agent reads of the user's own without being told, in a sentence


@dataclass(frozen=True, slots=True)
class AgentClient:
    """A coding agent."""

    name: str  # the word after ``launch``, which is its executable too
    title: str  # its name in text
    install: str  # the command that installs it
    plan: Callable[[Endpoint, Path], LaunchPlan]  # what it needs to talk to an endpoint, given its private folder
    node: str = ""  # the Node versions it needs, as told by its package; empty where it needs none
    first_prompt: int = 0  # about how many tokens its first request has
    user_config: UserConfig = UserConfig()  # what ``--my-config`` brings along
    # How its requests are known, and what it changes in text that was answered already: the fields of
    # `prompt.clients.ClientRules`, as in CACHE_RULES_FILE. Empty: nothing in them tells.
    requests: Declared = field(default_factory=dict)


def to_json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def rule(name: str, kind: str, place: str, opens: str, **more: Any) -> Declared:
    """The fields of a `prompt.clients.Rule`."""
    return {"name": name, "kind": kind, "place": place, "opens": opens, **more}


def reminder(name: str, place: str) -> Declared:
    """A rule for blocks of text that several agents put before or behind what their user says."""
    return rule(name, "state", place, r"<system-reminder>", closes=r"</system-reminder>")


CLEARED_RESULT = "[Old tool result content cleared]"
"""What several agents, and this server where an agent asks it to, put in the place of an old tool result."""

CLEARED = rule("cleared_result", "cleared", "whole", re.escape(CLEARED_RESULT) + r"\s*\Z", role="tool")
