"""Every error that a client can see. One tree; dialects map it to a body once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Self

NOT_LOADABLE = "model_not_loadable"
"""The `refusal` of a request whose model could not be loaded."""


class Explained(Exception):
    """The message is a sentence for people: why something cannot be done, and what to do.

    A command that raises it prints that, and the program ends with `exit_code`.
    """

    exit_code = 1


class StartLLMError(Explained):
    """Base. `param` names the field of the request; `code` is a stable machine-readable word.

    `refusal`: the request is sound, and it is this server that cannot answer it now: the word for why. Another node
    could. `retry_after`: seconds.

    A subclass gives its status, type, code, refusal and `retry_after` in the line of its name.
    """

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after: float | None = None
    refusal: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        if retry_after is not None:
            self.retry_after = retry_after

    def __init_subclass__(cls, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(cls, name, value)

    def again(self) -> Self:
        """The same error without its traceback, to be kept or to be raised once more.

        A traceback holds all that the functions in it held (a model's weights, a request's body), and it grows by
        whoever raises the error again.
        """
        same = type(self).__new__(type(self), *self.args)
        same.__dict__.update(self.__dict__)
        return same


class BadRequest(StartLLMError, status=400, type="invalid_request_error"):
    """It names the field."""


class ContextLengthExceeded(BadRequest, code="context_length_exceeded", refusal="context_length_exceeded"):
    """`at_least`: the prompt was not counted to its end."""

    def __init__(self, *, prompt: int, asked: int, limit: int, at_least: bool = False) -> None:
        needs = "needs at least" if at_least else "needs"
        super().__init__(
            f"This request {needs} {prompt + asked} tokens ({prompt} in the prompt, {asked} for the answer), "
            f"but the limit is {limit} tokens. Shorten the conversation or lower max_tokens.",
            param="messages",
        )
        self.prompt = prompt
        self.asked = asked
        self.limit = limit


class Unauthorized(StartLLMError, status=401, type="authentication_error", code="invalid_api_key"): ...


class Forbidden(StartLLMError, status=403, type="permission_error", code="forbidden"): ...


class NotFound(StartLLMError, status=404, type="not_found_error"): ...


class MethodNotAllowed(StartLLMError, status=405, type="invalid_request_error"):
    """`allowed`: the methods that the path takes."""

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = allowed


class RequestTimeout(StartLLMError, status=408, type="invalid_request_error", code="request_timeout"):
    """The client sends too slowly."""


class Conflict(StartLLMError, status=409, type="invalid_request_error", code="conflict"):
    """Something else has to end first."""


class TooLarge(StartLLMError, status=413, type="request_too_large"): ...


class UnsupportedMediaType(StartLLMError, status=415, type="invalid_request_error"): ...


class QueueFull(StartLLMError, status=429, type="rate_limit_error", code="queue_full", refusal="queue_full"): ...


class ClientGone(StartLLMError, status=499, type="client_closed_request"):
    """Logged, never sent."""


class Cancelled(StartLLMError, status=499, type="cancelled", code="cancelled"):
    """Somebody who may see everything has ended this request."""


class Internal(StartLLMError): ...


class NotSupported(StartLLMError, status=501, type="not_supported_error", code="not_supported"):
    """Not by this model, or not yet by this server."""


class Unavailable(StartLLMError, status=503, type="overloaded_error", code="unavailable", retry_after=2.0):
    """Loading, wedged or shutting down."""


class TimedOut(StartLLMError, status=504, type="timeout_error", code="watchdog"):
    """The watchdog ended it."""


class OutOfMemory(StartLLMError, status=507, code="out_of_memory", refusal="out_of_memory"):
    """It does not fit."""


class WrongWords(Explained):
    """A command was typed wrong."""

    exit_code = 2


class ExitCode(IntEnum):
    ENDED = 0  # SIGINT or SIGTERM asked for it
    NOT_STARTED = 1  # the model could not be loaded, or the like; standard error says why
    BAD_SETTING = 2  # a flag or setting is wrong, a port is taken: starting again changes nothing
    ENGINE_DIED = 70  # the model thread ended by itself (EX_SOFTWARE of sysexits.h)
    WEDGED = 75  # the model did not answer for twice the watchdog's time (EX_TEMPFAIL: start it again)
