"""`launch CLIENT`: runs an installed coding agent against this server, with a configuration of its own."""

from start_llm.launch.cli import main

__all__ = ["main"]
