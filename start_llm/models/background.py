"""Work in steps, for the model thread between the steps of other models; and work for a background thread.

A generator yields the seconds that it wants to wait, and returns its result. Knows no MLX.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager

LOOK_SECONDS = 0.005
Progress = Callable[[str, float], None]
"""Is called with a step's name, and the part of it that is done, 0 to 1; less than 0: it failed."""
Say = Callable[[str], None]
"""Shows people a line."""


@contextmanager
def telling(progress: Progress, step: str) -> Generator[Callable[[float], None]]:
    """Tells of a step's beginning and of its end, however it ends; what it gives tells of the part that is done."""
    progress(step, 0.0)
    done = -1.0
    try:
        yield lambda part: progress(step, min(part, 0.999))
        done = 1.0
    finally:
        progress(step, done)


def on_thread[T](function: Callable[[], T], name: str) -> Future[T]:
    """Runs `function` on a thread of its own, which does not keep the process alive."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the thread's edge: raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


def in_background[T](
    function: Callable[[], T], unwanted: Callable[[T], object] | None = None
) -> Generator[float, None, T]:
    """Runs `function`, which computes nothing with MLX, on a thread of its own; waits until it is done.

    Raises what it raises. If the steps are given up meanwhile, it goes on to its end, and nobody hears of it but
    `unwanted`: that gets what came of it after all, on any thread.
    """
    done = on_thread(function, "background")
    try:
        yield 0.0  # however quick it is: what comes before and after it makes no single step
        while not done.done():
            yield LOOK_SECONDS
    except GeneratorExit:
        if unwanted is not None:
            done.add_done_callback(lambda late: unwanted(late.result()) if late.exception() is None else None)
        raise
    return done.result()


def at_once[T](steps: Generator[float, None, T]) -> T:
    """What comes of the steps if nobody else has a turn between them."""
    while True:
        try:
            time.sleep(next(steps))
        except StopIteration as end:
            result: T = end.value
            return result
