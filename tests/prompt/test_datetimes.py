"""Date and time expressions: every form that clients write is read whole, and nothing else is taken for one."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from start_llm.prompt.datetimes import differ_in_times_only, without_times
from tests.kinds import rounds

FORMS = (
    "%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S.%fZ", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M:%S", "%Y/%m/%d",
    "%m/%d/%Y", "%m/%d/%Y, %I:%M:%S %p", "%m/%d/%Y, %I:%M:%S\u202f%p", "%d.%m.%Y", "%d.%m.%Y, %H:%M:%S", "%H:%M",
    "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I %p", "%A", "%A, %B %d, %Y", "%A, %B %d", "%B %d, %Y", "%b %d %Y",
    "%d %b %Y", "%d. %B %Y", "%a, %d %b %Y %H:%M:%S +0000", "%a %b %d %H:%M:%S %Y", "%B %Y", "%a %b %d %Y %H:%M:%S",
    "%a %b %d %Y %H:%M:%S GMT+0100 (Central European Standard Time)", "%H:%M:%S UTC", "%H:%M CET",
    "%H:%M Europe/Berlin", "%H:%M (Europe/Berlin)", "%Y-%m-%d %H:%M:%S+02:00", "%Y年%m月%d日", "%dth of %B %Y",
)  # fmt: skip
MOMENTS = st.datetimes(datetime(1900, 1, 1), datetime(2099, 12, 31, 23, 59, 59))
WORDS = st.sampled_from(["", "Current time: ", "Today is ", "now = '", "(", "It is ", "- ", "现在是 "])
ENDS = st.sampled_from(["", ".", ")", "'", ", as told.", " now", "!"])


def words(text: str) -> str:
    return re.sub(r"[ ,.]", "", text)


def plain(form: str) -> str:
    """`%a %b %d %H:%M:%S %Y` ends in a year that stands by itself: that stays a number."""
    return form.removesuffix(" %Y") if form.endswith("%S %Y") else form


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=rounds(100, 8))
@given(first=MOMENTS, second=MOMENTS, before=WORDS, behind=ENDS)
def test_two_moments_in_one_form_differ_in_times_only(
    form: str, first: datetime, second: datetime, before: str, behind: str
) -> None:
    old, new = (f"{before}{moment.strftime(plain(form))}{behind}" for moment in (first, second))
    texts, kinds = without_times(old)
    assert kinds and words("".join(texts)) == words(f"{before}{behind}"), texts
    assert differ_in_times_only(old, new)
    assert not differ_in_times_only(old, f"x{new}") and not differ_in_times_only(old, f"{new}\nMode: plan")


@given(moment=MOMENTS, hours=st.integers(-12, 14))
def test_python_and_javascript_write_it(moment: datetime, hours: int) -> None:
    there = moment.replace(tzinfo=timezone(timedelta(hours=hours)))
    for text in (there.isoformat(), there.strftime("%a, %d %b %Y %H:%M:%S %z"), moment.isoformat(timespec="minutes")):
        texts, _ = without_times(f"at {text}.")
        assert "".join(texts).replace(" ", "") == "at."


NO_TIMES = (
    "10:05:99", "24:01", "9:5", "13 PM", "0:30 AM", "2026-13-45", "Feb 32", "2026-11-22T25:00", "1.2.3",
    "v2026-11-22", "log-2026-11-22.txt", "2026-11-22.txt", "/2026/11/22", "https://x/2026-11-22", "127.0.0.1:10:05",
    "localhost:8080", "host:10:05", "16:9", "2026", "10", "April", "Customer: May", "June", "may 10", "Mon", "Sun",
    "Europe/Berlin", "CET", "UTC+2", "1763812345", "Mode: 3", "10:05pm2", "Monday2", "item #10:05", "$10:05", "a-10:05",
    "12.13.2026", "2026-11-22-beta", "1/2/03", "version 22.11.2026.1",
)  # fmt: skip


@pytest.mark.parametrize("text", NO_TIMES)
def test_near_misses_are_no_times(text: str) -> None:
    assert without_times(text) == ((text,), ())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Customer: Alicia, 10:05", "Customer: Robert, 10:06"),
        ("Customer: April", "Customer: June"),
        ("Today is Monday", "Today is 2026-11-23"),
        ("at 10:05", "at 10:05 and 10:06"),
        ("10:05\nMode: plan", "10:06\nMode: build"),
        ("10:05", "10:06\n"),
        ("Zone: Europe/Berlin", "Zone: Europe/Paris"),
        ("10:05 2", "10:06 3"),
    ],
)
def test_what_differs_in_anything_else(old: str, new: str) -> None:
    assert not differ_in_times_only(old, new)


@given(st.text(max_size=200))
def test_any_text_is_put_together_again(text: str) -> None:
    texts, kinds = without_times(text)
    assert len(texts) == len(kinds) + 1 and differ_in_times_only(text, text)
    assert kinds or texts == (text,)
