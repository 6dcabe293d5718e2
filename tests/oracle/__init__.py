"""A model that tells what it sees: its KV is the token history. The main test double of this project.

    folder = build_oracle(tmp_path / "oracle", "hybrid")
    oracle = Oracle.load(folder)
    oracle.say("[[truth]]") == expected_truth(oracle.prompt("[[truth]]"))

`answers.py` tells the cues, `templates.py` the chat templates, `model_file.py` the environment variables.
"""

from tests.oracle.build import CONTEXT, LAYERS, Kind, build_oracle, make_tokenizer
from tests.oracle.log import LoggedPass, mark, passes, prompt_work, work_done
from tests.oracle.oracle import MISMATCH, Oracle, expected_truth, script
from tests.oracle.templates import TEMPLATES

__all__ = [
    "CONTEXT", "LAYERS", "MISMATCH", "TEMPLATES", "Kind", "LoggedPass", "Oracle", "build_oracle", "expected_truth",
    "make_tokenizer", "mark", "passes", "prompt_work", "script", "work_done",
]  # fmt: skip
