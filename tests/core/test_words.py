"""What is said to people: sizes in one unit, ``~`` in paths, missing packages. And what all requests may hold."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from start_llm.core import extras
from start_llm.core.errors import NotSupported
from start_llm.core.limits import Allowance
from start_llm.core.paths import expanded
from start_llm.core.sizes import as_size
from start_llm.launch.conversation import CommandError, image_part
from start_llm.models.checkpoint import is_path


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (15_784_000_000, "15.8 GB"),
        (4 * 10**13, "40.0 TB"),
        (4 * 10**16, "40000.0 TB"),
    ],
)
def test_a_size_counts_in_thousands(count: int, text: str) -> None:
    assert as_size(count) == text


def test_nobody_prints_a_size_in_another_way() -> None:
    for path in Path("start_llm").rglob("*.py"):
        found = re.findall(r"[^\n]*\} ?(?:[KMG]iB|[kMGT]B)\b[^\n]*", path.read_text("utf-8"))
        assert path.name == "sizes.py" or [line for line in found if "GB/s" not in line] == [], path


def test_a_name_that_nobody_has_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert expanded("~/x") == Path("/home/somebody/x") and expanded(Path("a/~")) == Path("a/~")
    assert expanded("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")


def test_it_is_a_sentence_and_no_traceback() -> None:
    with pytest.raises(CommandError, match="No such file"):
        image_part("~nobody-of-this-name/x.png")
    assert is_path("~nobody-of-this-name/x")


def test_what_is_missing_is_said_with_the_command_that_adds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda library: False)
    for library, extra in extras.EXTRAS.items():
        with pytest.raises(NotSupported) as refused:
            extras.check_installed(library)
        assert refused.value.code == "extra_not_installed" and extra.name in refused.value.message
        words = shlex.split(refused.value.message.split("`")[1])
        assert words[0].endswith("/bin/uv") and sys.executable in words and set(extra.pins) <= set(words)


def test_a_package_that_is_not_there_is_not_installed() -> None:
    assert not extras.is_installed("nothing_of_that_name.sdk") and extras.is_installed("json.tool")


@pytest.mark.live
def test_a_server_imports_no_extra_before_it_is_needed() -> None:
    code = (
        "import sys, importlib.util as util\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name in {set(extras.EXTRAS) | {'openai', 'zmq'}!r}: raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import start_llm.cli.serve, start_llm.cli.demo, start_llm.cli.doctor, start_llm.launch.chat"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_allowance_takes_what_is_larger_than_all_of_it() -> None:
    room = Allowance(10.0)
    assert room.take(25.0)
    assert not room.take(0.5)
    room.give_back(25.0)
    assert room.take(10.0)
