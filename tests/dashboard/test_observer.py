from __future__ import annotations

from typing import Any, cast

from start_llm.dashboard.observer import Activity

ANY = cast(Any, None)


def test_idle_is_the_time_since_the_last_request_has_ended() -> None:
    now = [10.0]
    activity = Activity(lambda: now[0])
    now[0] = 13.0
    assert activity.idle_seconds() == 3.0
    activity.started(ANY)
    activity.started(ANY)
    activity.ended(ANY, ANY)
    now[0] = 20.0
    assert activity.idle_seconds() == 0.0
    activity.ended(ANY, ANY)
    now[0] = 25.0
    assert activity.idle_seconds() == 5.0
