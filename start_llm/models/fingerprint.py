"""Which checkpoint this is, told from its files. Knows no MLX; any thread."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from start_llm.models.checkpoint import INDEX, safetensors_header

_ENDS_BYTES = 1 << 20
_TENSOR_BYTES = 4096
_MOST_TENSORS = 4096
_WHOLE = frozenset({".json", ".jinja", ".py", ".model", ".txt"})
_SMALL = _WHOLE | {".tiktoken", ".jsonl"}
_MORE_TEMPLATES = "additional_chat_templates"


def tokenizer_key(folder: Path) -> str:
    """The same for two folders only if `tokenizer.read_tokenizer` makes the same of them. Raises OSError.

    Of all small files: which of them transformers reads depends on the others.
    """
    digest = hashlib.sha256()
    for path in sorted((*folder.iterdir(), *(folder / _MORE_TEMPLATES).glob("*"))):
        if path.suffix in _SMALL and not path.name.endswith(".safetensors.index.json") and path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + content)
    return digest.hexdigest()


def fingerprint(folder: Path, *, extra: str = "") -> str:
    """Identifies the KV that a model makes: weights, quantisation, tokenizer, template and mlx-lm version.

    The weights are sampled: the header, the size, the first and the last MiB of each file, and both ends of each
    tensor. A fine-tuned copy may differ from its base in a few layers only, which lie anywhere. What outlives the
    process needs `lasting`.

    Raises OSError.
    """
    digest = hashlib.sha256(f"mlx-lm {version('mlx-lm')} {extra}".encode())
    for file in sorted(folder.iterdir()):
        if file.suffix in _WHOLE and file.name != INDEX:
            digest.update(file.name.encode() + file.read_bytes())
        elif file.suffix == ".safetensors":
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb", buffering=0) as stream:
                for at, count in _samples(file, size):
                    stream.seek(at)
                    digest.update(stream.read(count))
    return digest.hexdigest()


def _samples(file: Path, size: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of each; of a file with very many tensors, those of some thousand of them."""
    yield 0, _ENDS_BYTES
    yield max(0, size - _ENDS_BYTES), _ENDS_BYTES
    header = safetensors_header(file)
    if header is None:
        return
    tensors = sorted((tensor.begin, tensor.end) for tensor in header.tensors.values())
    yield 0, header.length
    for begin, end in tensors[:: 1 + len(tensors) // _MOST_TENSORS]:
        yield header.length + begin, min(_TENSOR_BYTES, end - begin)
        yield header.length + max(begin, end - _TENSOR_BYTES), min(_TENSOR_BYTES, end - begin)


Stamps = frozenset[tuple[str, int, int, int, int, int]]
"""Of each file: path, device, inode, bytes, times of its content and of its inode (ns)."""


def stamps_of(folder: Path) -> Stamps:
    """Of a folder's weights. Raises OSError."""
    return frozenset(_stamp(path) for path in folder.glob("*.safetensors"))


def _stamp(path: Path) -> tuple[str, int, int, int, int, int]:
    found = path.stat()
    return str(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def lasting(fingerprint: str, stamps: Stamps) -> str:
    """Identifies KV that outlives the process. Samples do not show a row that was mended in the middle of a tensor, but
    no program writes into a file without another time of its inode. A copy begins anew."""
    return f"{fingerprint} {sorted((Path(path).name, *rest) for path, _, _, *rest in stamps)}"
