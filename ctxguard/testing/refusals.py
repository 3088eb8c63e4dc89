"""What real servers answer when a prompt is too long, word for word.

Each style is the body of one server, recorded from the real one (vLLM 0.32.0, llama.cpp) or taken from what
it was seen to answer in the wild (vLLM 0.10, SGLang, OpenAI, Azure). The tests hold them against the
recordings, and llama.cpp's against a running server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

Style: TypeAlias = Literal["vllm", "vllm-0.10", "llama.cpp", "sglang", "openai", "azure"]
STYLES: tuple[Style, ...] = get_args(Style)

Body: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The numbers of one request, in tokens."""

    window: int
    prompt_tokens: int
    max_tokens: int | None = None
    max_tokens_name: str = "max_tokens"
    """The field that the output limit came in: this, or ``max_completion_tokens``."""
    tool_tokens: int = 0
    """The part of the prompt that the tool schemas take."""

    @property
    def total(self) -> int:
        return self.prompt_tokens + (self.max_tokens or 0)


def refusal(style: Style, sizes: Sizes) -> Body | None:
    """The body of the server's 400, or None where the request is served."""
    return _REFUSALS[style](sizes)


def bad_request(style: Style, message: str) -> Body:
    """The same server's 400 for a request that is wrong in another way."""
    if style == "llama.cpp":
        return {"error": {"code": 400, "message": message, "type": "invalid_request_error"}}
    if style == "sglang":
        return {"object": "error", "message": message, "type": "BadRequest", "param": None, "code": 400}
    if style in ("openai", "azure"):
        return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return _vllm_body(message, None)


def _vllm_body(message: str, param: str | None) -> Body:
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}


def _vllm(sizes: Sizes) -> Body | None:
    """0.32: an output limit over what is left is cut in silence; one over the whole window is refused."""
    window, prompt, max_tokens = sizes.window, sizes.prompt_tokens, sizes.max_tokens
    if max_tokens is not None and max_tokens > window:
        name = sizes.max_tokens_name
        return _vllm_body(
            f"{name}={max_tokens} cannot be greater than max_model_len={window}. Please request fewer "
            f"output tokens. (parameter={name}, value={max_tokens})",
            name,
        )
    if prompt > window:
        # It stops counting one token over the window: "at least" is all that it knows.
        return _vllm_body(
            f"This model's maximum context length is {window} tokens. However, your prompt contains at "
            f"least {window + 1} input tokens, which exceeds this limit even without any output tokens. "
            f"Please reduce the length of the input prompt. (parameter=input_tokens, value={window + 1})",
            "input_tokens",
        )
    # A prompt that fills the window is blamed on max_tokens, whatever was sent.
    left = window - prompt
    if left and max_tokens is not None:
        left = min(left, max_tokens)
    if left < 1:
        return _vllm_body(
            f"max_tokens must be at least 1, got {left}. (parameter=max_tokens, value={left})", "max_tokens"
        )
    return None


def _vllm_0_10(sizes: Sizes) -> Body | None:
    """0.10 to 0.14: exact numbers; the trailing " None" is real."""
    window, prompt, max_tokens = sizes.window, sizes.prompt_tokens, sizes.max_tokens
    if prompt >= window:
        return _vllm_body(
            f"This model's maximum context length is {window} tokens. However, your request has {prompt} "
            "input tokens. Please reduce the length of the input messages. None",
            None,
        )
    if max_tokens is not None and sizes.total > window:
        return _vllm_body(
            f"'max_tokens' or 'max_completion_tokens' is too large: {max_tokens}. This model's maximum "
            f"context length is {window} tokens and your request has {prompt} input tokens ({max_tokens} > "
            f"{window} - {prompt}). None",
            None,
        )
    return None


def _llama_cpp(sizes: Sizes) -> Body | None:
    """Exact numbers; an output limit is never refused, the answer just ends at the window."""
    if sizes.prompt_tokens < sizes.window:
        return None
    message = (
        f"request ({sizes.prompt_tokens} tokens) exceeds the available context size ({sizes.window} tokens), "
        "try increasing it"
    )
    return {
        "error": {
            "code": 400,
            "message": message,
            "type": "exceed_context_size_error",
            "n_prompt_tokens": sizes.prompt_tokens,
            "n_ctx": sizes.window,
        }
    }


def _sglang(sizes: Sizes) -> Body | None:
    """Not under an ``error`` key."""
    if sizes.prompt_tokens >= sizes.window:
        message = (
            f"The input ({sizes.prompt_tokens} tokens) is longer than the model's context length "
            f"({sizes.window} tokens)."
        )
    elif sizes.max_tokens is not None and sizes.total > sizes.window:
        message = (
            f"Requested token count exceeds the model's maximum context length of {sizes.window} tokens. "
            f"You requested a total of {sizes.total} tokens: {sizes.prompt_tokens} tokens from the input "
            f"messages and {sizes.max_tokens} tokens for the completion. Please reduce the number of tokens "
            "in the input messages or the completion to fit within the limit."
        )
    else:
        return None
    return bad_request("sglang", message)


def _openai_body(message: str) -> Body:
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }


def _openai(sizes: Sizes) -> Body | None:
    window, prompt, tools = sizes.window, sizes.prompt_tokens, sizes.tool_tokens
    start = f"This model's maximum context length is {window} tokens. However, "
    if prompt > window and tools:
        return _openai_body(
            f"{start}your messages resulted in {prompt} tokens ({prompt - tools} in the messages, {tools} "
            "in the functions). Please reduce the length of the messages or functions."
        )
    if prompt > window:
        return _openai_body(
            f"{start}your messages resulted in {prompt} tokens. Please reduce the length of the messages."
        )
    if sizes.total > window:
        return _openai_body(
            f"{start}you requested {sizes.total} tokens ({prompt} in the messages, {sizes.max_tokens} in the "
            "completion). Please reduce the length of the messages or completion."
        )
    return None


def _azure(sizes: Sizes) -> Body | None:
    """The newer models' wording; older ones on Azure answer as OpenAI does."""
    if sizes.prompt_tokens <= sizes.window:
        return _openai(sizes)
    return _openai_body(
        f"Input tokens exceed the configured limit of {sizes.window} tokens. Your messages resulted in "
        f"{sizes.prompt_tokens} tokens. Please reduce the length of the messages."
    )


_REFUSALS: dict[Style, Callable[[Sizes], Body | None]] = {
    "vllm": _vllm,
    "vllm-0.10": _vllm_0_10,
    "llama.cpp": _llama_cpp,
    "sglang": _sglang,
    "openai": _openai,
    "azure": _azure,
}
