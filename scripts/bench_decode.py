"""Decode speed: through the server against mlx-lm itself, side by side in one run.

1. Batch 1: tokens per second of a streamed answer from our server (model, server and
   client in this process) against `mlx_lm.stream_generate` on the same model, on the
   same thread; alternating, medians.
2. Eight streams at once: our server against `mlx_lm.server`, each a child process on
   the same checkpoint; alternating.

Without drafts, so that both compute the same; what drafts save is measured by `bench_drafts.py`.

usage: python3.12 install_and_run.py run scripts/bench_decode.py [--tokens N] [--rounds N] [--streams N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from mlx_lm import stream_generate
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from start_llm.app import App
from start_llm.core.settings import Settings, load_settings
from start_llm.host.ports import free_port
from start_llm.models.embedded import ensure_embedded_model
from start_llm.models.loader import accelerator

QUESTION = "Write a very long story about a lighthouse keeper, a storm, and a ship. Tell every detail."


def settings_for(folder: str, **more: Any) -> Settings:
    return load_settings(
        None,
        start_llm_cache_dir=Path(folder),
        kv_disk_dir="off",
        proxy="off",
        mlx_port=0,
        enable_request_logging=False,
        log_json=True,
        default_thinking=False,
        drafts="off",
        **more,
    )


def body(tokens: int, variant: int = 0, model: str = "default") -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": f"{QUESTION} ({variant})"}],
        "max_tokens": tokens,
        "temperature": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def streamed(url: str, request: dict[str, Any]) -> tuple[int, float, float]:
    """Completion tokens, seconds from first to last token, seconds in all."""
    began, first, last, tokens = time.perf_counter(), 0.0, 0.0, 0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=request, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                tokens = int(chunk["usage"]["completion_tokens"])
            if chunk["choices"] and (chunk["choices"][0].get("delta") or {}).get("content"):
                last = time.perf_counter()
                first = first or last
    return tokens, last - first, time.perf_counter() - began


def single(cache: str, tokens: int, rounds: int) -> tuple[float, float]:
    """Medians of tokens per second: ours through HTTP, and stream_generate's."""
    app = App(settings_for(cache), say=lambda line: None)
    app.start()
    try:
        ours, theirs = [], []
        runtime = app.pool.main_runtime
        assert runtime is not None, "it is loaded"
        loaded = runtime.loaded
        streamed(app.server_url, body(8))
        for _ in range(rounds):
            made, seconds, _ = streamed(app.server_url, body(tokens))
            ours.append((made - 1) / seconds)
            theirs.append(app.engine.call(lambda _: direct(loaded.model, loaded.wrapper, tokens), 600.0))
        return statistics.median(ours), statistics.median(theirs)
    finally:
        app.stop()


def direct(model: Any, wrapper: Any, tokens: int) -> float:
    prompt = wrapper.apply_chat_template([{"role": "user", "content": f"{QUESTION} (0)"}], add_generation_prompt=True)
    stamps = [time.perf_counter() for _ in stream_generate(model, wrapper, prompt, max_tokens=tokens)]
    return (len(stamps) - 1) / (stamps[-1] - stamps[0])


def throughput(url: str, model: str, streams: int, tokens: int, salt: int) -> float:
    """Tokens per second over all streams; every stream has a prompt of its own."""
    results: list[int] = []

    def one(i: int) -> None:
        results.append(streamed(url, body(tokens, salt * 1000 + i, model))[0])

    threads = [threading.Thread(target=one, args=(i,)) for i in range(streams)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(results) / (time.perf_counter() - began)


@contextmanager
def child(command: list[str], url: str, ready: str, environment: dict[str, str]) -> Iterator[str]:
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if httpx.get(url + ready, timeout=2).status_code == 200:
                    yield url
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"{command} did not become ready")
    finally:
        process.terminate()
        process.wait(20)


def concurrent(cache: str, checkpoint: Path, streams: int, tokens: int, rounds: int) -> tuple[float, float]:
    """Medians of tokens per second: ours, mlx_lm.server's."""
    ours_port, theirs_port = free_port(), free_port()
    environment = {
        "MLX_PORT": str(ours_port),
        "PROXY": "off",
        "KV_DISK_DIR": "off",
        "START_LLM_CACHE_DIR": cache,
        "ENABLE_REQUEST_LOGGING": "false",
        "LOG_JSON": "true",
        "DRAFTS": "off",
    }
    ours_command = [sys.executable, "-m", "start_llm", "serve"]
    theirs_command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(checkpoint), "--port", str(theirs_port)]
    ours, theirs = [], []
    with (
        child(ours_command, f"http://127.0.0.1:{ours_port}", "/health", environment) as a,
        child(theirs_command, f"http://127.0.0.1:{theirs_port}", "/v1/models", {}) as b,
    ):
        throughput(a, "default", streams, 8, 900)
        throughput(b, str(checkpoint), streams, 8, 901)
        for i in range(rounds):
            ours.append(throughput(a, "default", streams, tokens, 2 * i))
            theirs.append(throughput(b, str(checkpoint), streams, tokens, 2 * i + 1))
    return statistics.median(ours), statistics.median(theirs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--cache-dir", default=None, help="where the embedded model is, or goes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cache = options.cache_dir or str(load_settings(None).cache_dir)
        checkpoint = ensure_embedded_model(
            Path(cache), quantised=accelerator().backend != "cpu", progress=lambda *_: None
        )
        os.chdir(scratch)
        table = Table("tokens per second", "start_llm", "mlx-lm", "ratio")
        ours, theirs = single(cache, options.tokens, options.rounds)
        table.add_row("batch 1, against stream_generate", f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.3f}")
        ours, theirs = concurrent(cache, checkpoint, options.streams, options.tokens, options.rounds)
        table.add_row(
            f"{options.streams} streams, against mlx_lm.server", f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.3f}"
        )
        os.chdir("/")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
