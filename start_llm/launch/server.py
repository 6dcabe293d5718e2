"""The server behind a launched client: joined if it runs, started if not, and left to those who still use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from start_llm.core.settings import Settings
from start_llm.host.home import home
from start_llm.host.ports import free_port
from start_llm.service.control import Say, ServiceError, bring_up
from start_llm.service.place import Place


class LaunchError(RuntimeError):
    """The client cannot be launched. The message says why and what to do."""


def from_root(path: Path) -> Path:
    """A path of the settings as the server takes it: it runs in `home`, the agent in the user's repository."""
    return home() / path.expanduser()


@contextmanager
def running_server(
    settings: Settings, flags: dict[str, str], *, proxy: bool, seconds: float, say: Say
) -> Iterator[tuple[str, int]]:
    """(server's url, proxy's port): a running server, or one that is started in the background.

    While the block runs this process counts as a user of the server. One that was started here ends some time after
    its last user (LAUNCH_IDLE_MINUTES).

    Args:
        flags: settings that were given as flags.
        proxy: the server must have its proxy.
        seconds: how long a started server may take, model download included.
        say: is told what goes on until it answers.

    Raises:
        LaunchError: it does not come up, or something else listens there.
    """
    place = Place(settings, settings.mlx_port or free_port())
    if not place.is_running:
        place.forget_keep()  # of a server that was killed: nobody has started the next one by name
    with place.used():
        try:
            bring_up(_unattended(settings, proxy), place, flags, say, seconds)
        except ServiceError as error:
            raise LaunchError(str(error)) from None
        state = place.read() if place.is_running else None
        told = urlsplit(state.proxy_url).port if state is not None and state.proxy_url else None
        yield place.url, told or settings.proxy_port


def _unattended(settings: Settings, proxy: bool) -> Settings:
    """The settings of a server that nobody started by name: it ends when nobody uses it."""
    changes: dict[str, object] = {
        "idle_shutdown_minutes": settings.idle_shutdown_minutes or settings.launch_idle_minutes
    }
    if proxy:
        changes["proxy"] = "on"
    return settings.model_copy(update=changes)
