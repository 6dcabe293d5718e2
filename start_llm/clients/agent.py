"""A coding agent: its name, how its requests are known, and what launching it takes. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

CLEARED_RESULT = "[Old tool result content cleared]"
"""What several agents, and this server where an agent asks it to, put in the place of an old tool result."""
CLEARED = {
    "name": "cleared_result",
    "kind": "cleared",
    "place": "whole",
    "role": "tool",
    "opens": re.escape(CLEARED_RESULT) + r"\s*\Z",
}
_REMINDER = {"kind": "state", "opens": r"<system-reminder>", "closes": r"</system-reminder>"}
SHARED_RULES: Mapping[str, Mapping[str, str]] = {
    "cleared_result": CLEARED,
    # blocks of text that several agents put before or behind what their user says
    "reminder_before": {"name": "reminder_before", "place": "start", **_REMINDER},
    "reminder_behind": {"name": "reminder_behind", "place": "end", **_REMINDER},
}
"""Rules that several agents need, by name."""
_SMALL_QUARTER = 16_384
_MOST_OUTPUT = 10_000
_VALUE = re.compile(r"<(\w+)>")


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

    def values(self, folder: Path) -> dict[str, Any]:
        """What ``<name>`` stands for in an agent's file. Lengths in tokens; ``None``: what it stands in goes."""
        return {
            "folder": str(folder),  # the client's private one
            "url": self.url,
            "v1": self.v1,
            "key": self.key,
            "model": self.model,
            "small": self.small or self.model,
            "only_model": None if self.small else self.model,
            "sees": self.sees,
            "image": "image" if self.sees else None,
            "answer": self.answer,
            "context": self.context,
            "told_context": round(self.context * self.scale),
            "half": self.context // 2,
            "quarter": self.context // 4,
            "is_small": self.context // 4 < _SMALL_QUARTER,
            "most_output": min(_MOST_OUTPUT, self.context // 10),
            "session": str(uuid4()),  # another one at each launch
        }


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
    copied: Sequence[str] = ()  # names of files and folders in it
    # What is taken out of settings files, as dotted keys. The name of a file tells whether it is JSON or TOML. A hidden
    # one may lie beside the folder, too.
    fields: Mapping[str, Sequence[str]] = field(default_factory=dict)
    always_read: str = ""  # what the agent reads of the user's own without being told, in a sentence


@dataclass(frozen=True, slots=True)
class AgentClient:
    """A coding agent, as its file describes it.

    In all texts from `env` to `arguments`, ``<name>`` stands for one of `Endpoint.values`; alone in a text it keeps its
    type. A table with the key ``if`` counts only where that value is true.
    """

    name: str  # the word after ``launch``, which is its executable too
    title: str  # its name in text
    install: str  # the command that installs it
    node: str = ""  # the Node versions it needs, as told by its package; empty where it needs none
    first_prompt: int = 0  # about how many tokens its first request has
    env: Mapping[str, str] = field(default_factory=dict)  # these seven: see `LaunchPlan`; paths in the private folder
    defaults: Mapping[str, str] = field(default_factory=dict)
    unset: Sequence[str] = ()
    files: Mapping[str, Any] = field(default_factory=dict)  # what stands in each, which is written as JSON
    initial: Mapping[str, Any] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # more arguments: ``-c name=JSON``
    user_config: UserConfig = UserConfig()  # what ``--my-config`` brings along
    # How its requests are known, and what it changes in text that was answered already: the fields of
    # `prompt.clients.ClientRules`, as in CACHE_RULES_FILE. Empty: nothing in them tells.
    requests: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, endpoint: Endpoint, folder: Path) -> LaunchPlan:
        """What it needs to talk to `endpoint`, given its private `folder`."""
        values = endpoint.values(folder)
        env, defaults = _filled(self.env, values), _filled(self.defaults, values)
        options = _filled(self.options, values).items()
        return LaunchPlan(
            env={name: str(value) for name, value in env.items()},
            defaults={name: str(value) for name, value in defaults.items()},
            unset=tuple(self.unset),
            files=_texts(self.files, values, folder),
            initial=_texts(self.initial, values, folder),
            secrets={name: folder / path for name, path in self.secrets.items()},
            arguments=(
                *_filled(self.arguments, values),
                # JSON strings, numbers and booleans are TOML values too.
                *(part for name, value in options for part in ("-c", f"{name}={json.dumps(value)}")),
            ),
        )


def described(name: str, file: dict[str, Any]) -> AgentClient:
    """The agent of a file; ``requests.shared`` names rules of `SHARED_RULES` that follow its own."""
    requests = file.pop("requests", {})
    shared = [SHARED_RULES[rule] for rule in requests.pop("shared", ())]
    if shared or "rules" in requests:
        requests["rules"] = (*requests.get("rules", ()), *shared)
    return AgentClient(name, **file | {"user_config": UserConfig(**file.get("user_config", {})), "requests": requests})


def _texts(files: Mapping[str, Any], values: Mapping[str, Any], folder: Path) -> dict[Path, str]:
    """A file that nothing is left of is not written."""
    contents = {folder / name: _filled(content, values) for name, content in files.items()}
    return {path: json.dumps(content, indent=2) + "\n" for path, content in contents.items() if content}


def _filled(shape: Any, values: Mapping[str, Any]) -> Any:
    """`shape` with its values; ``None``: it is left out."""
    if isinstance(shape, str):
        names = _VALUE.findall(shape)
        if any(values[name] is None for name in names):
            return None
        return values[names[0]] if _VALUE.fullmatch(shape) else _VALUE.sub(lambda name: str(values[name[1]]), shape)
    if isinstance(shape, list):
        return [part for part in (_filled(each, values) for each in shape) if part is not None]
    if not isinstance(shape, Mapping):
        return shape
    if not _filled(shape.get("if", True), values):
        return None
    parts = {_filled(name, values): _filled(part, values) for name, part in shape.items() if name != "if"}
    return {name: part for name, part in parts.items() if part is not None}
