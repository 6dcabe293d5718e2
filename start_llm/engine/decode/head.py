"""A model with something that drafts for it: an MTP head, or a small model of the same vocabulary. Model thread only.

`HeadedModel` has the call interface of a model of mlx-lm, so nobody else needs to know of the head. What the head needs
are more layers in the row's cache: its own KV, one entry a token, and `HiddenTail`. The entry of token `i` is made of
that token and the model's hidden state in front of it, so it is cut, shared, restored and stored like any other KV
(docs/drafts.md). Drafts are drawn by the row's own sampler, with the noise that the model's token is drawn with.

Uses of models' internals: the `model` inside of a language model returns the hidden states in front of the output
projection, which the head applies. Those of heads are in `upstream_heads`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.utils import load_model as mlx_load_model

from start_llm.core.errors import NotSupported
from start_llm.core.prompt import FIRST_IMAGE_ID, ImageSpan
from start_llm.engine.decode.gate import MOST_WIDE
from start_llm.engine.decode.row import Cache, Remembering, Sampler
from start_llm.engine.decode.upstream_heads import QwenHead, in_vocabulary, load_head
from start_llm.engine.vision import LanguageAlone
from start_llm.kvcache.kinds import leaves
from start_llm.models.checkpoint import LIBRARY_ERRORS
from start_llm.models.drafters import DrafterFiles
from start_llm.models.stepwise import read_weights


class SmallModel:
    """A text model of mlx-lm that guesses the token behind each of some tokens. It reads these themselves, as the large
    one does, and keeps what it needs of those before in layers of the row's cache. `QwenHead` has the same methods.
    """

    reads_hidden = False  # it is not given the model's hidden states

    def __init__(self, model: Any, vocabulary: int) -> None:
        """`vocabulary`: tokens of the large model. Raises NotSupported: its cache cannot be cut at every token."""
        self._model, self._vocabulary = model, vocabulary
        self._own_vocabulary = int(model(mx.array([[0]])).shape[-1])
        if any(type(leaf) is not KVCache for leaf in leaves(self.make_cache())):
            raise NotSupported("its KV cannot be cut at every token, so it cannot draft")

    def make_cache(self) -> Cache:
        return list(make_prompt_cache(self._model))

    def parameters(self) -> Any:
        return self._model.parameters()

    def extend(self, tokens: mx.array, hidden: mx.array | None, cache: Cache) -> mx.array:
        """Adds an entry for each token.

        Args:
            tokens: [rows, tokens].
            hidden: [rows, tokens, width], the model's states in front of these tokens, or guesses of them.

        Returns:
            What `logits` takes; of an MTP head also a guess of the hidden states behind the tokens. [rows, tokens, any]
        """
        return cast(mx.array, self._model(mx.minimum(tokens, self._own_vocabulary - 1), cache=cache))

    def logits(self, state: mx.array) -> mx.array:
        """Of the tokens that follow, [rows, tokens, vocabulary]."""
        return in_vocabulary(state, self._vocabulary)


class HiddenTail(ArraysCache):  # type: ignore[misc]
    """A row's cache layer: the model's hidden states of its newest pass, [rows, tokens, width].

    Only the last one is stored, in checkpoints. `transient`: it is not stored at all, for the model's other layers have
    no checkpoints; after a restore one entry of the head is then made without a hidden state.
    """

    def __init__(self, size: int = 1, *, transient: bool = False) -> None:
        super().__init__(size)
        self.transient = transient

    @property
    def state(self) -> Any:
        newest = self.cache[0]
        return [None if newest is None else newest[:, -1:]], self.left_padding, self.lengths

    @state.setter
    def state(self, value: Any) -> None:
        self.cache, self.left_padding, self.lengths = value

    def keep(self, hidden: mx.array) -> None:
        """Keeps all states of a pass that may be taken back in part; of a longer pass only the last.

        `hidden`: [rows, tokens, width].
        """
        self.cache[0] = hidden if hidden.shape[1] <= MOST_WIDE else mx.contiguous(hidden[:, -1:])

    def before(self, behind: mx.array) -> mx.array:
        """The hidden states in front of each token of a pass, [rows, tokens, width]. `behind`: those behind each."""
        first = mx.zeros_like(behind[:, :1]) if self.cache[0] is None else self.cache[0][:, -1:]
        return mx.concatenate([first, behind[:, :-1]], axis=1)

    def cut(self, tokens: int) -> None:
        """Drops the states of the newest pass's last `tokens` tokens. The pass computed more tokens than these."""
        self.cache[0] = self.cache[0][:, :-tokens]

    def keep_behind(self, tokens: Sequence[int]) -> None:
        """Keeps of each row's newest pass the state behind so many tokens, one at least."""
        last = mx.array(list(tokens))[:, None, None] - 1
        self.cache[0] = mx.take_along_axis(self.cache[0], last, axis=1)

    @classmethod
    def merge(cls, caches: Sequence[HiddenTail]) -> HiddenTail:
        """For mlx-lm's batch: the rows' layers in one, each with its newest state only."""
        lasts = []
        for cache in caches:
            lasts.append(cls(transient=cache.transient))
            lasts[-1].cache = cache.state[0]
        merged = cast(HiddenTail, super().merge(lasts))
        merged.transient = caches[0].transient
        return merged

    def extract(self, idx: int) -> HiddenTail:
        row = HiddenTail(transient=self.transient)
        row.cache = [None if array is None else array[idx : idx + 1] for array in self.cache]
        return row


class HeadedModel:
    """``model(tokens, cache=...)`` gives logits ``[rows, tokens, vocabulary]``, as the model without a head does.

    Args:
        model: of mlx-lm, or in the shape of one (`engine.vision`).
        inner: the module inside of it that returns the hidden states, for a drafter that reads them. The model is
            computed by it and the drafter's `logits` then.

    Attributes:
        drafter: what drafts for it.
    """

    def __init__(self, model: Any, drafter: SmallModel | QwenHead, inner: Any) -> None:
        self.drafter, self._inner = drafter, inner
        self._newest: mx.array | None = None  # hidden states of the newest pass, [rows, tokens, width]
        if not drafter.reads_hidden:
            self._model = self._compute = model
        elif isinstance(model, LanguageAlone):
            self._model = self._compute = model.computed_by(self._by_inner)
        else:
            self._model, self._compute = model, self._by_inner
        own = list(make_prompt_cache(model))
        self._own = len(own)
        self._transient = all(type(leaf) is KVCache for leaf in leaves(own))

    def make_cache(self) -> Cache:
        tail = [HiddenTail(transient=self._transient)] if self.drafter.reads_hidden else []
        return [*make_prompt_cache(self._model), *self.drafter.make_cache(), *tail]

    def __call__(self, inputs: mx.array, cache: Cache | None = None) -> mx.array:
        cache = self.make_cache() if cache is None else cache
        own = cache[: self._own]
        return self._with_entries(inputs, self._compute(inputs, cache=own), own, cache)

    def see(self, tokens: Sequence[int], cache: Cache, images: Sequence[ImageSpan]) -> mx.array:
        """Logits of one row that holds whole images; their starts count from the first of `tokens`."""
        own = cache[: self._own]
        return self._with_entries(mx.array(list(tokens))[None], self._model.see(tokens, own, images), own, cache)

    def ahead(self, cache: Cache, tokens: int) -> mx.array | None:
        """The hidden states behind the first `tokens` tokens of the newest pass, for `propose`."""
        tail = cache[-1]
        return tail.cache[0][:, :tokens] if isinstance(tail, HiddenTail) else None

    def propose(
        self, cache: Cache, tokens: Sequence[int], ahead: mx.array | None, count: int, sampler: Sampler
    ) -> list[int]:
        """What may follow `tokens`; the cache is left as it was. Waits for the device.

        Args:
            tokens: the newest tokens of one row, in no KV yet; one at least.
            ahead: the hidden states behind all of them but the last, [1, len(tokens) - 1, width], where they are known.
            count: how many tokens to propose.
            sampler: of the row; it is left as it was.
        """
        tail, layers = cache[-1], self._layers_of(cache)
        hidden = None
        if isinstance(tail, HiddenTail):
            hidden = tail.cache[0][:, -1:] if ahead is None else mx.concatenate([tail.cache[0][:, -1:], ahead], axis=1)
        inner = getattr(sampler, "inner", sampler)
        remembering = inner if isinstance(inner, Remembering) else None
        saved = remembering.save() if remembering is not None else None
        state = self.drafter.extend(mx.array(list(tokens))[None], hidden, layers)[:, -1:]
        drawn: list[mx.array] = []
        for _ in range(count):
            if drawn:
                state = self.drafter.extend(drawn[-1][None], state, layers)
            logits = self.drafter.logits(state)[:, -1, :]
            drawn.append(sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
        if remembering is not None:
            remembering.restore(saved)
        for leaf in leaves(layers):
            leaf.trim(len(tokens) + count - 1)
        return cast(list[int], mx.concatenate(drawn).tolist())

    def _by_inner(self, inputs: mx.array, **more: Any) -> mx.array:
        """Logits of the model; `more`: as its inner module takes it."""
        self._newest = self._inner(inputs, **more)
        return self.drafter.logits(self._newest)

    def _layers_of(self, cache: Cache) -> Cache:
        """The drafter's own."""
        return cache[self._own : len(cache) - self.drafter.reads_hidden]

    def _with_entries(self, tokens: mx.array, logits: mx.array, own: Cache, cache: Cache) -> mx.array:
        """`logits`, with the drafter's entries written. Computed together: else entries would be put off for ever."""
        cache[: self._own] = own  # some models put new layers into the list
        tokens = mx.where(tokens >= FIRST_IMAGE_ID, 0, tokens)
        hidden, layers = None, self._layers_of(cache)
        if self._newest is not None:
            hidden = cache[-1].before(self._newest)
            cache[-1].keep(self._newest)
            self._newest = None
        self.drafter.extend(tokens, hidden, layers)
        written = [array for leaf in leaves(layers) for _, array in tree_flatten((leaf.keys, leaf.values))]
        return cast(mx.array, mx.depends([logits], written)[0])  # type: ignore[no-untyped-call]


def add_drafter(
    model: Any, language: Any, files: DrafterFiles, trust_code: bool = False
) -> Generator[float, None, HeadedModel]:
    """`model` with a drafter, whose weights are read some at a step.

    Args:
        model: of mlx-lm, or in the shape of one.
        language: the language model that it computes with, of mlx-lm or mlx-vlm.

    Raises:
        NotSupported: it cannot be read, or does not fit; the message ends a sentence.
    """
    try:
        vocabulary = model(mx.array([[0]]), cache=make_prompt_cache(model)).shape[-1]  # nothing is computed
        drafter: SmallModel | QwenHead
        if files.kind == "model":
            small = mlx_load_model(files.folder, lazy=True, trust_remote_code=trust_code)[0]
            yield from read_weights(small)
            drafter = SmallModel(small, vocabulary)
        else:
            drafter = yield from load_head(files.folder, language)
        made = HeadedModel(model, drafter, None if files.kind == "model" else language.model)
        cache = made.make_cache()  # it is tried once, so that what does not fit shows now
        made(mx.array([[0, 0]]), cache=cache)
        made.propose(cache, [0], None, 2, lambda logprobs: mx.argmax(logprobs, axis=-1))
    except LIBRARY_ERRORS as error:
        raise NotSupported(f"it cannot be used: {type(error).__name__}: {str(error)[:300]}") from error
    return made


def language_of(model: Any) -> Any:
    """The language model inside of a model of mlx-lm or mlx-vlm."""
    return getattr(model, "language_model", model)
