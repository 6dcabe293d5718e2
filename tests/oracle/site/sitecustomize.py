"""Shows mlx-vlm the oracle with eyes in the place of one of its models, so that a server serves it like any other.

Python imports this at its start where its folder is on the path; a test imports it itself.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

NAME = "mlx_vlm.models.llava_bunny"
FILE = Path(__file__).parents[1] / "vlm_file.py"


class Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, FILE) if name == NAME else None


sys.meta_path.insert(0, Finder)
