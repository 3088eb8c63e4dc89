"""A small real HTTP server that knows its window and answers as the real ones do.

    from ctxguard.testing import ScriptedModel, WindowedServer, tool_call

    model = ScriptedModel([tool_call("read", {"path": "a.py"}), "It prints hello."])
    with WindowedServer(counter, window=2048, model=model) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="none")
        run_my_agent(client)
    assert len(server.requests) == 2
    assert server.requests[1]["messages"][-1]["role"] == "tool"

It counts each prompt with the counter that it was given, refuses what does not fit with the real server's
body (``style``), and reports true ``usage``. Faults can be ordered one by one: `WindowedServer.fail_next`.
Only the standard library is used.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Protocol, TypeAlias

from ctxguard.errors import ConfigurationError, TemplateRefusedError
from ctxguard.testing.refusals import STYLES, Sizes, Style, bad_request, refusal
from ctxguard.testing.scripted_model import Reply, Script, ScriptedModel

TokenIdsOf: TypeAlias = (
    "Callable[[Sequence[Any], Any, Mapping[str, Any]], tuple[Sequence[int], Sequence[int]]]"
)
"""From messages, tools and the answer's message to the token ids of prompt and answer."""

_OWNERS: dict[Style, str] = {
    "llama.cpp": "llamacpp",
    "sglang": "sglang",
    "openai": "openai",
    "azure": "openai",
}


class CountsPrompts(Protocol):
    """All that the server needs of a counter; every `ctxguard.TokenCounter` does."""

    def count(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Tokens of the whole prompt."""
        ...


@dataclass
class RecordedRequest:
    """One request as it arrived, and what became of it."""

    method: str
    path: str
    """With its query string."""
    headers: dict[str, str]
    """Names in lower case."""
    raw: bytes
    """The body, byte for byte."""
    body: Any = None
    """The parsed body; None where there is none or it is no JSON."""
    status: int = 0
    """What was answered; 0 while it is worked on, or when the connection was dropped."""
    prompt_tokens: int | None = None
    """What the counter said, before any cut."""


@dataclass
class _Fault:
    status: int
    body: Any
    headers: dict[str, str]
    in_stream: bool
    delay_seconds: float


@dataclass
class _Completion:
    """An answer before it is put into JSON or into events."""

    model: str
    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    id: str
    token_ids: tuple[Sequence[int], Sequence[int]] | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class WindowedServer:
    """An OpenAI-compatible server on a free loopback port; a context manager.

    Args:
        counter: counts prompts; any object with ``count(messages, tools=, template_kwargs=)``. It is asked by
            one request at a time. Where it also has ``count_text``, answers are counted with that.
        window: prompt and answer together, in tokens.
        model: what answers: a `ScriptedModel`, or a script for one (a list of replies, a function of
            messages and tools). Without one, every answer is ``"ok"``.
        style: whose error bodies, ``/v1/models`` and special cases: ``"vllm"`` (0.32), ``"vllm-0.10"``,
            ``"llama.cpp"``, ``"sglang"``, ``"openai"`` or ``"azure"``.
        model_name: what ``/v1/models`` lists. Requests may name any model.
        silent_cut: never refuse: drop the oldest messages until the rest fits, answer 200 and report the
            usage of what was left, as Ollama does.
        delay_seconds: how long each completion takes; may be set while the server runs.
        tells_window: False leaves the window out of ``/v1/models`` and ``/props``, as behind a proxy.
        token_ids: gives the token ids of prompt and answer, ``(messages, tools, answer) -> (ids, ids)``, for
            requests with ``return_token_ids`` (vLLM). Without it they get none.

    Served are ``…/chat/completions`` under any prefix (``/v1``, ``/rollout/R/attempt/A/v1``, Azure's
    ``/openai/deployments/M``), whole and as server-sent events, ``…/models``, ``/health``, and by style
    ``/props`` (llama.cpp), ``/tokenize`` and ``/version`` (vLLM), ``/get_server_info`` (SGLang) and
    llama.cpp's ``/v1/chat/completions/input_tokens``.

    Example:
        >>> class Words:
        ...     def count(self, messages, *, tools=None, template_kwargs=None):
        ...         return sum(len(message["content"].split()) for message in messages)
        >>> with WindowedServer(Words(), window=100) as server:
        ...     server.base_url.startswith("http://127.0.0.1:")
        True
    """

    def __init__(
        self,
        counter: CountsPrompts,
        *,
        window: int,
        model: ScriptedModel | Script | Iterable[Reply | Script] | None = None,
        style: Style = "vllm",
        model_name: str = "windowed-model",
        silent_cut: bool = False,
        delay_seconds: float = 0.0,
        tells_window: bool = True,
        token_ids: TokenIdsOf | None = None,
    ) -> None:
        if style not in STYLES:
            raise ConfigurationError(f"style={style!r} is none of {', '.join(STYLES)}")
        if window < 1:
            raise ConfigurationError(f"window={window} leaves no room for a prompt")
        if model is None:
            model = ScriptedModel(lambda messages, tools: "ok")
        self.counter = counter
        self.window = window
        self.model = model if isinstance(model, ScriptedModel) else ScriptedModel(model)
        self.style: Style = style
        self.model_name = model_name
        self.silent_cut = silent_cut
        self.delay_seconds = delay_seconds
        self.tells_window = tells_window
        self.token_ids = token_ids
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._records: list[RecordedRequest] = []
        self._faults: deque[_Fault] = deque()
        self._answers = 0
        self._http: _Http | None = None
        self._thread: threading.Thread | None = None

    # --- life -----------------------------------------------------------------------------------------------

    def start(self) -> WindowedServer:
        """Listen on a free loopback port; ``with`` does this."""
        if self._http is None:
            self._http = _Http(self)
            self._thread = threading.Thread(
                target=self._http.serve_forever, args=(0.01,), name="WindowedServer", daemon=True
            )
            self._thread.start()
        return self

    def stop(self) -> None:
        """Stop listening and cut every open connection; ``with`` does this."""
        if self._http is not None and self._thread is not None:
            self._http.shutdown()
            self._thread.join()
            self._http.close()
            self._http = self._thread = None

    def __enter__(self) -> WindowedServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The root, e.g. ``http://127.0.0.1:40123``; an Azure client's ``azure_endpoint``."""
        if self._http is None:
            raise ConfigurationError("the server does not run: use it in a with block, or call start()")
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def base_url(self) -> str:
        """The root and ``/v1``: an OpenAI client's ``base_url``."""
        return f"{self.url}/v1"

    # --- faults ---------------------------------------------------------------------------------------------

    def fail_next(
        self,
        status: int,
        body: Any,
        *,
        times: int = 1,
        headers: Mapping[str, str] | None = None,
        in_stream: bool = False,
        delay_seconds: float = 0.0,
    ) -> None:
        """Answer the next completions with a fault instead.

        Args:
            status: the HTTP status. 200 gives a good status with an error in its body; 0 drops the connection
                without an answer.
            body: JSON value, or a str to send as it is.
            times: how many completions.
            headers: more response headers, e.g. ``{"retry-after": "0"}``.
            in_stream: begin to stream, then send ``body`` as an event and end, without ``[DONE]``. For a
                request that does not stream, the body is the whole answer.
            delay_seconds: how long it takes.

        Example: an error that comes after the 200, inside the events::

            server.fail_next(200, {"error": {"message": "…", "code": 400}}, in_stream=True)
        """
        fault = _Fault(status, body, dict(headers or {}), in_stream, delay_seconds)
        with self._lock:
            self._faults.extend([fault] * times)

    # --- what arrived ---------------------------------------------------------------------------------------

    @property
    def records(self) -> list[RecordedRequest]:
        """Every request in order of arrival, ``/models`` and other look-ups included."""
        with self._lock:
            return list(self._records)

    @property
    def completions(self) -> list[RecordedRequest]:
        """The requests for a chat completion."""
        return [record for record in self.records if _is_completion(record.method, record.path)]

    @property
    def requests(self) -> list[Any]:
        """Their parsed bodies."""
        return [record.body for record in self.completions]

    @property
    def bytes(self) -> list[int]:
        """The sizes of their bodies in bytes."""
        return [len(record.raw) for record in self.completions]

    @property
    def paths(self) -> list[str]:
        """Their paths, query strings included."""
        return [record.path for record in self.completions]

    @property
    def headers(self) -> list[dict[str, str]]:
        """Their headers, names in lower case."""
        return [record.headers for record in self.completions]

    def forget(self) -> None:
        """Drop all records and all faults still to come."""
        with self._lock:
            self._records.clear()
            self._faults.clear()

    # --- answering; called by the handler's threads ---------------------------------------------------------

    def _record(self, record: RecordedRequest) -> None:
        with self._lock:
            self._records.append(record)

    def _next_fault(self) -> _Fault | None:
        with self._lock:
            return self._faults.popleft() if self._faults else None

    def _count(self, messages: Sequence[Any], tools: Any, kwargs: Any) -> int:
        with self._counting:
            return self.counter.count(messages, tools=tools or None, template_kwargs=kwargs or None)

    def _complete(self, record: RecordedRequest) -> tuple[int, Any] | _Completion:
        """A refusal with its status, or the answer."""
        request = record.body
        if problem := _problem(request, self.style):
            return 400, bad_request(self.style, problem)
        messages, tools = request["messages"], request.get("tools")
        kwargs = request.get("chat_template_kwargs")
        limit_name, max_tokens = _output_limit(request)
        try:
            prompt_tokens = record.prompt_tokens = self._count(messages, tools, kwargs)
        except TemplateRefusedError as error:
            return 400, bad_request(self.style, error.template_message or str(error))
        if self.silent_cut:
            messages, prompt_tokens = self._cut_front(messages, tools, kwargs, prompt_tokens)
        else:
            tool_tokens = 0
            if tools and prompt_tokens > self.window and self.style == "openai":
                tool_tokens = prompt_tokens - self._count(messages, None, kwargs)
            sizes = Sizes(self.window, prompt_tokens, max_tokens, limit_name, tool_tokens)
            body = refusal(self.style, sizes)
            if body is not None:
                return 400, body
        message = self.model.reply(messages, tools)
        room = max(self.window - prompt_tokens, 0)
        message, completion_tokens, is_cut = self._fit(
            message, room if max_tokens is None else min(max_tokens, room)
        )
        finish_reason = "length" if is_cut else "tool_calls" if message.get("tool_calls") else "stop"
        token_ids = None
        if self.token_ids is not None and request.get("return_token_ids") is True:
            with self._counting:
                token_ids = self.token_ids(messages, tools, message)
        with self._lock:
            self._answers += 1
            number = self._answers
        return _Completion(
            model=str(request.get("model", self.model_name)),
            message=message,
            finish_reason=finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            id=f"chatcmpl-{number}",
            token_ids=token_ids,
        )

    def _cut_front(
        self, messages: list[Any], tools: Any, kwargs: Any, prompt_tokens: int
    ) -> tuple[list[Any], int]:
        """The newest messages that leave room for an answer; a single larger one is cut to the window."""
        while prompt_tokens >= self.window and len(messages) > 1:
            messages = messages[1:]
            with contextlib.suppress(TemplateRefusedError):
                prompt_tokens = self._count(messages, tools, kwargs)
        return messages, min(prompt_tokens, max(self.window - 1, 1))

    def _fit(self, message: dict[str, Any], limit: int) -> tuple[dict[str, Any], int, bool]:
        """The answer within its output limit, its tokens, and whether it was cut."""
        text = message.get("content") or ""
        written = text + "".join(json.dumps(call["function"]) for call in message.get("tool_calls") or ())
        tokens = self._count_text(written)
        if tokens <= limit:
            return message, tokens, False
        # The longest beginning that fits. Calls come after the text, so a cut answer has none.
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._count_text(text[:middle]) <= limit else (low, middle - 1)
        cut = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text[:low]}
        # A model cut in the middle has used up its limit.
        return cut, limit, True

    def _count_text(self, text: str) -> int:
        if not text:
            return 0
        count_text: Callable[[str], int] | None = getattr(self.counter, "count_text", None)
        if count_text is not None:
            with self._counting:
                return count_text(text)
        empty, full = ([{"role": "user", "content": content}] for content in ("", text))
        return max(self._count(full, None, None) - self._count(empty, None, None), 0)

    def _look_up(self, record: RecordedRequest) -> tuple[int, Any]:
        """Everything that is no completion."""
        path = record.path.partition("?")[0].rstrip("/")
        last = path.rpartition("/")[2]
        if record.method == "GET":
            if last == "health":
                return 200, {"status": "ok"} if self.style == "llama.cpp" else None
            if last == "models":
                return 200, self._models()
            if last == "version" and self.style == "vllm":
                return 200, {"version": "0.32.0"}
            if last == "props" and self.style == "llama.cpp" and self.tells_window:
                return 200, self._props()
            if last == "get_server_info" and self.style == "sglang" and self.tells_window:
                return 200, {"model_path": self.model_name, "context_length": self.window}
        elif isinstance(record.body, dict) and "messages" in record.body:
            counts = (
                record.body["messages"],
                record.body.get("tools"),
                record.body.get("chat_template_kwargs"),
            )
            if last == "tokenize" and self.style in ("vllm", "vllm-0.10"):
                # The ids stay empty: a counter has none to give.
                return 200, {"count": self._count(*counts), "max_model_len": self.window, "tokens": []}
            if path.endswith("/chat/completions/input_tokens") and self.style == "llama.cpp":
                return 200, {"input_tokens": self._count(*counts), "object": "response.input_tokens"}
        return 404, self._not_found()

    def _models(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "id": self.model_name,
            "object": "model",
            "created": 0,
            "owned_by": _OWNERS.get(self.style, "vllm"),
        }
        if self.style in ("vllm", "vllm-0.10", "sglang"):
            entry |= {"root": self.model_name, "parent": None}
            entry |= {"max_model_len": self.window} if self.tells_window else {}
        elif self.style == "llama.cpp":
            # n_ctx_train is what the model could do, not what the server does.
            entry["meta"] = {"n_ctx_train": 1 << 17} | ({"n_ctx": self.window} if self.tells_window else {})
        return {"object": "list", "data": [entry]}

    def _props(self) -> dict[str, Any]:
        settings = {"params": {"n_predict": -1}, "n_ctx": self.window}
        return {"default_generation_settings": settings, "total_slots": 1, "model_alias": self.model_name}

    def _not_found(self) -> dict[str, Any]:
        if self.style == "llama.cpp":
            return {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}
        if self.style in ("openai", "azure"):
            return {"error": {"code": "404", "message": "Resource not found"}}
        return {"detail": "Not Found"}


def _is_completion(method: str, path: str) -> bool:
    return method == "POST" and path.partition("?")[0].rstrip("/").endswith("/chat/completions")


def _problem(request: Any, style: Style) -> str | None:
    """What is wrong with a request before any counting, in the server's words where they are known."""
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        return "the request body must be a JSON object with a list of messages"
    if not all(isinstance(message, dict) for message in request["messages"]):
        return "each message must be a JSON object"
    if request["messages"] or style == "llama.cpp":  # llama.cpp answers an empty conversation
        return None
    if style in ("openai", "azure"):
        return (
            "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an empty "
            "array instead."
        )
    return "Cannot apply chat template to an empty conversation. Provide at least one message."


def _output_limit(request: dict[str, Any]) -> tuple[str, int | None]:
    """The field that the output limit came in, and the limit; the newer field wins, as in vLLM."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = request.get(name)
        if isinstance(value, int):
            return name, value
    return "max_tokens", None


# --- JSON and events ----------------------------------------------------------------------------------------


def _completion_json(completion: _Completion, style: Style) -> dict[str, Any]:
    message = completion.message
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": completion.finish_reason}
    if style in ("vllm", "vllm-0.10"):
        # The real ones fill in what the model did not say; agents that model_dump() send it all back.
        absent = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
        choice |= {"message": absent | message, "logprobs": None, "stop_reason": None}
    body = {
        "id": completion.id,
        "object": "chat.completion",
        "created": completion.created,
        "model": completion.model,
        "choices": [choice],
        "usage": completion.usage,
    }
    if completion.token_ids is not None:
        body["prompt_token_ids"], choice["token_ids"] = map(list, completion.token_ids)
    if style == "azure":
        choice["content_filter_results"] = {}
        body["prompt_filter_results"] = [{"prompt_index": 0, "content_filter_results": {}}]
    return body


def _completion_events(
    completion: _Completion, style: Style, include_usage: bool
) -> Iterator[dict[str, Any]]:
    envelope = {
        "id": completion.id,
        "object": "chat.completion.chunk",
        "created": completion.created,
        "model": completion.model,
    }

    def event(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}

    if style == "azure":
        # Azure begins with an event that has no choices.
        filtered = [{"prompt_index": 0, "content_filter_results": {}}]
        yield {**envelope, "choices": [], "prompt_filter_results": filtered}
    message = completion.message
    first = event({"role": "assistant", "content": ""})
    if completion.token_ids is None:
        yield first
    else:
        # The prompt's ids come with the first event, the answer's with the events of its text.
        prompt_ids, generated = completion.token_ids
        yield {**first, "prompt_token_ids": list(prompt_ids)}
        for at in range(0, len(generated), 2):
            choice = {"index": 0, "delta": {}, "finish_reason": None, "token_ids": generated[at : at + 2]}
            yield {**envelope, "choices": [choice]}
    reasoning = message.get("reasoning_content")
    if reasoning:
        yield event({"reasoning_content": reasoning})
    for piece in _pieces(message.get("content") or ""):
        yield event({"content": piece})
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        head = {"index": index, "id": call["id"], "type": "function"}
        yield event({"tool_calls": [{**head, "function": {"name": function["name"], "arguments": ""}}]})
        for piece in _pieces(function["arguments"]):
            yield event({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield event({}, completion.finish_reason)
    if include_usage:
        yield {**envelope, "choices": [], "usage": completion.usage}


def _pieces(text: str) -> Iterator[str]:
    size = max(len(text) // 3, 1)
    return (text[at : at + size] for at in range(0, len(text), size))


class _Http(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = False  # joined by server_close(): no thread and no socket outlives the server

    def __init__(self, server: WindowedServer) -> None:
        self.windowed = server
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def server_bind(self) -> None:
        # Without HTTPServer's look-up of a host name, which can take seconds.
        socket_name = self.server_address[0]
        self.server_name = str(socket_name)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_port = int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def close(self) -> None:
        """Cut connections that clients keep open, then wait for their threads."""
        with self._open_lock:
            connections = list(self._open)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news; anything else was answered with a 500."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as real servers do
    disable_nagle_algorithm = True
    server: _Http

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Tests want a quiet server."""

    def _answer(self) -> None:
        server = self.server.windowed
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        record = RecordedRequest(self.command, self.path, headers, raw)
        with contextlib.suppress(ValueError):
            record.body = json.loads(raw) if raw else None
        server._record(record)
        try:
            if _is_completion(record.method, record.path):
                self._answer_completion(server, record)
            else:
                self._send(record, *server._look_up(record))
        except ConnectionError:
            self.close_connection = True
        except Exception as error:  # the script or the counter failed: say so instead of hanging up
            self.close_connection = True
            with contextlib.suppress(ConnectionError):
                message = f"{type(error).__name__}: {error}"
                self._send(
                    record, 500, {"error": {"message": message, "type": "InternalServerError", "code": 500}}
                )

    def _answer_completion(self, server: WindowedServer, record: RecordedRequest) -> None:
        fault = server._next_fault()
        delay = server.delay_seconds + (fault.delay_seconds if fault else 0.0)
        if delay:
            time.sleep(delay)
        is_stream = isinstance(record.body, dict) and bool(record.body.get("stream"))
        if fault is not None and fault.status == 0:
            self.close_connection = True
            return
        if fault is not None and not (fault.in_stream and is_stream):
            self._send(record, fault.status, fault.body, fault.headers)
            return
        answer = server._complete(record)
        if isinstance(answer, tuple):
            self._send(record, *answer)
        elif not is_stream:
            self._send(record, 200, _completion_json(answer, server.style))
        else:
            options = record.body.get("stream_options") or {}
            events = _completion_events(answer, server.style, bool(options.get("include_usage")))
            self._stream(record, events, fault)

    def _send(
        self, record: RecordedRequest, status: int, body: Any, headers: Mapping[str, str] | None = None
    ) -> None:
        record.status = status
        data = b"" if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _stream(
        self, record: RecordedRequest, events: Iterator[dict[str, Any]], fault: _Fault | None
    ) -> None:
        record.status = 200
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if fault is not None:
            self._send_chunk(f"data: {json.dumps(next(events))}\n\n")
            data = fault.body if isinstance(fault.body, str) else json.dumps(fault.body)
            self._send_chunk(f"data: {data}\n\n")
        else:
            for event in events:
                self._send_chunk(f"data: {json.dumps(event)}\n\n")
            self._send_chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _send_chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
