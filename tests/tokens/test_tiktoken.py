"""OpenAI's models: the published formulas, and what happens without the vocabulary."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tiktoken.load

from ctxguard.errors import CounterError
from ctxguard.tokens import TiktokenCounter, TokenCounter
from ctxguard.tokens import tiktoken as module
from ctxguard.tokens.openai_tools import tool_schema_tokens
from ctxguard.tokens.tiktoken import TiktokenTextCounter, encoding_name, is_openai_chat_model
from tests.doubles import assistant, call, system, user

COOKBOOK_MESSAGES = [
    system(
        "You are a helpful, pattern-following assistant that translates corporate jargon into plain English."
    ),
    {"role": "system", "name": "example_user", "content": "New synergies will help drive top-line growth."},
    {
        "role": "system",
        "name": "example_assistant",
        "content": "Things working well together will increase revenue.",
    },
    {
        "role": "system",
        "name": "example_user",
        "content": "Let's circle back when we have more bandwidth to touch base on opportunities for increased leverage.",
    },
    {
        "role": "system",
        "name": "example_assistant",
        "content": "Let's talk later when we're less busy about how to do better.",
    },
    user("This late pivot means we don't have time to boil the ocean for the client deliverable."),
]
COOKBOOK_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather in a given location",
            "parameters": {
                "type": "object",
                "properties": {
                    "location": {
                        "type": "string",
                        "description": "The city and state, e.g. San Francisco, CA",
                    },
                    "unit": {
                        "type": "string",
                        "description": "The unit of temperature to return",
                        "enum": ["celsius", "fahrenheit"],
                    },
                },
                "required": ["location"],
            },
        },
    }
]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch, qwen_encoding: tiktoken.Encoding) -> TiktokenCounter:
    """Counts with another vocabulary, so that no download is needed."""
    monkeypatch.setattr(module, "_load", lambda name, model: qwen_encoding)
    return TiktokenCounter("gpt-4o")


@pytest.mark.usefixtures("o200k")
def test_counts_the_examples_of_the_cookbook_as_the_api_does() -> None:
    counter = TiktokenCounter("gpt-4o")
    assert counter.count(COOKBOOK_MESSAGES) == 124
    weather = [
        system("You are a helpful assistant that can answer to questions about the weather."),
        user("What's the weather like in San Francisco?"),
    ]
    assert counter.count(weather, tools=COOKBOOK_TOOLS) == 101


def test_is_a_counter_that_says_it_is_not_exact(counter: TiktokenCounter) -> None:
    assert isinstance(counter, TokenCounter)
    assert (counter.exact, counter.margin) == (False, 0.05)
    assert counter.name == "tiktoken(gpt-4o)"
    assert TiktokenCounter("gpt-4").fingerprint != counter.fingerprint


def test_special_tokens_in_text_are_text(counter: TiktokenCounter) -> None:
    assert counter.count_text("<|endoftext|>") > 1


def test_tool_calls_reasoning_and_parts_are_counted(counter: TiktokenCounter) -> None:
    plain = counter.count([user("hi")])
    assert counter.count([user([{"type": "text", "text": "hi"}])]) == plain
    spoken = counter.count([user("hi"), assistant(content="x")])
    called = counter.count([user("hi"), assistant(call("c", "read_file", '{"path": "a"}'), content="x")])
    thought = counter.count([user("hi"), assistant(content="x", reasoning_content="because of this")])
    assert plain < spoken < thought
    assert called >= spoken + counter.count_text("read_file") + counter.count_text('{"path": "a"}')


def test_nested_tool_schemas_cost_more_than_their_outside() -> None:
    nested: dict[str, Any] = {
        "type": "object",
        "properties": {"key": {"type": "string", "description": "The key."}},
    }

    def tokens(schema: dict[str, Any]) -> int:
        parameters = {"type": "object", "properties": {"p": schema}}
        return tool_schema_tokens([{"function": {"name": "f", "parameters": parameters}}], len)

    flat = tokens({"type": "array"})
    for more in ({"items": nested}, {"anyOf": [nested]}, {"additionalProperties": nested}, nested):
        assert tokens({"type": "array", **more}) > flat
    assert tool_schema_tokens([{"name": "f"}, {"function": {"name": "g", "parameters": None}}], len) > 0


def test_a_megabyte_of_white_space_does_not_panic(tiktoken_text: TiktokenTextCounter) -> None:
    for text in (" " * 1_000_000, "\n" * 1_200_000, "x" + "\t " * 600_000):
        assert 0 < tiktoken_text.count(text) <= len(text)
    assert len(tiktoken_text.token_starts(" " * 1_000_000)) > 0
    assert tiktoken_text.count("a\ud800") == tiktoken_text.count("a\ufffd")


class PanicException(BaseException):
    """Named as pyo3 names what it raises for a panic in Rust."""


@pytest.mark.parametrize("error", [PanicException, KeyboardInterrupt])
def test_a_panic_counts_the_bytes_and_an_interrupt_passes(error: type[BaseException]) -> None:
    class Panicking:
        def encode_ordinary(self, text: str) -> list[int]:
            raise error

    counter = TiktokenTextCounter(Panicking())  # type: ignore[arg-type]
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            counter.count("é")
    else:
        assert counter.count("aé") == 3
        assert list(counter.token_starts("aé")) == [0, 0, 1]


@pytest.mark.parametrize(
    ("model", "encoding"),
    [
        ("gpt-4o-2024-11-20", "o200k_base"),
        ("openai/gpt-4o", "o200k_base"),
        ("gpt-3.5-turbo", "cl100k_base"),
        ("gpt-9-from-the-future", "o200k_base"),
        ("o9-mini", "o200k_base"),
        ("ft:gpt-4o:org::id", "o200k_base"),
    ],
)
def test_knows_the_encoding_of_old_and_new_models(model: str, encoding: str) -> None:
    assert encoding_name(model) == encoding
    assert is_openai_chat_model(model)


@pytest.mark.parametrize(
    "model", ["Qwen/Qwen3-8B", "gpt-j-6b", "ollama/gpt-4o", "text-embedding-3-small", "", "o", "olmo-2"]
)
def test_other_models_are_not_taken_for_openais(model: str) -> None:
    assert not is_openai_chat_model(model)


def test_an_unknown_model_is_an_error() -> None:
    with pytest.raises(CounterError, match=r"'Qwen/Qwen3-8B'.*tokenizer="):
        TiktokenCounter("Qwen/Qwen3-8B")


def test_a_missing_vocabulary_is_an_error_with_model_encoding_folder_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> bytes:
        raise ConnectionError("no network")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.load, "read_file", refuse)
    module._load.cache_clear()
    with pytest.raises(CounterError) as caught:
        TiktokenCounter("gpt-4o")
    for part in (
        "gpt-4o",
        "o200k_base",
        str(tmp_path),
        "TIKTOKEN_CACHE_DIR",
        "ApproximateCounter",
        "no network",
    ):
        assert part in str(caught.value)


def test_a_download_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(path: str) -> bytes:
        time.sleep(3)
        raise ConnectionError

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.load, "read_file", hang)
    monkeypatch.setattr(module, "_DOWNLOAD_SECONDS", 0.2)
    module._load.cache_clear()
    start = time.monotonic()
    with pytest.raises(CounterError, match="no answer within"):
        TiktokenCounter("gpt-4o")
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("model", "detail", "tokens"),
    [
        ("gpt-4o", "high", 1445),
        ("gpt-4o", "low", 85),
        ("gpt-4.1-mini", "auto", 2489),
        ("gpt-4o-mini", "high", 48169),
    ],
)
def test_an_image_counts_its_models_largest(
    model: str, detail: str, tokens: int, monkeypatch: pytest.MonkeyPatch, qwen_encoding: tiktoken.Encoding
) -> None:
    monkeypatch.setattr(module, "_load", lambda name, model: qwen_encoding)
    counter = TiktokenCounter(model)
    image = {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + "A" * 9999, "detail": detail},
    }
    assert counter.count([user([image])]) - counter.count([user("")]) == tokens
