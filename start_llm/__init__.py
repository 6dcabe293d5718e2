"""A local, KV-cache-aware LLM server for coding agents, on MLX.

As a library::

    import start_llm

    with start_llm.App(start_llm.load_settings(None, mlx_port=0, proxy="off")) as app:
        print(app.url)  # an OpenAI and Anthropic API, for this program and others
"""

import resource as _resource
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from start_llm.app import App
    from start_llm.core.errors import StartLLMError
    from start_llm.core.settings import Settings, SettingsError, load_settings

__version__ = "0.2.0"
__all__ = [
    "App",
    "Settings",
    "SettingsError",
    "StartLLMError",
    "load_settings",
]

_NAMES = {
    "start_llm.app": ("App",),
    "start_llm.core.errors": ("StartLLMError",),
    "start_llm.core.settings": ("Settings", "SettingsError", "load_settings"),
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names}

_FILES_OF_MLX_LM = 4096


def _allow_few_files(
    allowed: int = _resource.getrlimit(_resource.RLIMIT_NOFILE)[1], setrlimit: Any = _resource.setrlimit
) -> None:
    """mlx-lm asks for 4,096 open files when it is imported, which fails where fewer are allowed: then it gets those."""
    if not 0 <= allowed < _FILES_OF_MLX_LM:  # -1 is no limit
        return

    def bounded(kind: int, limits: tuple[int, int]) -> None:
        files = kind == _resource.RLIMIT_NOFILE
        setrlimit(kind, (min(limits[0], allowed), min(limits[1], allowed)) if files else limits)

    _resource.setrlimit = bounded


_allow_few_files()


def __getattr__(name: str) -> Any:
    """Imported when they are asked for: the command line needs none of them, and MLX takes seconds."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
