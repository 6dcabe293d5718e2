from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from start_llm.cli.reading import read
from start_llm.cli.running import called
from start_llm.clients.agent import Endpoint
from start_llm.core.settings import load_settings
from start_llm.host.ports import free_port
from start_llm.launch import chat
from start_llm.launch.conversation import COMMANDS, MarkdownPrinter
from tests.web import Handler, running

CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"delta": {"reasoning_content": "hm"}}]},
    {"choices": [{"delta": {"content": "Hel"}}]},
    {"choices": [{"delta": {"content": "lo"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 3}},
]


@contextmanager
def answering(chunks: list[Any], status: int = 200) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """A server that always answers the same; its port, and what it was asked."""
    asked: list[dict[str, Any]] = []

    class Stub(Handler):
        def do_GET(self) -> None:
            if status == 401 and self.path != "/health":
                self.answer(401, {"error": {"message": "no key"}})
                return
            card = {"id": "served", "context_length": 4096}
            self.answer(200, {"state": "ready", "data": [card, {**card, "id": "second"}]})

        def do_POST(self) -> None:
            asked.append(self.asked())
            if status != 200:
                self.answer(status, {"error": {"message": "no room"}})
                return
            texts = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks]
            lines = [f"data: {text}\n\n" for text in texts]
            self.answer(200, "".join([": ping\n\n", *lines, "data: [DONE]\n\n"]).encode())

    with running(Stub) as port:
        yield port, asked


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def runs(port: int, *words: str, stdin: io.StringIO | None = None) -> int:
        monkeypatch.setattr(sys, "stdin", stdin or io.StringIO())
        settings = load_settings(None, start_llm_cache_dir=tmp_path, mlx_port=port)
        return called(chat.main, read(["chat", *words]), settings)

    return runs


def test_a_pipe_gets_the_text_alone(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(CHUNKS) as (port, asked):
        assert run(port, "review", "this", stdin=io.StringIO("a diff\n")) == 0
        assert capsys.readouterr().out == "Hello\n"
        assert asked[0]["messages"] == [{"role": "user", "content": "review this\n\na diff"}]
        assert asked[0]["model"] == "served"
        assert run(port) == 2 and len(asked) == 1, "nothing was asked"


def test_a_flag_names_the_model_that_is_asked(run: Any) -> None:
    with answering(CHUNKS) as (port, asked):
        assert run(port, "--model", "second", "hi") == 0
        assert run(port, "--model", "owner/third", "hi") == 1
    assert [body["model"] for body in asked] == ["second"]


def test_json_is_all_of_it(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(CHUNKS) as (port, _):
        assert run(port, "--json", "hi") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"text": "Hello", "reasoning": "hm", "finish": "stop", "usage": {"prompt_tokens": 3}}


SPOKEN = "a\x1b]52;c;aGk=\x07b\x9b2Jc\t\u200dd\n"


def test_no_escape_sequence_reaches_the_terminal(
    run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OSC 52 writes into the clipboard."""
    delta = {"reasoning_content": SPOKEN, "content": SPOKEN}
    said = [{"choices": [{"delta": delta, "finish_reason": "stop"}]}]
    with answering(said) as (port, _):
        assert run(port, "hi") == 0 and capsys.readouterr().out == "a]52;c;aGk=b2Jc\t\u200dd\n\n"
        assert run(port, "--json", "hi") == 0
        told = capsys.readouterr().out
        assert json.loads(told)["text"] == SPOKEN and not set(told) & set("\x1b\x9b\x07")
        types(monkeypatch, "hi", f"/model {SPOKEN}", "/exit")
        assert run(port, stdin=Terminal()) == 0
        told = capsys.readouterr().out
        assert told.count("]52;c;aGk=") >= 3 and not set(told) & set("\x1b\x9b\x07")
        linked = {"content": "see <http://x/%1b]52;c;aGk=%1b%5c%c2%9b2J>, &#27; and [a](http://x/%1b)\n\nEnd."}
    with answering([{"choices": [{"delta": linked}]}]) as (port, _):
        types(monkeypatch, "hi")
        assert run(port, stdin=Terminal()) == 0
        told = capsys.readouterr().out
        assert "see http://x/]52;c;aGk=" in told and not set(told) & set("\x1b\x9b\x07")
    with answering([{"error": {"message": SPOKEN}}]) as (port, _):
        assert run(port, "hi") == 1 and not set(capsys.readouterr().err) & set("\x1b\x9b\x07")


NO_CHAT = "chat: http://127.0.0.1:{port} streams what is no chat completion"


@pytest.mark.parametrize(
    ("chunks", "status", "says"),
    [
        ([], 507, "no room"),
        ([], 401, "The server at http://127.0.0.1:{port} needs its API key: set API_KEY"),
        ([{"error": {"message": "the model died"}}], 200, "the model died"),
        ([["no object"]], 200, NO_CHAT),
        ([{"choices": [{"delta": "Hel"}]}], 200, NO_CHAT),
        (["not JSON"], 200, NO_CHAT),
    ],
)
def test_what_goes_wrong_is_told_in_a_sentence(
    run: Any, capsys: pytest.CaptureFixture[str], chunks: list[Any], status: int, says: str
) -> None:
    with answering(chunks, status) as (port, _):
        assert run(port, "hi") == 1
    assert says.format(port=port) in capsys.readouterr().err


def test_a_server_that_was_stopped_meanwhile_is_told_in_words() -> None:
    stopped = Endpoint(f"http://127.0.0.1:{free_port()}", "none", "served", 4096, 256)
    words = r"^no server answers at http://[\d.:]+ any more; start it again: .* start$"
    with pytest.raises(chat.ChatError, match=words):
        list(chat.ask(stopped, [{"role": "user", "content": "hi"}], chat.Answer()))


def types(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Somebody types these lines, and then ends the input."""
    typed = iter(lines)

    def typing(prompt: str) -> str:
        if (line := next(typed, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typing)


def test_a_conversation_sends_what_was_said(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    types(monkeypatch, "one", "", "two")
    with answering(CHUNKS) as (port, asked):
        assert run(port, stdin=Terminal()) == 0
    assert [message["content"] for message in asked[1]["messages"]] == ["one", "Hello", "two"]
    assert capsys.readouterr().out.count("Hello") == 2


def test_commands_of_a_conversation(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    typed = f"/help|/system Be brief.|/image {tmp_path}/a.png|see|/image /none.png|/image a.txt|/image it's.png"
    typed += f"|/nothing|/model nobody|/model second|again|/save {tmp_path}/talk.json|/clear|anew|/exit|never"
    types(monkeypatch, *typed.split("|"))
    with answering(CHUNKS) as (port, asked):
        assert run(port, stdin=Terminal()) == 0
    first, second, third = (body["messages"] for body in asked)
    assert first[0] == {"role": "system", "content": "Be brief."}
    image, text = first[1]["content"]
    assert image["image_url"]["url"] == "data:image/png;base64,cG5n" and text["text"] == "see"
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert [message["content"] for message in third] == ["Be brief.", "anew"]
    assert [body["model"] for body in asked] == ["served", "second", "second"]
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["model"] == "second" and len(saved["messages"]) == 5
    said = capsys.readouterr().out
    told = ("cannot be read", "not named like", "No closing quotation", "no command /nothing", "nobody")
    assert all(word in said for word in (*COMMANDS, *told))


def test_an_image_goes_with_one_question(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    with answering(CHUNKS) as (port, asked):
        assert run(port, "--image", str(tmp_path / "a.png"), "What", "is", "this?") == 0
        assert run(port, "--image", "/none.png", "hi") == 2
    assert len(asked) == 1 and asked[0]["messages"][0]["content"][1]["text"] == "What is this?"
    assert "--image" in capsys.readouterr().err


def test_markdown_is_printed_by_blocks_and_code_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    printer, text = MarkdownPrinter(Console(width=60)), "A **word**.\n\n```python\na = 1\n\nb = 2\n```\n\nThe end."
    blocks = []
    for sign in text:
        printer.add(sign)
        blocks += [said] if (said := capsys.readouterr().out).strip() else []
    printer.end()
    blocks.append(capsys.readouterr().out)
    assert [block.split()[0] for block in blocks] == ["A", "a", "The"] and "**" not in "".join(blocks)
    assert "b = 2" in blocks[1]


def printed(text: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    printer = MarkdownPrinter(Console(width=60))
    for sign in text:
        printer.add(sign)
    printer.end()
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_paragraphs_are_apart_as_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed("One.\n\n```not``` a block\n\n\nThree.", capsys) == ["One.", "", "not a block", "", "Three."]


def test_code_in_code_and_code_in_a_list_stay_where_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    nested = printed("````md\n```py\na = 1\n\nb = 2\n```\n````\n\nThe end.", capsys)
    assert nested[1:-2] == [" ```py", " a = 1", "", " b = 2", " ```", ""] and nested[-1] == "The end."
    listed = printed("1.  Step:\n\n    ```sh\n    ls\n    ```\n\n2.  Next", capsys)
    assert "    ls" in listed and " 2 Next" in listed and "`" not in "".join(listed)


@pytest.mark.parametrize("width", [1, 20])
def test_a_narrow_terminal_breaks_no_answer(capsys: pytest.CaptureFixture[str], width: int) -> None:
    printer = MarkdownPrinter(Console(width=width))
    printer.add("# A\n\n| a | b |\n|-|-|\n| c | d |\n\n" + "> " * 30 + "1. - x\n\n```\n" + "y" * 99)
    printer.end()


def test_reasoning_has_a_line_of_its_own_however_the_answer_ends(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = (("reasoning_content", "hm"), ("content", "One"), ("reasoning_content", ":x:"))
    said = [{"choices": [{"delta": {name: text}}]} for name, text in pieces]
    types(monkeypatch, "hi")
    with answering([*said, {"error": {"message": "it broke"}}]) as (port, _):
        assert run(port, stdin=Terminal()) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:5] == ["hm", "One", ":x:", "it broke"]
