"""What the flow asks the outside world for. The flow yields one of these and is sent the answer.

One driver answers by calling, another by awaiting, so that no I/O hides in the core. A failed effect
is thrown into the generator as the exception it was.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ctxguard.messages import Message


@dataclass(frozen=True)
class Send:
    """Send the request with these messages. Answered by an `Answer`.

    Attributes:
        messages: what to send in place of the caller's messages; None sends the request as it came.
        output_limit: ``(field, tokens)`` to set in the request, None leaves the request's own.
        token_ids: the answer is to bring the token ids of prompt and answer, if the server returns them:
            ``"read"`` takes what comes, ``"ask"`` also asks for them in the request (``return_token_ids``).
    """

    messages: Sequence[Message] | None
    output_limit: tuple[str, int] | None = None
    token_ids: Literal["read", "ask"] | None = None


class TokenIds:
    """Token ids of an answer and its prompt; those of a stream arrive as the caller reads it.

    Attributes:
        prompt: ids of the prompt, None where the server does not return them.
        generated: ids of the answer's first choice, likewise.
    """

    def __init__(self) -> None:
        self.prompt: list[int] | None = None
        self.generated: list[int] | None = None
        self._complete = False
        self._then: Callable[[TokenIds], None] | None = None

    def read(self, prompt: list[int] | None, generated: list[int] | None) -> None:
        """Take what an answer or a chunk of it brings."""
        self.prompt = self.prompt or prompt
        if generated is not None:
            self.generated = [*(self.generated or ()), *generated]

    def complete(self) -> None:
        """The answer is read to its end."""
        self._complete = True
        if self._then is not None:
            self._then(self)

    def then(self, call: Callable[[TokenIds], None]) -> None:
        """Call this when the answer is complete: at once, or as its last chunk is read."""
        if self._complete:
            call(self)
        else:
            self._then = call


@dataclass(frozen=True)
class Answer:
    """What came back for a `Send`.

    Attributes:
        value: the provider's own object, handed to the caller as it is.
        prompt_tokens, completion_tokens: usage as the server reports it, None where it does not (yet).
        finish_reason: of the first choice, None where unknown.
        error_body: the body of an error that came with status 200, else None.
        token_ids: of prompt and answer, where they were wanted.
    """

    value: Any
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error_body: Mapping[str, Any] | None = None
    token_ids: TokenIds | None = None


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
