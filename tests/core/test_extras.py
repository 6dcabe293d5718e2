from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from start_llm.core import extras
from start_llm.core.errors import NotSupported


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
