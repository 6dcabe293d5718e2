"""How the schedulers of all ranks do the same: rank 0 writes each call of its scheduler, the others make it, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from start_llm.core.errors import StartLLMError
from start_llm.core.work import Sink, Submit
from start_llm.engine.ranks.channel import described, submit_of
from start_llm.engine.ranks.group import as_sentence
from start_llm.engine.schedule.scheduler import Scheduler

if TYPE_CHECKING:  # few need them, and what they import
    from start_llm.engine.ranks.follower import FollowerGroup
    from start_llm.engine.ranks.leader import LeaderGroup


class LeaderScheduler(Scheduler):
    """Rank 0's. An entry stands in the log before the call is made: a pass of the model needs all ranks.

    What a step has computed goes out when all ranks have confirmed the step: none has failed in it, and all have gone
    the same way. So no token comes of sums of two different passes.
    """

    def __init__(self, *args: Any, ranks: LeaderGroup, **kwargs: Any) -> None:
        self._ranks = ranks
        self._kept: list[tuple[Sink, Any]] = []  # events, until the step is confirmed
        super().__init__(*args, **kwargs)

    def add(self, work: Submit) -> None:
        self._ranks.write("add", described(work))
        # The others have no such text to draft from.
        super().add(replace(work, views=None, sink=lambda event: self._kept.append((work.sink, event))))

    def add_idle(self, work: Submit) -> None:
        self._ranks.write("add_idle", described(work))
        super().add_idle(work)

    def cancel(self, work_id: str) -> None:
        self._ranks.write("cancel", work_id)
        super().cancel(work_id)

    def step(self) -> None:
        """Waits until all ranks have confirmed the step; only then its events go out."""
        self._ranks.write("step", self.digest(), self.crowded)
        super().step()
        self._ranks.confirm(self.digest())
        self._send_kept()

    def step_idle(self) -> None:
        self._ranks.write("step_idle", self.digest())
        super().step_idle()

    def pause_idle(self) -> None:
        self._ranks.write("pause_idle")
        super().pause_idle()

    def tidy(self) -> None:
        self._ranks.write("tidy", self.digest())
        super().tidy()

    def fail_all(self, error: StartLLMError) -> None:
        self._ranks.write("fail_all", error.message)
        super().fail_all(error)
        self._send_kept()

    def recover(self, error: Exception) -> None:
        self._ranks.fail(as_sentence(error))

    def _send_kept(self) -> None:
        for sink, event in self._kept:
            sink(event)
        self._kept.clear()


_READERS: dict[str, Callable[[Any], Any]] = {
    "add": submit_of,
    "add_idle": submit_of,
    "cancel": str,
    "fail_all": StartLLMError,
}
"""Entries that are calls with one argument, and how that is read."""


def follow(scheduler: Scheduler, ranks: FollowerGroup) -> None:
    """A follower's model thread: does what rank 0 does, until that one ends. What differs ends the process."""
    while (entry := ranks.next())[0] != "stop":
        kind, *given = entry
        if kind in {"step", "step_idle", "tidy"} and given[0] != scheduler.digest():
            ranks.fail(f"its scheduler is not where rank 0's is, before entry {ranks.sequence} ({kind}).")
        if kind == "step":
            scheduler.crowded = given[1]
            with ranks.passing():
                scheduler.step()
            ranks.confirm(scheduler.digest())
        elif kind in _READERS:
            getattr(scheduler, kind)(_READERS[kind](given[0]))
        elif kind in {"step_idle", "pause_idle", "tidy"}:
            getattr(scheduler, kind)()
        else:
            ranks.fail(f"entry {ranks.sequence} is {kind}, which a scheduler does not know.")
