"""Commands as text that a user can paste into any shell, in any folder."""

from __future__ import annotations

from start_llm.core.settings import Settings, stored_values
from start_llm.host.home import command, home


def hint(words: str, port: int | None) -> str:
    """The command `words` for the server on `port`; ``None``: for none.

    The port is named unless a plain command looks there anyway: by `.env`, not by the variables of this one shell.
    """
    usual = stored_values(home() / ".env").get("MLX_PORT") or Settings.model_fields["mlx_port"].default
    return f"{command()} {words}" + ("" if port is None or str(port) == str(usual) else f" --port {port}")
