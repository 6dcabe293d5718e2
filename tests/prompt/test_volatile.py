# ruff: noqa: E501
"""The table of rules, the user's file, and what the canonical form keeps."""

from __future__ import annotations

import pytest

from start_llm.core.messages import Message, ToolCall
from start_llm.prompt.canonical import FactsMemory, facts_of, is_reply
from start_llm.prompt.volatile import BUILT_IN, KINDS, RuleError, Rules

RULES = Rules.load(None)


def found(text: str, role: str = "user") -> list[tuple[str, str]]:
    return [(field.rule.name, field.text) for field in RULES.find(Message(role, text))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x-anthropic-billing-header: a; cch=1;\nHi", [("billing_header", "x-anthropic-billing-header: a; cch=1;")]),
        ("The current time is: noon", [("current_time", "noon")]),
        ("Today’s date is 1.", [("todays_date", "1.")]),
        ("  Today's date: Sat Nov 21", [("todays_date", "Sat Nov 21")]),
        ("Current date: 1\nx", [("current_date", "1")]),
        ("Runtime: agent=main | x=y", [("runtime_line", "agent=main | x=y")]),
        ("[message_id: 12ab] hello", [("message_id", "12ab")]),
        ('{"message_id": "12ab", "conversation_id": "c-123456"}', [("message_id", "12ab"), ("conversation_id", "c-123456")]),
        ("Stats: runtime 5s (x)", [("subagent_stats", "runtime 5s (x)")]),
        ("a <system-reminder>b\nc</system-reminder> d", [("system_reminder", "<system-reminder>b\nc</system-reminder>")]),
        ("<system-reminder>never closed", []),
        ("What is the runtime of this? Tell me the date.", []),
        ("def current_time(): pass", []),
    ],
)  # fmt: skip
def test_what_the_built_in_rules_find(text, expected):
    assert found(text) == expected


def test_two_reminders_are_two_fields_and_the_text_between_stays():
    text = "<system-reminder>a</system-reminder>\nKEEP\n<system-reminder>b</system-reminder>"
    assert [name for name, _ in found(text)] == ["system_reminder"] * 2
    assert facts_of(Message("user", text), RULES).digest == facts_of(Message("user", "KEEP"), RULES).digest


def test_a_field_inside_another_belongs_to_the_outer_one():
    assert [name for name, _ in found("<system-reminder>Current time is 1</system-reminder>")] == ["system_reminder"]


def test_assistant_turns_have_no_volatile_fields():
    assert found("Current time is 1", "assistant") == []


def test_a_block_that_is_too_long_is_not_one():
    text = "<system-reminder>\n" + "x\n" * 3000 + "</system-reminder>"
    assert found(text) == []


@pytest.mark.parametrize("block", ["A", "A\n\nB", "A\n"])
def test_removed_blocks_leave_no_trace(block):
    plain = facts_of(Message("user", block), RULES)
    for text in (f"<system-reminder>r</system-reminder>\n{block}", f"<system-reminder>r</system-reminder>\n\n{block}"):
        assert facts_of(Message("user", text), RULES).digest == plain.digest
    end = facts_of(Message("user", block.rstrip() + "\n\n<system-reminder>r</system-reminder>\n"), RULES)
    assert end.digest == facts_of(Message("user", block.rstrip()), RULES).digest


def test_white_space_at_the_end_of_what_a_user_says_makes_no_difference():
    assert facts_of(Message("user", "A \n"), RULES).digest == facts_of(Message("user", "A"), RULES).digest
    assert facts_of(Message("tool", "A \n"), RULES).digest != facts_of(Message("tool", "A"), RULES).digest


def test_different_words_never_share_a_canonical_form():
    texts = ["A", " A", "B", "Current time is 1 A\nB", "Current time is 1 A", "", "a\nCurrent time is 1\nb"]
    digests = {facts_of(Message(role, text), RULES).digest for text in texts for role in ("user", "system")}
    assert len(digests) == 2 * len(texts)


def test_arguments_count_as_parsed_and_ids_do_not():
    def turn(arguments: str, call_id: str, content: str = "x") -> bytes:
        return facts_of(Message("assistant", content, None, (ToolCall(call_id, "f", arguments),)), RULES).digest

    assert turn('{"a": 1, "b": [2]}', "1") == turn('{"b":[2],"a":1}', "2", "\nx ")
    assert turn('{"a": 1}', "1") != turn('{"a": 2}', "1")
    assert turn("{broken", "1") == turn(" {broken ", "1") != turn("{broke", "1")


def test_what_counts():
    def facts(role: str, text: str):
        return facts_of(Message(role, text), RULES)

    assert not facts("user", "<system-reminder>x</system-reminder>").counts
    assert facts("tool", "<system-reminder>x</system-reminder>").counts
    internal = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\na\n\nb\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    assert facts("user", internal).transient and not facts("user", internal).counts
    assert not facts("user", internal + "\nand words").transient and facts("user", internal + "\nand words").counts


def test_the_memory_of_facts_is_bounded():
    memory = FactsMemory(RULES, limit_chars=10_000)
    for number in range(100):
        memory.get([Message("user", f"{number} " + "x" * 500)])
    assert len(memory._facts) <= 10


# --- the user's file ----------------------------------------------------------


def write(tmp_path, text: str):
    path = tmp_path / "rules.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_own_rules_come_first_and_replace_by_name(tmp_path):
    path = write(
        tmp_path,
        """
        [[rule]]
        name = "ticket"
        kind = "identity"
        where = ["user"]
        pattern = '^Ticket: (?P<value>\\S+)$'
        marker = "TICKET"
        [[rule]]
        name = "current_time"
        kind = "telemetry"
        pattern = '^Current time.*$'
        """,
    )
    rules = Rules.load(path)
    assert [rule.name for rule in rules.rules[:2]] == ["ticket", "current_time"]
    assert len(rules.rules) == len(BUILT_IN) + 1
    (field,) = rules.find(Message("user", "Hi\nTicket: A-1\nBye"))
    assert (field.text, field.line, field.rule.marker) == ("A-1", "Ticket: A-1", "TICKET")
    assert rules.find(Message("system", "Ticket: A-1")) == ()
    assert facts_of(Message("user", "Current time is 1\nHi"), rules).shown.content == "Hi"


def test_a_block_rule_with_a_tail(tmp_path):
    path = write(
        tmp_path,
        "[[rule]]\nname = 'log'\nkind = 'context'\npattern = '^LOG$'\nend = '^END$'\ntail = '^- .*$'\n",
    )
    (field,) = Rules.load(path).find(Message("tool", "a\nLOG\nx\nEND\n- one\n- two\nb"))
    assert field.text == "LOG\nx\nEND\n- one\n- two"


def test_a_moving_block_runs_to_the_end_or_to_its_own_end(tmp_path):
    path = write(
        tmp_path,
        "[[rule]]\nname = 'notes'\nkind = 'moving'\npattern = '^NOTES$'\nreply = 'Fine\\.'\n"
        "[[rule]]\nname = 'box'\nkind = 'moving'\npattern = '^BOX$'\nend = '^END$'\n",
    )
    rules = Rules.load(path)
    (field,) = rules.find(Message("user", "Hi\n\nNOTES\na\n\nb\n"))
    assert field.text == "NOTES\na\n\nb\n"
    assert [f.text for f in rules.find(Message("user", "BOX\na\nEND\nb"))] == ["BOX\na\nEND"]
    whole, tail = facts_of(Message("user", "NOTES\na"), rules), facts_of(Message("user", "Hi \n\nNOTES\na"), rules)
    assert not whole.counts and tail.digest == facts_of(Message("user", "Hi "), rules).digest
    assert is_reply(Message("assistant", " Fine."), whole)
    assert not is_reply(Message("assistant", "Fine. And more."), whole)
    assert not is_reply(Message("assistant", "Fine."), tail)
    assert not is_reply(Message("user", "Fine."), whole)


@pytest.mark.parametrize(
    ("name", "text", "block"),
    [
        ("qwen_git_snapshot", "A\nGit snapshot at conversation start. Old.\n```text\ngit: x\n```\nB", "git: x\n```"),
        (
            "qwen_startup_context",
            "<system-reminder>\nThis is the Qwen Code. We are setting up the context for our chat.\na/\n</system-reminder>\nB",
            "a/\n</system-reminder>",
        ),
        (
            "qwen_current_date",
            "<system-reminder>\nThe current date is: Monday. Note: This is the authoritative current date.\n"
            "</system-reminder>\nB",
            "date.\n</system-reminder>",
        ),
        ("aider_files", "I have *added these files to the chat* so you can go ahead and edit them.\n\na.py", "a.py"),
        ("aider_read_only_files", "Here are some READ ONLY files, provided for your reference.\nx", "x"),
        ("aider_repo_map", "Here are summaries of some files present in my git repository.\nx", "x"),
        ("aider_outcome", "I committed the changes with git hash 840fad6 & commit msg: fix\n\nmore", "more"),
        ("aider_edit_rules", "Do it.\n\n# *SEARCH/REPLACE block* Rules:\n\nx\ny", "x\ny"),
    ],
)
def test_the_blocks_of_agents(name, text, block):
    ((rule, value),) = found(text)
    assert rule == name and value.endswith(block)


GOOD = {"name": "'r'", "kind": "'clock'", "pattern": "'^a$'"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "'two words'"}, ["name", "two words"]),
        ({"kind": "'weather'"}, ["r)", "weather", *KINDS]),
        ({"where": "['assistant']"}, ["where", "assistant", "system"]),
        ({"where": "[]"}, ["where"]),
        ({"pattern": "'('"}, ["pattern", "("]),
        ({"pattern": "''"}, ["pattern"]),
        ({"pattern": "'a*'"}, ["pattern", "empty line"]),
        ({"pattern": "'(?s)a.b'"}, ["one line"]),
        ({"pattern": "'a\\nb'"}, ["one line"]),
        ({"end": "5"}, ["end", "5"]),
        ({"tail": "'x'"}, ["tail needs end"]),
        ({"marker": "1"}, ["marker"]),
        ({"reply": "'^Ok$'"}, ["reply", "moving"]),
        ({"kind": "'moving'", "reply": "'('"}, ["reply", "("]),
        ({"kind": "'moving'", "marker": "'M'"}, ["marker", "moving"]),
        ({"colour": "'red'"}, ["colour", "allowed"]),
    ],
)
def test_a_bad_rule_is_named(tmp_path, changes, words):
    lines = "\n".join(f"{key} = {value}" for key, value in {**GOOD, **changes}.items())
    path = write(tmp_path, f"[[rule]]\nname = 'fine'\nkind = 'clock'\npattern = '^b$'\n[[rule]]\n{lines}\n")
    with pytest.raises(RuleError) as caught:
        Rules.load(path)
    assert "rule 2" in str(caught.value) and "rules.toml" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_bad_files_are_named(tmp_path):
    with pytest.raises(RuleError, match=r"missing\.toml"):
        Rules.load(tmp_path / "missing.toml")
    with pytest.raises(RuleError, match="cannot be read"):
        Rules.load(write(tmp_path, "not toml at all ["))
    with pytest.raises(RuleError, match=r"only \[\[rule\]\]"):
        Rules.load(write(tmp_path, "[other]\nx = 1"))
    body = "[[rule]]\nname = 'r'\nkind = 'clock'\npattern = '^a$'\n"
    with pytest.raises(RuleError, match="used twice"):
        Rules.load(write(tmp_path, body + body))
