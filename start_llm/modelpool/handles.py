"""Makes the `ModelHandle` of a loaded model: prompt pipeline, parsers, grammars."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from start_llm.chat.handle import ModelHandle
from start_llm.core.errors import NotSupported
from start_llm.core.prompt import Prompt
from start_llm.core.request import ChatRequest
from start_llm.core.settings import Settings
from start_llm.core.work import Constraint
from start_llm.engine.decode.constraint import Grammars
from start_llm.engine.decode.sampling import check_tokens
from start_llm.engine.patience import Patience
from start_llm.engine.runtime import TextRuntime
from start_llm.parsing.registry import RAW_STRINGS, OutputStyle
from start_llm.parsing.structured import is_free, make_constraint, model_text
from start_llm.prompt.clients import Clients
from start_llm.prompt.drafts import Views
from start_llm.prompt.hf import HFTemplate, HFTokenizer
from start_llm.prompt.pipeline import Pipeline
from start_llm.prompt.recorder import Publish, Recorder
from start_llm.prompt.traits import TemplateError
from start_llm.prompt.turndb import TurnDB

GRAMMAR_THREADS = 2
GRAMMAR_SECONDS = 4.0


def make_handle(
    settings: Settings,
    clients: Clients,
    runtime: TextRuntime,
    model: str,
    anchor: Callable[[Prompt, str, str | None], None],
    publish: Publish | None = None,
) -> ModelHandle:
    """Raises NotSupported if the model's chat template cannot be used.

    `model`: its name on the model thread. `anchor`: takes a guess of a conversation's next request, its session
    and its owner. `publish`: tells routers what is held.
    """
    loaded, capabilities = runtime.loaded, runtime.loaded.capabilities
    # The closures below keep tokenizers only: what holds a model beyond its end holds its memory.
    tokenizer, wrapper = loaded.tokenizer, loaded.wrapper
    folder = settings.disk_dir  # the conversation tree lives and dies with the KV on disk
    encoder = HFTokenizer(tokenizer, eos_ids=loaded.eos)
    try:
        pipeline = Pipeline(
            HFTemplate(tokenizer),
            encoder,
            settings=settings,
            clients=clients,
            store=TurnDB(folder / f"turns-{loaded.fingerprint[:16]}.sqlite3") if folder is not None else None,
            context=loaded.context,
            eyes=loaded.vision,
            traits=capabilities.traits,
        )
    except TemplateError as error:
        raise NotSupported(f"The chat template of {loaded.source} cannot be used: {error}") from error
    style, vocab = loaded.style, tokenizer.get_vocab()
    opens, closes = vocab.get(style.reasoning.start), vocab.get(style.reasoning.end)
    return ModelHandle(
        name=loaded.name,
        context=loaded.context,
        pipeline=pipeline,
        recorder=Recorder(pipeline, anchor if settings.reanchor == "on" else None, publish),
        style=style,
        detokenizer=lambda: wrapper.detokenizer,
        token_text=lambda token: str(tokenizer.decode([token])),
        check=partial(_check, len(tokenizer)),
        constraint=_constraints(settings, runtime.grammars, style, tokenizer),
        eyes=loaded.vision,
        efforts=capabilities.family.value.efforts,
        think_tokens=None if opens is None or closes is None else (opens, closes),
        views=Views(encoder.encode, escaped=style.tools.id not in RAW_STRINGS),
        model=model,
        thinks=settings.default_thinking,
        sampling={name: fact.value for name, fact in capabilities.sampling.items()},
    )


def _check(size: int, request: ChatRequest) -> None:
    """Raises BadRequest for a token id that a vocabulary of this `size` does not have."""
    check_tokens("logit_bias", (token for token, _ in request.sampling.logit_bias), size)
    if isinstance(request.prompt, tuple):
        check_tokens("prompt", request.prompt, size, code="invalid_value")


def _constraints(
    settings: Settings, grammars: Grammars, style: OutputStyle, tokenizer: Any
) -> Callable[[ChatRequest, bool], Constraint | None]:
    patience = Patience("grammar", threads=GRAMMAR_THREADS, seconds=GRAMMAR_SECONDS)
    model = model_text(style.tools.id, style.reasoning, tokenizer)

    def compiled(request: ChatRequest, in_reasoning: bool) -> Constraint | None:
        thinks = settings.default_thinking if request.thinking is None else request.thinking
        constraint = make_constraint(request, model, in_reasoning=in_reasoning, may_reason=thinks)
        return None if constraint is None else grammars.prepare(constraint)

    def bounded(request: ChatRequest, in_reasoning: bool) -> Constraint | None:
        if is_free(request):
            return None
        grammars.make_vocabulary()  # however long it takes: that is not the request's fault
        return patience.run(compiled, request, in_reasoning)

    return bounded
