"""Keeps the proxy alive: says when it is ready, and starts it again when it has died.

A proxy that dies at every start is given up after `PAUSES` are used up; the server itself goes on either way.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from start_llm.proxy.launcher import LiteLLMProxy, ProxyError

log = logging.getLogger(__name__)

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each restart in a row; as many restarts as there are pauses."""
STABLE_SECONDS = 600.0
"""A proxy that has lived this long is sound: its next death counts as the first."""
READY_SECONDS = 120.0
"""After that a proxy that is not ready is not going to be."""
LOOK_SECONDS = 0.25
TRIM_SECONDS = 60.0


class ProxyKeeper:
    """Watches a proxy that has been started, in a thread of its own; `start` and `stop` belong to the app's thread.

    Between `start` and the return of `stop` only this thread starts or stops the proxy.
    """

    def __init__(self, proxy: LiteLLMProxy, say: Callable[[str], None]) -> None:
        self._proxy = proxy
        self._say = say
        self._restarts = 0
        self._announced = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy-keeper", daemon=True)

    def start(self, announced: bool = False) -> None:
        """`announced`: somebody has said already that the proxy is ready."""
        self._announced = announced
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; the proxy is left as it is."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def figures(self) -> dict[str, float]:
        """For ``/metrics``."""
        return {"proxy_up": float(self._proxy.alive()), "proxy_restarts": float(self._restarts)}

    def _run(self) -> None:
        """Starts the proxy again each time that it has died, until there are too many deaths in a row."""
        failures = 0
        while not self._over.is_set():
            began = time.monotonic()
            self._watch()
            if self._over.is_set():
                return
            failures = 1 if time.monotonic() - began >= STABLE_SECONDS else failures + 1
            if failures > len(PAUSES):
                log.error(
                    "the proxy has died %d times in a row and is given up; the server goes on without it at its own "
                    "address. The proxy's last words:\n%s",
                    failures,
                    self._proxy.log_tail(5),
                )
                return
            self._again(failures)

    def _watch(self) -> None:
        """Returns when the proxy has died, or the watch is over."""
        late, trim = time.monotonic() + READY_SECONDS, time.monotonic() + TRIM_SECONDS
        while self._proxy.alive() and not self._over.wait(LOOK_SECONDS):
            now = time.monotonic()
            if now >= trim:
                self._proxy.trim_log()
                trim = now + TRIM_SECONDS
            if self._announced:
                continue
            if self._proxy.healthy():
                self._say("proxy     ready")
                self._announced = True
            elif now >= late:
                log.warning("the proxy is not ready after %.0f s:\n%s", READY_SECONDS, self._proxy.log_tail(5))
                late = math.inf
        self._announced = False

    def _again(self, failures: int) -> None:
        """Starts the proxy behind the pause that belongs to so many deaths in a row."""
        pause = PAUSES[failures - 1]
        log.warning("the proxy has died; it is started again in %g s (%d of %d)", pause, failures, len(PAUSES))
        if self._over.wait(pause):
            return
        self._restarts += 1
        try:
            self._proxy.stop()
            self._proxy.start()
        except ProxyError as error:
            log.warning("the proxy cannot be started: %s", error)
