"""A local, KV-cache-aware LLM server for coding agents, on MLX.

As a library::

    import start_llm

    with start_llm.App(start_llm.load_settings(None, mlx_port=0, proxy="off")) as app:
        print(app.url)  # an OpenAI and Anthropic API
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from start_llm.app import App
    from start_llm.core.settings import Settings, load_settings

__version__ = "0.2.0"
__all__ = ["App", "Settings", "load_settings"]

_PLACES = {"App": "start_llm.app", "Settings": "start_llm.core.settings", "load_settings": "start_llm.core.settings"}


def __getattr__(name: str) -> Any:
    """Imported when they are asked for: the command line needs neither, and MLX takes seconds."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
