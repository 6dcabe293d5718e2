from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from start_llm.core.errors import Explained
from start_llm.core.settings import Settings, load_settings
from start_llm.host.processes import created
from start_llm.models.servers import running_ports
from start_llm.service.place import Exit, Place, ServerState, end_when_unused, port_of_one

HOLD = """
import sys; from pathlib import Path; from start_llm.core.settings import load_settings
from start_llm.service.place import Place
with Place(load_settings(None, start_llm_cache_dir=Path(sys.argv[1])), 7).used():
    print("used", flush=True); sys.stdin.read()
"""


def settings(folder: Path) -> Settings:
    return load_settings(None, start_llm_cache_dir=folder, mlx_port=7)


def test_a_state_is_read_as_it_was_written_and_is_its_owners_only(tmp_path: Path) -> None:
    place = Place(settings(tmp_path))
    assert place.read() is None and not place.is_running
    state = ServerState(1, 2.0, flags={"mlx_port": "7"}, last_exit=Exit(70, 3.0, "words"))
    place.write(state)
    assert place.read() == state
    (path,) = (tmp_path / "run").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    for text in ("", "[]", '{"pid": 7}', "nonsense"):
        path.write_text(text)
        assert place.read() is None
    place.forget()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_state_of_a_newer_version_is_read(tmp_path: Path) -> None:
    place = Place(settings(tmp_path))
    place.write(ServerState(1, 2.0))
    path = tmp_path / "run" / "server-7.json"
    path.write_text(path.read_text().replace("{", '{"invented": 1,', 1))
    assert place.read() is not None


def test_only_locked_ports_run(tmp_path: Path) -> None:
    place = Place(settings(tmp_path))
    assert running_ports(settings(tmp_path)) == []
    assert place.lock.take()
    (tmp_path / "run" / "server-9.lock").touch()
    assert running_ports(settings(tmp_path)) == [7]
    place.lock.drop()


def test_of_several_servers_none_is_guessed(tmp_path: Path) -> None:
    ours = settings(tmp_path)
    places = [Place(ours, port) for port in (8, 9)]
    with contextlib.ExitStack() as stack:
        for place in places:
            assert place.lock.take()
            stack.callback(place.lock.drop)
            if place.port == 8:
                assert port_of_one(ours, {}, must_be_one=True) == 8
        with pytest.raises(Explained, match="ports 8, 9: name one, as in --port 8"):
            port_of_one(ours, {}, must_be_one=True)
        assert port_of_one(ours, {}, must_be_one=False) == ours.mlx_port
        assert port_of_one(ours, {"mlx_port": "7"}, must_be_one=True) == ours.mlx_port


@pytest.mark.live
def test_users_are_counted_until_they_end_however_they_end(tmp_path: Path) -> None:
    place = Place(settings(tmp_path))
    assert place.users() == 0
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"used\n"
    with place.used():
        assert place.users() == 2
    assert place.users() == 1
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert place.users() == 0 and list((tmp_path / "run" / "users-7").iterdir()) == []


def ends_at(place: Place, events: dict[float, Callable[[], object]], patch: pytest.MonkeyPatch) -> float:
    """When an unused server ends by a clock of its own; `events`: what happens when. At "ask" a request comes."""
    now, asked = [0.0], [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        for at in [at for at in events if at <= now[0]]:
            if events.pop(at)() == "ask":
                asked[0] = now[0]

    patch.setattr("start_llm.service.place.time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    ended: list[float] = []
    end_when_unused(lambda: now[0] - asked[0], place, 100.0, lambda: ended.append(now[0]), 1.0)
    return ended[0]


def test_an_unused_server_ends_and_a_busy_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(settings(tmp_path))
    assert ends_at(place, {}, monkeypatch) == 100.0
    assert ends_at(place, {60.0: lambda: "ask", 150.0: lambda: "ask"}, monkeypatch) == 250.0


def test_a_server_that_is_used_or_kept_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(settings(tmp_path))
    using = place.used()
    using.__enter__()
    leave = partial(using.__exit__, None, None, None)
    events = {300.0: place.keep, 400.0: leave, 700.0: place.forget_keep}
    assert ends_at(place, events, monkeypatch) == 799.0, "its time counts from the last look that saw it kept"


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "other user"])
def test_a_state_that_is_not_a_file_of_ones_own_says_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the process that `stop` ends."""
    place = Place(settings(tmp_path))
    place.write(ServerState(os.getpid(), created(os.getpid())))
    assert place.read() is not None
    (path,) = place.folder.glob("*.json")
    if what == "other user":
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    else:
        path.rename(tmp_path / "elsewhere")
        make = {"link": lambda: path.symlink_to(tmp_path / "elsewhere"), "pipe": lambda: os.mkfifo(path)}
        make.get(what, path.mkdir)()
    assert place.read() is None


def test_keeping_a_server_follows_no_link(tmp_path: Path) -> None:
    place = Place(settings(tmp_path))
    place.folder.mkdir(parents=True)
    (place.folder / f"server-{place.port}.keep").symlink_to(tmp_path / "elsewhere")
    place.keep()
    assert not (tmp_path / "elsewhere").exists()
