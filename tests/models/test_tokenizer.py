"""A tokenizer that is read here is mlx-lm's own, and its vocabulary is not copied each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from start_llm.models import tokenizer
from start_llm.models.fingerprint import tokenizer_key
from start_llm.models.tokenizer import read_tokenizer
from start_llm.prompt.hf import HFTemplate
from tests.kinds import some
from tests.models.large import make_large
from tests.oracle import build_oracle

TEXT = "Hello, wörld: 中文 \U0001f642\n\n  x <|im_end|> <think>"
SPM: dict[str, Any] = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
STRIPPED = {**SPM, "decoders": [*SPM["decoders"], {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
TEMPLATES = {
    "json": "<tool_call>{{ tool_call.name }}",
    "glm": "<arg_key>",
    "mistral": "[TOOL_CALLS]",
    "none": "{{ messages }}",
}
DECODERS: dict[str, Any] = {"spm": SPM, "stripped": STRIPPED, "fused": {"type": "Fuse"}, "bare": None}
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "named parser": ("tokenizer_config.json", {"tool_parser_type": "kimi_k2"}),
    "template in code": ("tokenizer_config.json", {"chat_template_type": "deepseek_v32"}),
    "a module's defaults": ("config.json", {"model_type": "muse_spark"}),
}


def change(folder: Path, name: str, **changes: Any) -> Path:
    settings = json.loads((folder / name).read_text("utf-8"))
    (folder / name).write_text(json.dumps({**settings, **changes}), "utf-8")
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_large(tmp_path_factory.mktemp("large") / "large", 1000)


@pytest.fixture(
    params=["oracle", "large", pytest.param("smol", marks=pytest.mark.thorough), *DECODERS, *TEMPLATES, *NAMED]
)
def folder(request: pytest.FixtureRequest, tmp_path: Path, smol_path: Path) -> Path:
    kind = request.param
    if kind == "smol":
        return smol_path
    if kind == "oracle":
        return build_oracle(tmp_path / "oracle")
    made = make_large(tmp_path / "large", 1000)
    if kind in DECODERS:
        settings = change(made, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        return change(settings, "tokenizer.json", decoder=DECODERS[kind])
    if kind in NAMED:
        name, changes = NAMED[kind]
        return change(made, name, **changes)
    if kind in TEMPLATES:
        return change(made, "tokenizer_config.json", chat_template=TEMPLATES[kind])
    return made


@pytest.mark.parametrize("eos", some([[2, 5], None, 2]))
def test_it_is_mlx_lms_own(folder: Path, eos: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "end_tokens", lambda _: eos)
    ours, theirs = read_tokenizer(folder), load_tokenizer(folder, eos_token_ids=eos)
    assert type(ours) is type(theirs) and type(ours._tokenizer) is type(theirs._tokenizer)
    names = {name for name in vars(theirs) if name not in {"_tokenizer", "_detokenizer"}}
    assert names == vars(ours).keys() - {"_tokenizer", "_detokenizer"}
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert type(ours._detokenizer) is type(theirs._detokenizer)
    assert getattr(ours._detokenizer, "trim_space", None) == getattr(theirs._detokenizer, "trim_space", None)
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert ours.chat_template == theirs.chat_template
    tokens = theirs.encode(TEXT)
    assert ours.encode(TEXT) == tokens and ours.decode(tokens) == theirs.decode(tokens)
    said = [_said(each, tokens) for each in (ours, theirs)]
    assert said[0] == said[1]


def _said(tokenizer: Any, tokens: list[int]) -> str:
    detokenizer = tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return str(detokenizer.text)


def test_the_vocabulary_is_made_once(large: Path) -> None:
    tokenizer = read_tokenizer(large)._tokenizer
    assert tokenizer.get_vocab() is tokenizer.get_vocab()


def test_it_ends_where_the_makers_say(tmp_path: Path) -> None:
    """As mlx-lm: what ``generation_config.json`` says counts before ``config.json``."""
    folder = make_large(tmp_path / "large", 500)
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    assert {2, 9} & read_tokenizer(folder).eos_token_ids == {2}
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    assert {2, 9} < read_tokenizer(folder).eos_token_ids, "and its own"


def test_a_template_in_the_older_file_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    folder = change(make_large(tmp_path / "large", 500), "tokenizer_config.json", chat_template=None)
    assert tokenizer.writing_hints(read_tokenizer(folder)).template is False
    (folder / "chat_template.json").write_text('{"chat_template": "older {{ messages[0].content }}"}')
    wrapper = read_tokenizer(folder)
    assert HFTemplate(wrapper._tokenizer).render([{"role": "user", "content": "x"}], None, True) == "older x"
    assert tokenizer.writing_hints(wrapper).template
    change(folder, "tokenizer_config.json", chat_template="newer")
    assert read_tokenizer(folder).chat_template == "newer"


def test_the_key_is_that_of_the_small_files(large: Path, tmp_path: Path) -> None:
    key = tokenizer_key(large)
    assert key == tokenizer_key(make_large(tmp_path / "same", 1000))
    other = make_large(tmp_path / "other", 1000)
    (other / "model.safetensors").write_bytes(b"other weights")
    (other / "model.safetensors.index.json").write_text("{}")
    assert key == tokenizer_key(other)
    seen = {key}
    for name in ("chat_template.jinja", "additional_chat_templates/rag.jinja", "added_tokens.json", "config.json"):
        (other / name).parent.mkdir(exist_ok=True)
        (other / name).write_text("{}")
        seen.add(tokenizer_key(other))
    assert len(seen) == 5
