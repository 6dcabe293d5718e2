"""Tries every architecture of mlx-lm, and the text models that only mlx-vlm has, with tiny random weights, and writes
what came of it to docs/architectures.md.

Each runs in a process of its own, which may end as it likes. Some ten minutes on two cores.

    python scripts/architectures.py               all of them, and the page
    python scripts/architectures.py --mlx-vlm     those of mlx-vlm, and their part of the page
    python scripts/architectures.py --sizes       what stored KV takes, and its part of the page
    python scripts/architectures.py llama qwen3   these, and only their lines
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architectures.md"
WAYS = ("cold", "reused", "forked", "batch", "restarted", "drafted", "cancelled", "evicted")
SECONDS = 600.0
sys.path.insert(0, str(ROOT))

from tests.models.architectures import all_names  # noqa: E402
from tests.models.decode_everywhere import try_architecture  # noqa: E402
from tests.models.kv_sizes import LENGTHS, NEW_TYPES, conversation, sizes  # noqa: E402
from tests.models.vlm_types import CONFIGS  # noqa: E402

_PROCESSES: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_PROCESSES.set_forkserver_preload(["tests.models.decode_everywhere"])


def _send(work: Callable[[str], dict[str, Any]], name: str, answer: Connection) -> None:
    answer.send(work(name))


def measured(name: str) -> dict[str, Any]:
    return {**sizes(name), **conversation(name)}


def tried(name: str, work: Callable[[str], dict[str, Any]] = try_architecture) -> dict[str, Any]:
    """What came of it; ``refused`` where its process did not come to an end by itself."""
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_send, args=(work, name, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            return {"name": name, "refused": f"took over {SECONDS:g} s"}
        found: dict[str, Any] = ours.recv()
        return found
    except EOFError:
        process.join()
        return {"name": name, "refused": f"it ends the process that makes it (code {process.exitcode})"}
    finally:
        process.kill()
        process.join()
        ours.close()


_TEXT = """\
Each architecture of mlx-lm {version} was made with tiny random weights in float32 and served by the engine of this
server. Its greedy tokens were compared with those of `mlx_lm.generate`: *cold*, *reused* (a next turn that goes on
from stored KV), *forked* (another end of a stored prompt), in a *batch* of three requests of different lengths, and
*restarted* (from KV on disk), *drafted* (each pass also verifies three tokens that are wrong), *cancelled* (the same
request again after one that was cancelled) and *evicted* (two thirds of the stored KV were taken away).

Of {all} architectures {equal} give equal tokens in all ways, {others} do not, and {refused} were not made. All were run
with the same version of this server.

A model is checked in the same way when it is loaded for the first time (`engine/checks`). One that computes
something else in a batch is decoded row by row; one that cannot go on from stored KV computes each prompt anew.
`models show`, `details.facts` of `GET /v1/models` (`batches`, `kv_reuse`) and the log say so. `muse_spark` was made
with plain operations in place of its Metal kernels (`tests/models/metal.py`).
"""


_VLM = "## Text models that only mlx-vlm has"
_VLM_TEXT = """\
Their language model alone, of mlx-vlm {version}, was served in the same way, with prompts of 300 tokens: more than
their sparse attention keeps. Its tokens were compared with those of a plain loop over mlx-vlm's language model and its
own caches, which computes the prompt in one pass. `deepseek_v4` and `hy_v4` are mended when they are loaded
(`models/vision`), for the loop, too: `_overlap_compress_kv` (`models/deepseek_v4/language.py`) pools each group
together with the one before it, but takes the first group of a pass to have none before it, whatever the cache holds.

Of {all} types {equal} give equal tokens in all ways, {others} do not, and {refused} were not made.
"""


_SIZES = "## What stored KV takes"
_SIZES_TEXT = """\
Tiny random models of these types were fed up to {longest:,} tokens, in float32. The bytes of a checkpoint do not depend
on how many tokens stand before it; the rows of a token take what their columns say. *computed / new* is of a
conversation of 12 turns, in which up to three turns are taken back, three times.

All ten types could be made here, `muse_spark` as said above. Where they have sparse attention or windows, the prompts
of the comparisons above were longer than what these keep. `k2_horizon` has attention alone, and `kimi_k3` recurrent
layers beside it.

`tests/models/chaos.py` serves `deepseek_v4`, `qwen4_exp` and `glm5_next` while requests fork at any token, run side by
side, are cancelled and paused, drafts are wrong, stored KV is evicted, calls fail, files are damaged and the server
begins again. Whoever is answered has to get the tokens of the loop over mlx-vlm's model.
"""


def page(results: list[dict[str, Any]], *parts: str) -> str:
    """`parts`: those that `vlm_part` and `sizes_part` make."""
    head = ["# Architectures that were tried", "", "<!-- Written by scripts/architectures.py. -->", ""]
    return "\n\n".join(["\n".join([*head, *_part(results, _TEXT, version("mlx-lm"))]), *parts])


def sizes_part(results: list[dict[str, Any]]) -> str:
    names = " | ".join(f"{length:,} tokens" for length in LENGTHS)
    lines = [_SIZES, "", *_SIZES_TEXT.format(longest=max(LENGTHS)).splitlines(), ""]
    lines += [f"| architecture | checkpoint, bytes at {names} | a token, bytes | by its columns | computed / new |"]
    lines += ["|---" * (len(LENGTHS) + 4) + "|"]
    for found in results:
        if "refused" in found:
            lines.append(f"| {found['name']} | {_plain(found['refused'])} |" + " |" * (len(LENGTHS) + 2))
            continue
        told = " | ".join(f"{nbytes:,}" for nbytes in found["checkpoint"])
        share = f"{found['computed']} / {found['new']} = {found['computed'] / found['new']:.3f}"
        lines.append(f"| {found['name']} | {told} | {found['token'][-1]:g} | {found['columns']:g} | {share} |")
    return "\n".join(lines) + "\n"


def vlm_part(results: list[dict[str, Any]]) -> str:
    return "\n".join([_VLM, "", *_part(results, _VLM_TEXT, version("mlx-vlm"))]) + "\n"


def _part(results: list[dict[str, Any]], text: str, library: str) -> list[str]:
    equal = [found for found in results if all(found.get(way) == "equal" for way in WAYS)]
    others = [found for found in results if "refused" not in found and found not in equal]
    refused = [found for found in results if "refused" in found]
    counts = {"all": len(results), "equal": len(equal), "others": len(others), "refused": len(refused)}
    lines = [
        *text.format(version=library, **counts).splitlines(),
        "",
        "| architecture | cache layers | " + " | ".join(WAYS) + " | decoded |",
        "|---|---|" + "---|" * (len(WAYS) + 1),
    ]
    lines += map(_row, [*equal, *others])
    reasons = [(found["name"], found[key]) for key in ("batches", "reuse") for found in results if found.get(key)]
    lines += ["", "Why rows are not decoded together, or KV is not reused:", ""]
    lines += [f"- `{name}`: {_plain(reason)}" for name, reason in reasons]
    if refused:
        lines += [
            "",
            "Not made here, with the reason (a kernel for Metal only, a package that is not there, a configuration",
            "that its fields do not tell). A server refuses such a model with that reason when it is asked for:",
            "",
        ]
    return lines + [f"- `{found['name']}`: {_plain(found['refused'])}" for found in refused]


def _row(found: dict[str, Any]) -> str:
    """An architecture's row of the table."""
    how = "row by row" if found["batches"] else "in batches"
    how += ", nothing reused" if found["reuse"] else ""
    cells = (str(found[way]) for way in WAYS)
    return f"| {found['name']} | {', '.join(found['caches'])} | {' | '.join(cells)} | {how} |"


def _plain(reason: str) -> str:
    """One line that Markdown leaves as it is."""
    return " ".join(reason.replace("<", "(").replace(">", ")").replace("|", "/").split())


def _all(names: Iterable[str], work: Callable[[str], dict[str, Any]] = try_architecture) -> list[dict[str, Any]]:
    results = []
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1)) as several:
        for found in several.map(partial(tried, work=work), names):
            results.append(found)
            print(json.dumps(found), flush=True)
    return results


def main() -> None:
    before, _, sized = PAGE.read_text("utf-8").partition(_SIZES)
    match sys.argv[1:]:
        case []:
            measuring = _all(NEW_TYPES, measured)  # first, for these take longest
            made = page(_all(all_names()), vlm_part(_all(CONFIGS)), sizes_part(measuring))
        case ["--mlx-vlm"]:
            head = before.partition(_VLM)[0].rstrip()
            made = f"{head}\n\n{vlm_part(_all(CONFIGS))}\n{_SIZES}{sized}"
        case ["--sizes"]:
            made = f"{before.rstrip()}\n\n{sizes_part(_all(NEW_TYPES, measured))}"
        case names:
            _all(names)
            return
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
