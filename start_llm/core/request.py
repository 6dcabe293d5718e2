"""The one request type that every dialect is translated into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from start_llm.core.errors import BadRequest
from start_llm.core.messages import Message, Picture, Tool

Dialect = Literal["chat", "completions", "messages", "responses", "ollama", "embeddings", "transcription", "speech"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Values are validated by the dialect."""

    temperature: float = 0.1  # 0 is greedy
    top_p: float = 0.9
    top_k: int = 40  # 0 is off
    min_p: float = 0.05
    repetition_penalty: float = 1.0  # 1.0 is off; looks back `repetition_context_size` tokens
    repetition_context_size: int = 256
    # `presence_penalty`, `frequency_penalty`: OpenAI's, over the generated tokens only
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias) pairs
    seed: int | None = None  # ``None`` draws from the process's generator
    repetition_guard: bool = True  # an answer that repeats itself is ended
    drafts: bool = True  # what may come next may be proposed and verified; it changes no word
    # names of fields that the client said nothing of
    left_open: frozenset[str] = field(default=frozenset(), compare=False)

    def with_defaults(self, values: Mapping[str, float]) -> Sampling:
        """`values` for fields that the client left open."""
        wanted: dict[str, Any] = {name: value for name, value in values.items() if name in self.left_open}
        return replace(self, **wanted) if wanted else self


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``auto``: the model decides; ``none``: no calls; ``required``: at least one; ``named``: this one."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What the visible text must look like. `schema` is set for ``json_schema`` only; `param` is its field's path."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None
    name: str = "response"
    param: str = field(default="response_format.json_schema.schema", compare=False)


@dataclass(frozen=True, slots=True)
class ToolSearch:
    """Tools that this server runs within the request: with them the model finds those tools that it is not shown."""

    fields: Mapping[str, Literal["query", "pattern"]]  # by name the argument: words, or a regular expression
    tools: tuple[Tool, ...]  # all of the request in their order, these and deferred ones too


def found_text(names: Iterable[str], problem: str = "") -> str:
    """What the model reads as a search's result."""
    return problem or "Tools now available: " + (", ".join(names) or "none")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated request."""

    id: str  # the response's id, made by the dialect (``chatcmpl-...``, ``msg_...``)
    dialect: Dialect
    model: str  # the name of the model that answers, or the one the client asked for where there is none of that name
    messages: tuple[Message, ...] = ()  # the conversation; empty for ``completions``
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    search: ToolSearch | None = None  # `tools` are then those that need not be found, or were found
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat()
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1  # answers to a prompt; they are the choices from number `first_choice` on
    first_choice: int = 0
    logprobs: int | None = None  # ``None``: none; N: the chosen token's and the N likeliest ones'
    stream: bool = False
    begun: str = ""  # how the answer begins: the client's own last message, which is no more in `messages`
    prompt: str | tuple[int, ...] | None = None  # raw text (or token ids) for ``completions``; ``None`` otherwise
    more_prompts: tuple[str | tuple[int, ...], ...] = ()  # answered beside `prompt`, as one answer
    thinking: bool | None = None  # ``None`` lets `DEFAULT_THINKING` decide
    reasoning_effort: str | None = None  # passed to templates that take it (gpt-oss)
    thinking_budget: int | None = None  # most reasoning tokens, or ``None``
    session: str | None = None  # the client's own id of the conversation, if it sent one
    continued: bool = False  # this server itself has put the history in front, as it was stored for this owner
    # who asks: a digest of the API key and of the client's ``user``, ``None`` where it sent neither
    owner: str | None = None
    client: str = ""  # the agent's name, as far as it shows who it is; for people only
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # extra variables for the chat template
    received: float = 0.0  # ``time.monotonic()`` at arrival, in seconds
    # the images whose marks stand in `messages`, by identity
    pictures: Mapping[str, Picture] = field(default_factory=dict, compare=False, repr=False)

    def by_prompt(self) -> list[ChatRequest]:
        """One for each of its prompts."""
        prompts = enumerate((self.prompt, *self.more_prompts))
        return [replace(self, prompt=prompt, more_prompts=(), first_choice=i * self.n) for i, prompt in prompts]


def begun_by_client(request: ChatRequest) -> ChatRequest:
    """The request with its last message as the beginning of the answer, if that is text of the assistant.

    Raises BadRequest: an answer in a format, or one that must be a call, begins with it; nothing stands before it.
    """
    last = request.messages[-1] if request.messages else None
    if last is None or last.role != "assistant" or last.tool_calls or not last.content:
        return request
    place = f"messages[{len(request.messages) - 1}]"
    wrong = ""
    if last.reasoning:
        wrong = "the answer continues this message, so it cannot have reasoning of its own"
    elif request.response_format.kind != "text":
        wrong = "an answer in a response format cannot continue a message; leave one of the two out"
    elif request.tool_choice.mode in ("required", "named"):
        wrong = "an answer that must be a call cannot continue a message; leave one of the two out"
    elif len(request.messages) == 1:
        wrong = "the answer continues this message, and no other message stands before it"
    if wrong:
        raise BadRequest(f"{place}: {wrong}.", param=place)
    return replace(request, messages=request.messages[:-1], begun=last.content)


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Words by which clients say how much a model thinks, the least first."""


def with_known_effort(request: ChatRequest, known: Sequence[str]) -> ChatRequest:
    """The request with that effort of `known`, what the model was trained with, that is nearest to what was asked."""
    asked = request.reasoning_effort or ("none" if request.thinking is False else "")
    if asked not in EFFORTS or not known:
        return request
    rank = EFFORTS.index
    effort = min(known, key=lambda one: abs(rank(one) - rank(asked)))
    variables = request.template_kwargs
    if "reasoning_effort" in variables:
        variables = {**variables, "reasoning_effort": effort}
    return replace(request, reasoning_effort=effort, template_kwargs=variables)


# --- side requests: what an agent asks the main model beside its conversation (a title, a commit message) ---
# Taking one for a conversation's turn costs time; taking a turn for one costs the user the answer of the model that was
# chosen. So all signs must be there, and each is something that the request itself says.

MOST_TOKENS = 1024
"""Of the answer, where a client says by that number that it wants little."""
MOST_CHARACTERS = 8000
"""Of all messages. More is work for the main model, and a small one may have no room for it."""
LITTLE_EFFORT = frozenset({"minimal", "low"})


def is_side_request(request: ChatRequest) -> bool:
    """A short instruction without tools that no turn came before, and whose client says that it wants little.

    It may still have named tools that were passed over while it was read: see `names_tools`.
    """
    if request.dialect not in {"chat", "messages", "responses"} or request.tools or request.n > 1:
        return False
    little = request.max_tokens is not None and request.max_tokens <= MOST_TOKENS
    if not little and request.reasoning_effort not in LITTLE_EFFORT:
        return False
    roles = {message.role for message in request.messages}
    if roles != {"system", "user"} or any(message.attachments or message.images for message in request.messages):
        return False
    return sum(len(message.content) for message in request.messages) <= MOST_CHARACTERS


def names_tools(body: Any) -> bool:
    """Whether a request's body tells of tools, be they shown to the model or not."""
    if not isinstance(body, dict):
        return False
    items = body.get("input")
    inside = isinstance(items, list) and any(isinstance(item, dict) and item.get("tools") for item in items)
    return bool(body.get("tools") or body.get("functions") or inside)
