"""A supervisor of the engine in `engine.py`. Run as a program."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from start_llm.service import supervisor
from start_llm.service.place import Place

ENGINE = Path(__file__).with_name("engine.py")


def supervise(folder: Path, pauses: list[float], more: dict[str, float]) -> int:
    # What a place needs of the settings; the real ones take half a second to import.
    settings = SimpleNamespace(cache_dir=folder, log_root=folder, mlx_port=1, mlx_host="127.0.0.1")
    place = Place(settings)  # type: ignore[arg-type]
    assert place.lock.take()
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    command = [sys.executable, "-I", "-S", str(ENGINE), str(folder / "script")]
    for name, value in {"pauses": pauses, **more}.items():
        setattr(supervisor, name.upper(), value)
    try:
        return supervisor.Supervisor(place, command, {"mlx_port": "1"}).run()
    finally:
        place.lock.drop()


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1]), *json.loads(sys.argv[2])))
