"""Which checkpoint this is, told from its files. Knows no MLX; any thread."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from start_llm.files.atomic import write_atomic
from start_llm.models.checkpoint import INDEX, safetensors_header

_ENDS_BYTES = 1 << 20
_TENSOR_BYTES = 4096
_READ_BYTES = 8 << 20
LITTLE_BYTES = 64 << 20
"""Weights of so many bytes are read at once: that takes a twentieth of a second."""
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
    process needs `WeightsDigest`, too.

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


class WeightsDigest:
    """SHA-256 of every byte of weights. Samples do not show a row that was mended in the middle of a tensor.

    Reading 16 GB takes many seconds, so it is done once: the digest is kept in a file that the stamps name.

    Args:
        stamps: of the files, as they were before they were loaded.
        folder: of KV and of the kept digests; made with mode 0700 if it is missing.

    Attributes:
        value: the digest in hex; empty: not known yet.
    """

    def __init__(self, stamps: Stamps, folder: Path) -> None:
        self._stamps, self.folder = stamps, folder
        self._kept = folder / f"weights-{hashlib.sha256(repr(sorted(stamps)).encode()).hexdigest()[:32]}"
        self.value = ""
        with suppress(OSError, ValueError):
            kept = self._kept.read_text("ascii")
            self.value = kept if re.fullmatch("[0-9a-f]{64}", kept) else ""
        if not self.value and sum(stamp[3] for stamp in stamps) <= LITTLE_BYTES:
            with suppress(OSError):
                self.compute()

    def compute(self, is_over: Callable[[], bool] = lambda: False) -> str:
        """Reads all bytes; empty once `is_over`. Raises OSError: they cannot be read, or are others by now."""
        files = list[tuple[str, str]]()
        for stamp in self._stamps:
            path, digest = Path(stamp[0]), hashlib.sha256()
            with path.open("rb", buffering=0) as file:
                while data := file.read(_READ_BYTES):
                    if is_over():
                        return ""
                    digest.update(data)
            if _stamp(path) != stamp:
                raise OSError(f"{path.name} was changed since it was loaded")
            files.append((path.name, digest.hexdigest()))
        self.value = hashlib.sha256(repr(sorted(files)).encode()).hexdigest()
        with suppress(OSError):  # then it is read again at the next start
            self._kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(self._kept, self.value)
        return self.value
