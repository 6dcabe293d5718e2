"""How the server's process ends, for whoever started it. Documented in docs/operations.md."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    ENDED = 0
    """SIGINT or SIGTERM asked for it."""

    NOT_STARTED = 1
    """The model could not be loaded, or the like; standard error says why."""

    BAD_SETTING = 2
    """A flag or setting is wrong, a port is taken: starting again changes nothing."""

    ENGINE_DIED = 70
    """The model thread ended by itself. (EX_SOFTWARE of sysexits.h)"""

    WEDGED = 75
    """The model did not answer for twice the watchdog's time. (EX_TEMPFAIL: start it again)"""
