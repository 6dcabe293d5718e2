"""Runs things on threads that begin at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor


def together[T](works: Iterable[Callable[[], T]]) -> list[T]:
    """What each returns. What one of them raises is raised here, once all have ended."""
    begun = [*works]
    with ThreadPoolExecutor(len(begun)) as pool:
        return [each.result() for each in [pool.submit(work) for work in begun]]
