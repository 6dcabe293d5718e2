"""Thoughts are shown to whom they were told, and under `strict` nothing is shown but what the client sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.asking import (
    CALL,
    CLAUDE,
    DIALECTS,
    KINDS,
    Asker,
    Json,
    Rendering,
    Servers,
    cues,
    result,
    said,
    system,
    user,
)
from tests.integration.live import TOOLS, Live, live
from tests.oracle import script
from tests.unique import unique

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def strict(oracle_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(oracle_path("plain"), tmp_path_factory.mktemp("strict"), cache_drift_policy="strict") as server:
        yield server


def served(server: Live, salt: str, dialect: str, who: str | None) -> tuple[list[Json], str]:
    """A conversation whose model thinks of a secret and says OK; its messages without that."""
    secret = f"secret-{unique()[:8]}"
    text = script(f"<think>\nThe {secret} must not be told.\n</think>\n\nOK, {salt}.")
    messages = [system(f"This is {salt}."), user(f"{text} hello")]
    heard = Asker(server, dialect, who).ask(messages)
    assert heard.text == f"OK, {salt}." and secret in heard.message["reasoning_content"]
    return [*messages, heard.stripped], secret


@pytest.mark.parametrize("kind", [*KINDS, "strict"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_client_that_was_never_served_gets_no_thoughts(
    servers: Servers, strict: Live, kind: str, dialect: str
) -> None:
    server = strict if kind == "strict" else servers(kind)
    salt = unique()
    _, secret = served(server, salt, dialect, None)
    messages = [system(f"This is {salt}."), user("hello"), said(f"OK, {salt}."), user("And?" + cues(secret))]
    heard = Asker(server, dialect).ask(messages)
    assert heard.found() == [(0, -1)], heard.prompt
    assert heard.prompt == Rendering().text(messages)


@pytest.mark.parametrize("kind", [*KINDS, "strict"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_nor_does_another_user_with_the_same_history(servers: Servers, strict: Live, kind: str, dialect: str) -> None:
    server = strict if kind == "strict" else servers(kind)
    salt = unique()
    history, secret = served(server, salt, dialect, f"{salt}-1")
    messages = [*history, user("And?" + cues(secret))]
    heard = Asker(server, dialect, f"{salt}-2").ask(messages)
    assert heard.found() == [(0, -1)], heard.prompt


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_two_conversations_with_the_same_words_keep_their_own_thoughts(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, dialect: str
) -> None:
    """Their clients leave out what was thought: nobody can tell whose it was, so nobody is shown it."""
    client, messages = Asker(servers(kind), dialect), [system(f"This is {unique()}."), user("hello")]
    secrets = [f"secret-{unique()[:8]}" for _ in range(2)]
    monkeypatch.setenv("ORACLE_REPLIES", str(tmp_path / "reply"))
    for secret in secrets:
        (tmp_path / "reply").write_text(f"<think>\nThe {secret} must not be told.\n</think>\n\nOK.")
        heard = client.ask(messages)
        assert heard.text == "OK." and secret in heard.message["reasoning_content"]
    monkeypatch.delenv("ORACLE_REPLIES")
    heard = client.ask([*messages, said("OK."), user("And?" + cues(*secrets))])
    assert heard.found() == [(0, -1), (0, -1)], heard.prompt


# --- strict ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_strict_is_the_template_applied_to_the_clients_messages(strict: Live, dialect: str) -> None:
    client = Asker(strict, dialect)
    head = system(f"x-anthropic-billing-header: cch=12ab3;\n{CLAUDE}\nThis is {unique()}.\nCurrent time: 08:20")
    raw = f"<think>\nI must read it\n</think>\n\n{CALL}"
    messages = [head, user(f"Go. {script(raw, 'Done.')}")]
    heard = client.ask(messages, TOOLS)
    call = heard.call
    # The client leaves the reasoning out, and writes the arguments down in another order.
    call["function"] = {**call["function"], "arguments": json.dumps({"line": 1, "path": "a.py"})}
    messages = [*messages, said("", call), result(call, "a = 1")]
    for clock in ("08:20", "08:21"):
        messages[0] = system(head["content"].replace("08:20", clock))
        heard = client.ask(messages, list(reversed(TOOLS)))
        assert heard.prompt in Rendering().texts(messages, list(reversed(TOOLS)))
