"""transformers is imported with less computing, and is what it is without that."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from start_llm.host import importing

SHOW = """
import json, sys
ORDINARY = sys.argv[1] == "ordinary"
if not ORDINARY:
    from start_llm.host.importing import import_transformers
    assert import_transformers() and not import_transformers()
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils
import transformers.models.auto as auto
inside = transformers.utils.import_utils
models = transformers.models
kept = inside.create_import_structure_from_path.cache_info()
assert ORDINARY or kept.currsize > 300 and kept.misses == kept.currsize, "no folder is read twice"
print(json.dumps([sorted(dir(transformers)), sorted(dir(models)), sorted(dir(auto)), transformers.__version__,
    AutoTokenizer.__module__, chat_template_utils.__name__, sorted(transformers._class_to_module.items())]))
"""


def shown(how: str) -> Any:
    command = [sys.executable, "-c", SHOW, how]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.live
def test_it_is_the_same_module() -> None:
    assert shown("quick") == shown("ordinary")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ""),
        ("x = 1\n", ""),
        ("x = '__all__'\n", ""),
        ('__all__ = ["a"]\n', '__all__ = ["a"]\n'),
        ('import x\n__all__ = ["a"]', '__all__ = ["a"]'),
        ('__all__ = ["a"]\nx = 1\n__all__ = ["b"]\n', '__all__ = ["b"]\n'),
    ],
)
def test_names_are_read_from_the_last_line_that_has_them(text: str, found: str) -> None:
    assert importing._from_names(text) == found
