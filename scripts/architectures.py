"""Tries every architecture of mlx-lm, and the text models that only mlx-vlm has, with tiny random weights, and writes
what came of it to docs/architectures.md.

Each runs in a process of its own, which may end as it likes. A few minutes on two cores.

    python scripts/architectures.py               all of them, and the page
    python scripts/architectures.py --mlx-vlm     those of mlx-vlm, and their part of the page
    python scripts/architectures.py llama qwen3   these, and only their lines
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architectures.md"
WAYS = ("cold", "reused", "forked", "batch", "restarted")
SECONDS = 600.0
sys.path.insert(0, str(ROOT))

from tests.models.architectures import all_names  # noqa: E402
from tests.models.decode_everywhere import try_architecture  # noqa: E402
from tests.models.vlm_types import CONFIGS  # noqa: E402

_PROCESSES: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_PROCESSES.set_forkserver_preload(["tests.models.decode_everywhere"])


def _try(name: str, answer: Connection) -> None:
    answer.send(try_architecture(name))


def tried(name: str) -> dict[str, Any]:
    """What came of it; ``refused`` where its process did not come to an end by itself."""
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_try, args=(name, theirs))
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
*restarted* (from KV on disk).

Of {all} architectures {equal} give equal tokens in all five ways, {others} do not, and {refused} were not made.

A model is checked in the same way when it is loaded for the first time (`engine/checks`). One that computes
something else in a batch is decoded row by row; one that cannot go on from stored KV computes each prompt anew.
`models show`, `details.facts` of `GET /v1/models` (`batches`, `kv_reuse`) and the log say so.
"""


_VLM = "## Text models that only mlx-vlm has"
_VLM_TEXT = """\
Their language model alone, of mlx-vlm {version}, was served in the same way, with prompts of 300 tokens: more than
their sparse attention keeps. Its tokens were compared with those of a plain loop over mlx-vlm's language model and its
own caches, which computes the prompt in one pass. `deepseek_v4` of mlx-vlm computes something else when a prompt is cut
into several passes, so it differs from that loop; fed the same pieces it is equal (`tests/kvcache/test_kinds.py`).
`hy_v4` is mended when it is loaded (`models/vision`).

Of {all} types {equal} give equal tokens in all five ways, {others} do not, and {refused} were not made.
"""


def page(results: list[dict[str, Any]], of_vlm: str) -> str:
    """`of_vlm`: the part of the page that `vlm_part` makes."""
    head = ["# Architectures that were tried", "", "<!-- Written by scripts/architectures.py. -->", ""]
    return "\n".join([*head, *_part(results, _TEXT, version("mlx-lm"))]) + "\n\n" + of_vlm


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


def _all(names: Iterable[str]) -> list[dict[str, Any]]:
    results = []
    for name in names:
        results.append(tried(name))
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    match sys.argv[1:]:
        case []:
            PAGE.write_text(page(_all(all_names()), vlm_part(_all(CONFIGS))), encoding="utf-8")
        case ["--mlx-vlm"]:
            before = PAGE.read_text("utf-8").partition(_VLM)[0].rstrip()
            PAGE.write_text(f"{before}\n\n{vlm_part(_all(CONFIGS))}", encoding="utf-8")
        case names:
            _all(names)


if __name__ == "__main__":
    main()
