"""The command `rank`: what `serve --hosts` starts on each host but the first. It has no HTTP, and asks nobody."""

from __future__ import annotations

import argparse
import sys
import time
from multiprocessing.connection import Client

from start_llm.core.errors import ExitCode, StartLLMError
from start_llm.core.settings import Settings
from start_llm.dashboard.terminal import log_as_lines
from start_llm.engine.assembly import ModelBuilder
from start_llm.engine.ranks.channel import Channel
from start_llm.engine.ranks.follower import FollowerGroup
from start_llm.engine.ranks.group import as_sentence
from start_llm.engine.ranks.hosts import versions
from start_llm.engine.ranks.lockstep import follow
from start_llm.engine.runtime import end_streams
from start_llm.host.ports import free_port
from start_llm.models.background import at_once
from start_llm.models.device import inspect_device
from start_llm.models.loader import accelerator

OWN_WORDS_SECONDS = 2.0
"""What cannot be loaded here mostly cannot be loaded by rank 0 either, which then says so itself."""


def main(settings: Settings, options: argparse.Namespace) -> int:
    """Follows rank 0 until that one ends. Its key comes by standard input."""
    log_as_lines(settings.log_level)
    address, _, listening = options.leader.rpartition(":")
    key = bytes.fromhex(sys.stdin.readline())
    channel = Channel(Client((address, int(listening)), authkey=key), key)
    usable = inspect_device(accelerator).usable
    port = free_port(options.address)
    channel.send([{"rank": options.rank, "port": port, "usable": usable, "versions": versions()}])
    _, _, addresses, token, silent_seconds, about = channel.receive()
    ranks = FollowerGroup(options.rank, channel, addresses, silent_seconds)
    ranks.token = token
    try:
        _follow(Settings.model_validate(settings.model_dump() | about), ranks)
    except StartLLMError as error:
        time.sleep(OWN_WORDS_SECONDS)
        ranks.fail(error.message)
    except Exception as error:  # noqa: BLE001 - the thread's edge: rank 0 says it, and all end
        ranks.fail(as_sentence(error))
    return ExitCode.ENDED


def _follow(settings: Settings, ranks: FollowerGroup) -> None:
    builder = ModelBuilder(settings, lambda need: False, lambda line: None, lambda step, part: None, ranks)
    builder.begin(reserved=0)
    runtime = at_once(builder.first_steps(settings))
    follow(runtime.scheduler, ranks)
    runtime.close()
    end_streams()
