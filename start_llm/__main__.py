"""Command line: ``start-llm``, ``python -m start_llm``. Flags win over the environment, and that over `.env`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path

from start_llm.cli.reading import HelpRequested, UsageError, read
from start_llm.host.home import ANEW_VARIABLE

INTERRUPTED = 130  # what shells say of a process that Ctrl-C ended
USAGE = 2
NOBODY_READS = 141  # and of one that SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. The exit code: 2 for a bad flag or setting, else the command's own."""
    try:
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads has enough: `start-llm help serve | head -3`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be written goes nowhere, without a complaint
        return NOBODY_READS
    except KeyboardInterrupt:  # before the command has its own answer to it, mostly while it is imported
        return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    try:
        typed = read(sys.argv[1:] if arguments is None else arguments)
    except HelpRequested as answer:
        print(answer)
        return 0
    except UsageError as error:
        print(error, file=sys.stderr)
        return USAGE
    first = typed.command.first_words(typed.options) or _first_run()
    if first and ANEW_VARIABLE not in os.environ:  # a process that was started anew has said it
        print(first, file=sys.stderr, flush=True)
    # What reads settings takes a third of a second to import: help and refusals do without.
    return int(import_module("start_llm.cli.running").run(typed, own_process=arguments is None))


def _first_run() -> str:
    """What is said where Python has to compile the package first, which takes seconds; empty where it has."""
    compiled = cache_from_source(str(Path(__file__).with_name("cli") / "running.py"))
    return "" if sys.dont_write_bytecode or os.path.exists(compiled) else "start-llm: first run, a few seconds ..."


if __name__ == "__main__":
    sys.exit(main())
