"""The OpenAI edge: wrapping the official clients, and the error that the stack above understands.

The hook is the client's ``request`` method, overridden in a subclass of the client's own class: every
way of calling (create, stream, parse, raw responses, ``with_options``) goes through it, the SDK's
retries lie below it, and no HTTP library is touched. See DESIGN, "Hook client.request".
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import openai
from openai.types.chat import ChatCompletion

from ctxguard.client.flow import Call, guarded_call
from ctxguard.client.token_ids import read_ids, reading_stream
from ctxguard.client.tracing import name_unanswered_span, untraced
from ctxguard.effects import (
    Answer,
    Effect,
    Flow,
    Load,
    ModelCall,
    ModelText,
    Probe,
    Send,
    Store,
    TokenIds,
    arun_flow,
    run_flow,
)
from ctxguard.errors import ContextOverflowError, UnsupportedClientError
from ctxguard.scope import RolloutScope, current_scope, server_identity
from ctxguard.tokens import request_template_kwargs

if TYPE_CHECKING:
    from ctxguard.client.guard import Guard
    from ctxguard.client.served import ModelServer

Client = TypeVar("Client")

CHAT = "/chat/completions"
CODE = "context_length_exceeded"
_UNGUARDED = ("/responses", "/completions", "/threads/runs")
_OUTPUT_FIELDS = ("max_completion_tokens", "max_tokens")


class UnguardedEndpointWarning(UserWarning):
    """A wrapped client was used for an endpoint that the guard does not cover."""


class OpenAIContextOverflowError(ContextOverflowError, openai.BadRequestError):
    """`ContextOverflowError` as the stack above the OpenAI SDK knows it.

    It is a `openai.BadRequestError` with status 400 and code ``context_length_exceeded``. Others go by the
    words: LiteLLM looks for "This model's maximum context length is", LangChain for the code in the text.
    """

    def __init__(self, failure: ContextOverflowError, response: Any) -> None:
        message = f"{failure.message} (code: {CODE})"
        body = {"message": message, "type": "invalid_request_error", "param": "messages", "code": CODE}
        openai.BadRequestError.__init__(self, message, response=response, body=body)
        self.__dict__.update(failure.__dict__)
        self.message = message


def wrap_client(guard: Guard, client: Client) -> Client:
    """See `Guard.wrap`."""
    if not isinstance(client, openai.OpenAI | openai.AsyncOpenAI):
        raise UnsupportedClientError(
            f"cannot wrap a {type(client).__module__}.{type(client).__qualname__}: give an openai.OpenAI, "
            "AsyncOpenAI, AzureOpenAI or AsyncAzureOpenAI client, or a subclass of one; for other clients "
            "use HistoryManager.fit() before each call"
        )
    base: type[Any] = getattr(type(client), "_ctxguard_base", type(client))
    scope = current_scope()
    guarded = _guarded_class(guard, base, scope)
    # A shell that looks like the client but is of the guarded class: the class's own copy() then makes a
    # real one, running __init__. Copying __dict__ alone would keep `chat` bound to the old client.
    shell = object.__new__(guarded)
    shell.__dict__.update(client.__dict__)
    try:
        wrapped = base.copy(shell)
    except TypeError as error:
        raise UnsupportedClientError(
            f"{base.__qualname__} cannot be wrapped: its copy() failed ({error}). A subclass with an "
            "__init__ of its own must override copy(); or wrap a plain client"
        ) from error
    if not isinstance(wrapped, guarded) or wrapped.chat.completions._client is not wrapped:
        raise UnsupportedClientError(
            f"{base.__qualname__} cannot be wrapped: its copy() returns something whose chat.completions "
            "would bypass the guard; override copy() so that it returns type(self)(…), or wrap a plain client"
        )
    result: Client = wrapped
    return result


def _guarded_class(guard: Guard, base: type[Any], scope: RolloutScope | None) -> type[Any]:
    """The subclass of a client class whose requests this guard carries. Unscoped ones are made once."""
    if scope is None and base in guard.client_classes:
        return guard.client_classes[base]
    is_async = issubclass(base, openai.AsyncOpenAI)
    namespace: dict[str, Any] = {
        "_ctxguard_base": base,
        "_ctxguard": guard,
        "request": (_async_request if is_async else _sync_request)(guard, base, scope),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    guarded = type(base.__name__, (base,), namespace)
    if scope is None:
        guard.client_classes[base] = guarded
    return guarded


class _Request:
    """One intercepted request: its flow, and how each effect is answered with the SDK's own methods."""

    def __init__(
        self,
        guard: Guard,
        base: type[Any],
        client: Any,
        body: Mapping[str, Any],
        send: Callable[[Any, TokenIds | None], Any],
        options: Any,
        is_stream: bool,
    ) -> None:
        self.guard = guard
        self.base = base
        self.client = client
        self.body = body
        self.send = send
        self.options = options
        self.is_stream = is_stream

    def call_for(self, effect: Effect) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        """What to call for an effect, and how to read its result (an async client's is awaited first)."""
        if isinstance(effect, Send):
            options = _with(self.options, effect)
            ids = None if effect.token_ids is None else TokenIds()
            return lambda: self.send(options, ids), lambda value: _answer(value, self.is_stream, ids)
        elsewhere = self.guard.model_server
        plain = _plain(self.client, self.base, elsewhere)
        if isinstance(effect, Probe):
            return lambda: plain.get(_probe_url(plain, effect), cast_to=object), lambda value: value
        if isinstance(effect, ModelCall):
            body = _summary_body(effect, self.body, elsewhere)
            return lambda: plain.post(CHAT, cast_to=ChatCompletion, body=body), _model_text
        raise TypeError(f"the OpenAI edge has no answer to {type(effect).__name__}")

    def stored(self, effect: Load | Store) -> str | None:
        """The answer to a question to the store."""
        if isinstance(effect, Load):
            return self.guard.ledger.summary(effect.key)
        self.guard.ledger.put_summary(effect.key, effect.text)
        return None

    def error(self, failure: ContextOverflowError) -> OpenAIContextOverflowError:
        """The failure as an error of the OpenAI SDK."""
        name_unanswered_span()
        return _openai_error(self.client, self.options, failure)


def _sync_request(guard: Guard, base: type[Any], scope: RolloutScope | None) -> Callable[..., Any]:
    def request(self: Any, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        """Carry the request through the guard."""

        def send(options: Any, ids: TokenIds | None = None) -> Any:
            return base.request(self, cast_to, options, *args, **_reading_ids(kwargs, ids))

        def perform(effect: Effect) -> Any:
            if isinstance(effect, Load | Store):
                return intercepted.stored(effect)
            call, read = intercepted.call_for(effect)
            with nullcontext() if isinstance(effect, Send) else untraced():
                return read(call())

        body = _guarded_body(options)
        if body is None:
            return send(options)
        intercepted = _Request(guard, base, self, body, send, options, bool(kwargs.get("stream")))
        try:
            return run_flow(_flow(guard, self, body, scope), perform)
        except ContextOverflowError as error:
            failure = error
        raise intercepted.error(failure) from (failure.__cause__ or failure)

    return request


def _async_request(
    guard: Guard, base: type[Any], scope: RolloutScope | None
) -> Callable[..., Awaitable[Any]]:
    async def request(self: Any, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        """Carry the request through the guard."""

        def send(options: Any, ids: TokenIds | None = None) -> Any:
            return base.request(self, cast_to, options, *args, **_reading_ids(kwargs, ids))

        async def perform(effect: Effect) -> Any:
            if isinstance(effect, Load | Store):
                return intercepted.stored(effect)
            call, read = intercepted.call_for(effect)
            with nullcontext() if isinstance(effect, Send) else untraced():
                return read(await call())

        body = _guarded_body(options)
        if body is None:
            return await send(options)
        intercepted = _Request(guard, base, self, body, send, options, bool(kwargs.get("stream")))
        try:
            return await arun_flow(_flow(guard, self, body, scope), perform)
        except ContextOverflowError as error:
            failure = error
        raise intercepted.error(failure) from (failure.__cause__ or failure)

    return request


# Reading and rewriting a request


def _guarded_body(options: Any) -> dict[str, Any] | None:
    """The request body as it goes over the wire, None where the guard does not cover the request."""
    if str(options.method).lower() != "post":
        return None
    path = str(options.url).split("?")[0]
    if path.endswith(CHAT):
        body = options.json_data
        if isinstance(body, Mapping):
            return {**body, **(options.extra_json or {})}  # the SDK lays extra_body over the body
    elif path.endswith(_UNGUARDED):
        _warn_unguarded(path)
    return None


def _warn_unguarded(path: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(
            f"ctxguard does not guard {path}: requests to it go out as they are",
            UnguardedEndpointWarning,
            stacklevel=4,
        )


_warned: set[str] = set()


def _flow(guard: Guard, client: Any, body: Mapping[str, Any], bound: RolloutScope | None) -> Flow[Any]:
    base_url = str(client.base_url)
    limit = next(((f, body[f]) for f in _OUTPUT_FIELDS if isinstance(body.get(f), int)), None)
    tools = body.get("tools") or [
        {"type": "function", "function": function} for function in body.get("functions") or ()
    ]
    call = Call(
        messages=body.get("messages") or [],
        model=str(body.get("model") or ""),
        tools=tools or None,
        output_limit=limit,
        template_kwargs=request_template_kwargs(body),
        return_token_ids=body.get("return_token_ids"),
        base_url=base_url,
        server=server_identity(base_url),
        scope=guard.scope_for(base_url, bound),
    )
    return guarded_call(guard, call)


def _with(options: Any, send: Send) -> Any:
    """The request with what the flow wants changed; the very same object where that is nothing."""
    changes: dict[str, Any] = {}
    added: dict[str, Any] = {"return_token_ids": True} if send.token_ids == "ask" else {}
    if send.messages is not None:
        changes["messages"] = list(send.messages)
    if send.output_limit is not None:
        field, tokens = send.output_limit
        changes[field] = tokens
    if not changes and not added:
        return options
    json_data, extra = dict(options.json_data), {**(options.extra_json or {}), **added}
    for field, value in changes.items():
        (extra if field in extra else json_data)[field] = value  # write where it was read
    update: dict[str, Any] = {"json_data": json_data, "extra_json": extra or None}
    if options.idempotency_key is not None:
        update["idempotency_key"] = None  # it stands for the body that was not sent
    if isinstance(options.headers, Mapping):
        update["headers"] = {k: v for k, v in options.headers.items() if k.lower() != "idempotency-key"}
    return options.model_copy(update=update)  # never rebuilt: its fields differ between SDK versions


# Reading an answer


def _answer(value: Any, is_stream: bool, ids: TokenIds | None) -> Answer:
    """What the flow may know of an answer. Reading it never raises and never consumes a stream."""
    if is_stream:
        return Answer(value, token_ids=ids)
    body: Any = value
    raw = getattr(value, "http_response", None)
    if raw is not None:
        if not getattr(raw, "is_stream_consumed", False):
            return Answer(value)
        try:
            body = raw.json()
        except ValueError:
            return Answer(value)
    usage = _get(body, "usage")
    choices = _get(body, "choices")
    first = choices[0] if isinstance(choices, Sequence) and choices else None
    error = _get(body, "error")
    if ids is not None:
        read_ids(body, ids)
        ids.complete()
    return Answer(
        value,
        prompt_tokens=_int(_get(usage, "prompt_tokens")),
        completion_tokens=_int(_get(usage, "completion_tokens")),
        finish_reason=_get(first, "finish_reason"),
        error_body={"error": error} if choices is None and error else None,
        token_ids=ids,
    )


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _reading_ids(kwargs: dict[str, Any], ids: TokenIds | None) -> dict[str, Any]:
    """The arguments of ``request`` with a stream class that reads the token ids of what passes through it."""
    stream_cls = kwargs.get("stream_cls")
    if ids is None or stream_cls is None:
        return kwargs
    return {**kwargs, "stream_cls": reading_stream(stream_cls, ids)}


# Effects other than Send


def _plain(client: Any, base: type[Any], elsewhere: ModelServer | None) -> Any:
    """An unguarded client on the same connections, on a URL without the rollout's path or elsewhere."""
    shell = object.__new__(base)
    shell.__dict__.update(client.__dict__)
    url = str(client.base_url)
    bare = server_identity(url) if elsewhere is None else elsewhere.url.rstrip("/")
    return base.copy(shell) if bare == url.rstrip("/") else base.copy(shell, base_url=bare)


def _probe_url(client: Any, probe: Probe) -> str:
    if not probe.path.startswith("//"):
        return probe.path
    return re.sub(r"/v1$", "", server_identity(str(client.base_url))) + probe.path[1:]


def _summary_body(call: ModelCall, body: Mapping[str, Any], elsewhere: ModelServer | None) -> dict[str, Any]:
    field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    return {
        "model": call.model or (elsewhere and elsewhere.model) or body.get("model"),
        "messages": [dict(message) for message in call.messages],
        field: call.max_tokens,
    }


def _model_text(completion: Any) -> ModelText:
    choices = getattr(completion, "choices", None) or []
    if not choices:
        return ModelText("")
    return ModelText(choices[0].message.content or "", choices[0].finish_reason)


def _openai_error(client: Any, options: Any, failure: ContextOverflowError) -> OpenAIContextOverflowError:
    response = getattr(failure.__cause__, "response", None)
    if response is None or getattr(response, "status_code", None) != 400:
        # Nothing was sent, or the refusal had another status: make the 400 that it amounts to, with the
        # HTTP library that this SDK uses (httpx or httpx2), so that we import neither.
        request = client._build_request(options)
        library = sys.modules[type(request).__module__.partition(".")[0]]
        response = library.Response(400, request=request)
    return OpenAIContextOverflowError(failure, response)
