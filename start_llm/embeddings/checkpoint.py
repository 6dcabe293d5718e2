"""What the files of an encoder (a sentence-transformers checkpoint) say. Knows no MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from start_llm.core.errors import NotSupported
from start_llm.models.catalog import snapshot
from start_llm.models.checkpoint import context_length, read_config, read_json, whole_header

Pooling = Literal["cls", "mean", "max", "last"]

MOST_TOKENS = 8192  # tokens of one text: it goes through the model in one step, whatever its own limit is
_MODES: dict[str, Pooling] = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
    "max": "max",  # as sentence-transformers 6 writes them: {"pooling_mode": "cls"}
}
_SHIFTED = frozenset({"xlm-roberta", "roberta"})  # architectures whose positions begin behind the padding token's id


@dataclass(frozen=True)
class EncoderFiles:
    name: str  # the folder's, or the repository's without its owner
    folder: Path
    config: dict[str, Any]
    tokenizer: Tokenizer
    pooling: Pooling | None  # how the tokens' vectors become the text's; ``None``: as the architecture does it
    most_tokens: int  # of a text, special tokens included
    vocabulary: int  # token ids are below it
    before: tuple[int, ...]  # special tokens in front of every text
    after: tuple[int, ...]  # special tokens behind every text
    weight_bytes: int

    def tokens_of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """A text's tokens with the special ones around them."""
        return (*self.before, *ids, *self.after)


def whole_encoder(repository: str) -> Path | None:
    """The repository's folder, if all that an encoder or an audio model needs of it is here."""
    folder = snapshot(repository)
    if folder is None or not all((folder / name).is_file() for name in ("config.json", "tokenizer.json")):
        return None
    try:
        headers = [whole_header(path) for path in folder.glob("model*.safetensors")]
    except (OSError, ValueError):
        return None
    return folder if headers else None


def read_encoder(source: str, folder: Path) -> EncoderFiles:
    """Raises NotSupported: with what is missing or not known."""
    try:
        config = read_config(folder)
    except (OSError, ValueError) as error:
        raise NotSupported(f"{source}: its config.json cannot be read ({error}).") from error
    if not (folder / "tokenizer.json").is_file():
        raise NotSupported(f"{source} has no tokenizer.json, which embeddings need.")
    weights = list(folder.glob("model*.safetensors"))
    if not weights:
        raise NotSupported(f"{source} has no weights that MLX reads (model*.safetensors).")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = int(config.get("vocab_size") or 0)
    highest = max(tokenizer.get_vocab().values(), default=0)
    if highest >= vocabulary:
        raise NotSupported(f"{source}: its tokenizer knows the token {highest}, its weights only {vocabulary} tokens.")
    before, after = _special_tokens(tokenizer)
    return EncoderFiles(
        name=source.rstrip("/").rsplit("/", 1)[-1],
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        pooling=_pooling(source, folder, str(config.get("model_type"))),
        most_tokens=_most_tokens(folder, config),
        vocabulary=vocabulary,
        before=before,
        after=after,
        weight_bytes=sum(path.stat().st_size for path in weights),
    )


def _special_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those that the tokenizer puts in front of a text and behind it."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    return (), ()


def _most_tokens(folder: Path, config: dict[str, Any]) -> int:
    """What it was trained for; never more than it has positions."""
    positions = context_length(config)
    if config.get("model_type") in _SHIFTED:
        positions -= int(config.get("pad_token_id") or 0) + 1
    trained = _json(folder / "sentence_bert_config.json").get("max_seq_length")
    most = min(positions, MOST_TOKENS)
    return min(most, trained) if isinstance(trained, int) and trained > 0 else most


def _pooling(source: str, folder: Path, architecture: str) -> Pooling | None:
    """Raises NotSupported: the checkpoint wants what is not done here."""
    modules = _json(folder / "modules.json")
    listed = [module for module in (modules if isinstance(modules, list) else []) if isinstance(module, dict)]
    kinds = {str(module.get("type")).rsplit(".", 1)[-1]: module for module in listed}
    odd = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    if odd == ["Dense"] and architecture == "gemma3_text":
        return None  # mlx-embeddings has these layers in the model
    if odd:
        raise NotSupported(f"{source} computes {', '.join(odd)} on top of its pooling, which is not done here.")
    path = str(kinds["Pooling"].get("path")) if "Pooling" in kinds else "1_Pooling"
    return _mode(source, _json(folder / Path(path).name / "config.json"))


def _mode(source: str, settings: Any) -> Pooling | None:
    """What a pooling's configuration says; ``None``: nothing. Raises NotSupported."""
    set_ones = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    modes = [name.removeprefix("pooling_mode_") for name in set_ones]
    if named := settings.get("pooling_mode"):
        modes = [str(name) for name in (named if isinstance(named, list) else [named])]
    if not modes:
        return None
    if len(modes) > 1 or modes[0] not in _MODES:
        raise NotSupported(f"{source} pools by {', '.join(sorted(modes))}; known is one of {', '.join(_MODES)}.")
    return _MODES[modes[0]]


def _json(path: Path) -> Any:
    """A small file that need not be there."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}
