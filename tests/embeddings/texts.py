"""200 texts of 1 to 60 words: code, prose, other scripts, odd characters; the same in every run."""

from __future__ import annotations

import random

TEXT = (
    "the server keeps what it has read and computes only what is new def return self import class for in while "
    "cache token prompt agent model memory thread queue batch row step error file folder path name value key "
    "Straße naïve façade über Москва 東京 データ 你好 مرحبا 🙂 x=1; y[0] -> {} </tag> 3.14 2026-11-22 https://example.org/a?b=c"
)


def texts(count: int = 200, longest: int = 60) -> list[str]:
    words, draw = TEXT.split(), random.Random(13)
    return [" ".join(draw.choices(words, k=1 + index * longest // count)) for index in range(count)]
