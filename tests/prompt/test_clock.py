"""Templates that print the date by themselves: the head stands still, the new date is told."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from start_llm.core.messages import Message
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.match import DATE
from start_llm.prompt.note import NOTE_OPEN
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.turndb import TurnDB
from tests.prompt.client import RULES, Client, pipeline, request, say, settings
from tests.prompt.models import EOS, TEMPLATES, fast_tokenizer, model

LATE, EARLY = datetime(2026, 11, 21, 23, 58), datetime(2026, 11, 22, 0, 3)
DATED = {
    "llama3": TEMPLATES["llama3"].replace(
        "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}",
        "{%- if date_string is not defined %}{%- if strftime_now is defined %}"
        "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
        "{%- endif %}{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
        "Today Date: ' + date_string + '\n\n' }}",
    ),
    "harmony": "{%- macro build() %}{{- 'You are ChatGPT.\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\n' }}"
    "{%- endmacro %}"
    + TEMPLATES["harmony"].replace("<|message|>Reasoning:", "<|message|>' }}{{- build() }}{{- 'Reasoning:"),
}
DATES = {"llama3": ("21 Nov 2026", "22 Nov 2026"), "harmony": ("2026-11-21", "2026-11-22")}


def dated(family: str, wall: SimpleNamespace, store: TurnDB | None = None, **changes: str) -> Pipeline:
    tokenizer = fast_tokenizer()
    eos = [tokenizer.convert_tokens_to_ids(name) for name in EOS[family]]
    parts = HFTemplate(tokenizer, DATED[family]), HFTokenizer(tokenizer, eos)
    return Pipeline(*parts, settings=settings(**changes), store=store, now=lambda: wall.time)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("family", DATED)
def test_a_conversation_over_midnight_keeps_its_head_and_is_told_the_date_once(family, restarted, tmp_path: Path):
    wall, path = SimpleNamespace(time=LATE), tmp_path / "turns.sqlite3"
    client = Client(family, dated(family, wall, TurnDB(path)))
    before, after = DATES[family]
    client.ask(Message("system", f"You help.\n{RULES}"), Message("user", "Go"))
    assert before in client.text
    spoken = client.answer(say("", None, bash={"command": "ls"}))
    if restarted:
        client.pipe.close()
        client.pipe = dated(family, wall, TurnDB(path))
    wall.time = EARLY
    prepared = client.ask(Message("tool", "a listing", tool_call_id="call_bash"))
    assert prepared.prompt.tokens[: len(spoken)] == spoken
    assert prepared.notes == (f"Current date: {after}",)
    assert after in client.text[client.text.index(NOTE_OPEN) :]
    spoken = client.answer(say("", None, bash={"command": "pwd"}))
    prepared = client.ask(Message("tool", "/home", tool_call_id="call_bash"))
    assert prepared.prompt.tokens[: len(spoken)] == spoken and prepared.notes == ()
    assert client.text.count(after) == 1
    client.pipe.close()


def test_a_new_conversation_on_the_next_day_gets_the_new_date():
    wall = SimpleNamespace(time=LATE)
    pipe = dated("llama3", wall)
    old = Client("llama3", pipe)
    old.ask(Message("system", "You help."), Message("user", "Go"))
    old.answer(say("Done.", None))
    wall.time = EARLY
    new = Client("llama3", pipe)
    assert new.ask(Message("system", "You help."), Message("user", "Else")).notes == ()
    assert "Today Date: 22 Nov 2026" in new.text


def test_strict_leaves_the_template_its_own_clock():
    wall = SimpleNamespace(time=LATE)
    client = Client("llama3", dated("llama3", wall, cache_drift_policy="strict"))
    client.ask(Message("user", "Go"))
    assert f"Today Date: {datetime.now():%d %b %Y}" in client.text


def test_a_client_that_sets_the_date_itself_is_told_nothing():
    wall = SimpleNamespace(time=LATE)
    pipe = dated("llama3", wall)
    asked = request([Message("user", "Go")], template_kwargs={"date_string": "1 Jan 1970"})
    prepared = pipe.prepare(asked, thinking=True)
    pipe.record(prepared, say("Hi.", None), [1, 2])
    wall.time = EARLY
    assert pipe.prepare(asked, thinking=True).notes == ()
    assert "Today Date: 1 Jan 1970" in model("llama3")[1].decode(prepared.prompt.tokens)


@pytest.mark.parametrize("family", TEMPLATES)
def test_templates_without_a_date_get_no_clock(family):
    wall = SimpleNamespace(time=LATE)
    pipe = pipeline(family, now=lambda: wall.time)
    assert pipe.traits.dates == ()
    client = Client(family, pipe, tools=())
    client.ask(Message("user", "Go"))
    client.answer(say("Done.", None))
    wall.time = EARLY
    prepared = client.ask(Message("user", "More"))
    assert prepared.notes == () and DATE not in dict(prepared.view.told)


@pytest.mark.parametrize("family", DATED)
def test_the_probe_finds_the_format_and_its_fingerprint_is_the_same_tomorrow(family, monkeypatch):
    form = {"llama3": "%d %b %Y", "harmony": "%Y-%m-%d"}[family]
    pipe = dated(family, SimpleNamespace(time=LATE))
    assert pipe.traits.dates == (form,)

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2031, 1, 1)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    other = HFTemplate(fast_tokenizer(), DATED[family] + "{# another text, so compiled anew #}")
    assert ("2031" in other.render([{"role": "user", "content": "x"}], None, True)) is True
    same = HFTemplate(fast_tokenizer(), DATED[family])
    found = [Pipeline(each, HFTokenizer(fast_tokenizer(), [1]), settings=settings()) for each in (other, same)]
    assert found[0].traits.fingerprint == found[1].traits.fingerprint
