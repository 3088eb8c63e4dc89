"""What the flow asks the outside world for. The flow yields one of these and is sent the answer.

One driver answers by calling, another by awaiting, so that no I/O hides in the core. A failed effect
is thrown into the generator as the exception it was.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ctxguard.messages import Message


@dataclass(frozen=True)
class Send:
    """Send the request with these messages. Answered by an `Answer`.

    Attributes:
        messages: what to send in place of the caller's messages; None sends the request as it came.
        output_limit: ``(field, tokens)`` to set in the request, None leaves the request's own.
    """

    messages: Sequence[Message] | None
    output_limit: tuple[str, int] | None = None


@dataclass(frozen=True)
class Answer:
    """What came back for a `Send`.

    Attributes:
        value: the provider's own object, handed to the caller as it is.
        prompt_tokens, completion_tokens: usage as the server reports it, None where it does not (yet).
        finish_reason: of the first choice, None where unknown.
        error_body: the body of an error that came with status 200, else None.
    """

    value: Any
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error_body: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ModelCall:
    """Ask a model for a text (a summary). Answered by a `ModelText`.

    It goes through an unguarded client with instrumentation suppressed.

    Attributes:
        messages: the prompt.
        max_tokens: output limit, in tokens.
        model: model to ask; None asks the model of the request.
    """

    messages: Sequence[Message]
    max_tokens: int
    model: str | None = None


@dataclass(frozen=True)
class ModelText:
    """The answer to a `ModelCall`."""

    text: str
    finish_reason: str | None = None


@dataclass(frozen=True)
class Probe:
    """GET a path of the server. Answered by the parsed JSON.

    Attributes:
        path: ``"/models"`` is taken under the base URL, ``"//props"`` under the server's root.
    """

    path: str


@dataclass(frozen=True)
class Load:
    """Read a stored summary. Answered by its text or None."""

    key: bytes


@dataclass(frozen=True)
class Store:
    """Keep a summary. Answered by None."""

    key: bytes
    text: str


Effect = Send | ModelCall | Probe | Load | Store

Result = TypeVar("Result")
Flow = Generator[Effect, Any, Result]
"""A generator that yields effects and returns a result."""


def run_flow(flow: Flow[Result], perform: Callable[[Effect], Any]) -> Result:
    """Run a flow, answering each effect by calling ``perform``."""
    reply: Any = None
    error: BaseException | None = None
    try:
        while True:
            effect = flow.send(reply) if error is None else flow.throw(error)
            reply = error = None
            try:
                reply = perform(effect)
            except BaseException as raised:  # thrown into the flow as it is, cancellation included
                error = raised
    except StopIteration as stop:
        result: Result = stop.value
        return result
    finally:
        flow.close()


async def arun_flow(flow: Flow[Result], perform: Callable[[Effect], Awaitable[Any]]) -> Result:
    """As `run_flow`, awaiting ``perform``."""
    reply: Any = None
    error: BaseException | None = None
    try:
        while True:
            effect = flow.send(reply) if error is None else flow.throw(error)
            reply = error = None
            try:
                reply = await perform(effect)
            except BaseException as raised:  # thrown into the flow as it is, cancellation included
                error = raised
    except StopIteration as stop:
        result: Result = stop.value
        return result
    finally:
        flow.close()
