"""Looks at a running server's main model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from start_llm.app import App

SECONDS = 600.0


def on_model_thread(app: App, function: Callable[[Any, Any], Any]) -> Any:
    """``function(model, mlx-lm's tokenizer)`` on the model thread."""
    runtime = app.pool.main_runtime
    assert runtime is not None, "it is loaded"
    loaded = runtime.loaded
    return app.engine.call(lambda _: function(loaded.model, loaded.wrapper), SECONDS)
