"""Every style against bodies that real servers sent."""

from __future__ import annotations

import pytest

from ctxguard.testing.refusals import STYLES, Sizes, refusal


def vllm(message, param):
    return {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}


def openai_body(message):
    code = "context_length_exceeded"
    return {"error": {"message": message, "type": "invalid_request_error", "param": "messages", "code": code}}


AT_LEAST = vllm(
    "This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens, "
    "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value=2049)",
    "input_tokens",
)
DISGUISED = vllm("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", "max_tokens")
MINUS_3 = vllm("max_tokens must be at least 1, got -3. (parameter=max_tokens, value=-3)", "max_tokens")
TOO_MANY = vllm(
    "max_tokens=2049 cannot be greater than max_model_len=2048. Please request fewer output tokens. "
    "(parameter=max_tokens, value=2049)",
    "max_tokens",
)
TOO_MANY_NEW_NAME = vllm(
    "max_completion_tokens=5000 cannot be greater than max_model_len=2048. Please request fewer output tokens. "
    "(parameter=max_completion_tokens, value=5000)",
    "max_completion_tokens",
)

# vLLM 0.32.0 with --max-model-len 2048: the answers of the running server, prompt tokens × output limit.
VLLM_0_32 = [
    *[(100, limit, None) for limit in (None, 1, 100, 2048)],
    *[(2047, limit, None) for limit in (None, 1, 100, 2048)],
    *[(size, 0, DISGUISED) for size in (100, 2047, 2048)],
    *[(size, -3, MINUS_3) for size in (100, 2047)],
    *[(2048, limit, DISGUISED) for limit in (None, -3, 1, 100, 2048)],
    *[(size, limit, AT_LEAST) for size in (2049, 5000) for limit in (None, 0, -3, 1, 100, 2048)],
    *[(size, 2049, TOO_MANY) for size in (100, 2047, 2048, 2049, 5000)],
]


@pytest.mark.parametrize(("prompt", "limit", "body"), VLLM_0_32)
def test_vllm_answers_as_the_real_one(prompt, limit, body):
    assert refusal("vllm", Sizes(2048, prompt, limit)) == body


def test_vllm_names_the_field_that_the_limit_came_in():
    assert refusal("vllm", Sizes(2048, 100, 5000, "max_completion_tokens")) == TOO_MANY_NEW_NAME


# The other styles: what was seen in the wild, in public issues and logs.
SEEN = [
    (
        "vllm-0.10",
        Sizes(8192, 8195),
        vllm(
            "This model's maximum context length is 8192 tokens. However, your request has 8195 input tokens. Please "
            "reduce the length of the input messages. None",
            None,
        ),
    ),
    (
        "vllm-0.10",
        Sizes(32768, 18954, 16384),
        vllm(
            "'max_tokens' or 'max_completion_tokens' is too large: 16384. This model's maximum context length is 32768 "
            "tokens and your request has 18954 input tokens (16384 > 32768 - 18954). None",
            None,
        ),
    ),
    (
        "llama.cpp",
        Sizes(25088, 25837, 4),
        {
            "error": {
                "code": 400,
                "message": "request (25837 tokens) exceeds the available context size (25088 tokens), try increasing it",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 25837,
                "n_ctx": 25088,
            }
        },
    ),
    (
        "sglang",
        Sizes(40960, 61709),
        {
            "object": "error",
            "message": "The input (61709 tokens) is longer than the model's context length (40960 tokens).",
            "type": "BadRequest",
            "param": None,
            "code": 400,
        },
    ),
    (
        "sglang",
        Sizes(202752, 170941, 32000),
        {
            "object": "error",
            "message": "Requested token count exceeds the model's maximum context length of 202752 tokens. You requested a "
            "total of 202941 tokens: 170941 tokens from the input messages and 32000 tokens for the completion. Please "
            "reduce the number of tokens in the input messages or the completion to fit within the limit.",
            "type": "BadRequest",
            "param": None,
            "code": 400,
        },
    ),
    (
        "openai",
        Sizes(4097, 35569),
        openai_body(
            "This model's maximum context length is 4097 tokens. However, your messages resulted in 35569 tokens. Please "
            "reduce the length of the messages."
        ),
    ),
    (
        "openai",
        Sizes(128000, 202868, tool_tokens=101),
        openai_body(
            "This model's maximum context length is 128000 tokens. However, your messages resulted in 202868 tokens (202767 "
            "in the messages, 101 in the functions). Please reduce the length of the messages or functions."
        ),
    ),
    (
        "openai",
        Sizes(4097, 3703, 500),
        openai_body(
            "This model's maximum context length is 4097 tokens. However, you requested 4203 tokens (3703 in the messages, "
            "500 in the completion). Please reduce the length of the messages or completion."
        ),
    ),
    (
        "azure",
        Sizes(272000, 509178),
        openai_body(
            "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 509178 tokens. Please "
            "reduce the length of the messages."
        ),
    ),
]


@pytest.mark.parametrize(("style", "sizes", "body"), SEEN)
def test_other_servers_answer_as_they_were_seen_to(style, sizes, body):
    assert refusal(style, sizes) == body


@pytest.mark.parametrize("style", STYLES)
def test_what_fits_with_its_answer_is_served(style):
    assert refusal(style, Sizes(1000, 900, 100)) is None
    assert refusal(style, Sizes(1000, 999)) is None
    assert refusal(style, Sizes(1000, 1001)) is not None


@pytest.mark.parametrize("style", ["vllm", "vllm-0.10", "llama.cpp", "sglang"])
def test_a_prompt_that_fills_the_window_is_refused(style):
    assert refusal(style, Sizes(1000, 1000, 1)) is not None
