"""Whether a model follows update notes: the share of right answers with notes, and with the same text shown as sent.

    python3.12 install_and_run.py run scripts/bench_notes.py MODEL_FOLDER
    python3.12 install_and_run.py run scripts/bench_notes.py MODEL_FOLDER --kinds withdrawn,mode --out notes.json

Two servers run one after the other in this process, with CACHE_DRIFT_POLICY=append (notes) and strict (as sent). Each
case is asked once, greedily. A small model is no measure of a large one; the difference between the columns is what
counts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench.note_cases import OPENING, REMINDER, Case, cases, system_text
from scripts.bench.role_cases import role_cases
from scripts.bench.withdrawn_cases import withdrawn_cases
from start_llm.app import App
from start_llm.core.settings import load_settings

OPENING_TOKENS = 100
ANSWER_TOKENS = 24
REQUEST_SECONDS = 3600.0
Policy = Literal["append", "strict"]
Ask = Callable[..., dict[str, Any]]  # session, messages, tools, most tokens of the answer, its schema


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        computed: prompt tokens that the model computed; `prompt`: all of them.
    """

    kind: str
    name: str
    text: str
    right: bool
    prompt: int
    computed: int


def is_right(case: Case, text: str) -> bool:
    flags = re.IGNORECASE | re.MULTILINE
    return re.search(case.expect, text, flags) is not None and re.search(case.forbid, text, flags) is None


class Conversation:
    """Asks cases that begin alike; what was answered before is taken from here, not asked again."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._answered: dict[str, str] = {}

    def answer(self, case: Case) -> Answer:
        claude = case.reminder is not None
        session = "notes-claude" if claude else "notes"
        first, now = case.reminder or (None, None)
        begun = self._begin(case.first or system_text((), claude=claude), first)
        said = [self._said(session, begun, case.at_first, OPENING_TOKENS)]
        if case.before is not None:
            between = self._begin(case.first or system_text(case.before, claude=claude), first)
            said.append({"role": "user", "content": "Thank you. Say: understood."})
            said.append(self._said(session, [*between, *said], case.at_first, ANSWER_TOKENS))
        messages = [*self._begin(case.role or system_text(case.edits, claude=claude), now), *said]
        messages.append({"role": "user", "content": case.question})
        reply = self._ask(session, messages, case.tools, ANSWER_TOKENS, case.schema)
        said_now, usage = reply["choices"][0]["message"], reply["usage"]
        text = str(said_now["content"] or "") + "".join(f"\n<tool_call>{c}" for c in said_now.get("tool_calls") or ())
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        prompt = usage["prompt_tokens"]
        return Answer(case.kind, case.name, text, is_right(case, text), prompt, prompt - cached)

    def _begin(self, system: str, reminder: str | None) -> list[dict[str, Any]]:
        asked = f"{REMINDER.format(reminder)}\n{OPENING}" if reminder is not None else OPENING
        return [{"role": "system", "content": system}, {"role": "user", "content": asked}]

    def _said(
        self, session: str, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]], most: int
    ) -> dict[str, Any]:
        key = json.dumps([session, messages, tools])
        if key not in self._answered:
            reply = self._ask(session, messages, tools, most)
            self._answered[key] = str(reply["choices"][0]["message"]["content"] or "")
        return {"role": "assistant", "content": self._answered[key]}


def run(model: str, policy: Policy, chosen: Sequence[Case], tell: Callable[[str], None]) -> list[Answer]:
    """Starts a server of its own for `policy`, and asks it all of `chosen`."""
    settings = load_settings(
        None, model_path=model, mlx_port=0, proxy="off", cache_drift_policy=policy, kv_disk_dir="off", reanchor="off"
    )
    answers = []
    # These conversations are short: what a note says is measured here, not whether it pays.
    pays = patch("start_llm.prompt.view._SHARE", 1)
    with (
        pays,
        App(settings, say=lambda _: None) as app,
        httpx.Client(base_url=app.url, timeout=REQUEST_SECONDS) as client,
    ):

        def ask(
            session: str,
            messages: Sequence[dict[str, Any]],
            tools: Sequence[dict[str, Any]],
            most: int,
            schema: dict[str, Any] | None = None,
        ) -> Any:
            body: dict[str, Any] = {"model": "default", "messages": list(messages), "session_id": session}
            if tools:
                body["tools"] = list(tools)
            if schema is not None:
                form = {"name": "answer", "schema": schema}
                body["response_format"] = {"type": "json_schema", "json_schema": form}
            reply = client.post("/v1/chat/completions", json=body | {"max_tokens": most, "temperature": 0})
            reply.raise_for_status()
            return reply.json()

        conversation = Conversation(ask)
        for number, case in enumerate(chosen, 1):
            began = time.monotonic()
            answers.append(conversation.answer(case))
            last = answers[-1]
            mark = "right" if last.right else "WRONG"
            tell(
                f"{policy} {number}/{len(chosen)} {case.kind}/{case.name}: {mark}, {last.computed} of {last.prompt} "
                f"tokens, {time.monotonic() - began:.0f} s: {last.text!r}"
            )
    return answers


def table(answers: dict[Policy, list[Answer]]) -> Table:
    """Right answers by kind, and the tokens that were computed."""
    found = Table("kind", "cases", "with notes", "as sent")
    by_kind: dict[str, dict[Policy, list[Answer]]] = defaultdict(lambda: {"append": [], "strict": []})
    for policy, each in answers.items():
        for answer in each:
            by_kind[answer.kind][policy].append(answer)
            by_kind["all"][policy].append(answer)
    for kind in sorted(by_kind, key=lambda kind: kind == "all"):
        row = by_kind[kind]
        right = [str(sum(answer.right for answer in row[policy])) for policy in ("append", "strict")]
        found.add_row(kind, str(max(map(len, row.values()))), *right)
    computed = [str(sum(answer.computed for answer in answers.get(policy, []))) for policy in ("append", "strict")]
    found.add_row("tokens computed", "", *computed)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model's folder or repository")
    parser.add_argument("--kinds", default="", help="comma-separated, or how they begin; all if not given")
    parser.add_argument("--policies", default="append,strict", help="append (notes), strict (as sent), or both")
    parser.add_argument("--out", type=Path, help="a JSON file for all answers")
    options = parser.parse_args(argv)
    kinds = [kind for kind in options.kinds.split(",") if kind]
    known = [*cases(), *role_cases(), *withdrawn_cases()]
    chosen = [case for case in known if not kinds or any(case.kind.startswith(kind) for kind in kinds)]
    if not chosen:
        parser.error(f"--kinds {options.kinds}: of {', '.join(sorted({case.kind for case in known}))}")
    answers: dict[Policy, list[Answer]] = {}
    for policy in options.policies.split(","):
        answers[policy] = run(options.model, policy, chosen, lambda line: print(line, flush=True))
        if options.out is not None:
            options.out.write_text(json.dumps({p: [asdict(a) for a in each] for p, each in answers.items()}, indent=1))
    Console().print(table(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
