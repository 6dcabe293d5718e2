"""Random damage to files, as a bad disk, a careless program or a full one leaves it."""

from __future__ import annotations

import random
from pathlib import Path


def damage_somewhere(folder: Path, chance: random.Random) -> None:
    """One random damage to one of the files in `folder`."""
    path = chance.choice([path for path in folder.iterdir() if path.is_file()])
    data = bytearray(path.read_bytes())
    kind = chance.choice(["bytes", "page", "cut", "zeros", "gone", "longer"])
    at = chance.randrange(max(len(data), 1))
    if kind == "bytes":
        for _ in range(chance.choice([1, 10, 200])):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
    elif kind == "page":
        at -= at % 4096
        data[at : at + 4096] = chance.randbytes(len(data[at : at + 4096]))
    elif kind == "cut":
        del data[at:]
    elif kind == "zeros":
        data[at:] = bytes(len(data) - at)
    elif kind == "longer":
        data += chance.randbytes(5000)
    if kind == "gone" or chance.random() < 0.3:
        path.unlink()
    if kind != "gone":
        path.write_bytes(data)
