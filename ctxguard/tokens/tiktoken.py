"""Counting for OpenAI's hosted models: their vocabularies, and the formula that OpenAI publishes."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tiktoken
import tiktoken.model

from ctxguard.errors import CounterError
from ctxguard.messages import part_texts, reasoning_of, tool_calls_of
from ctxguard.messages.content import call_name
from ctxguard.tokens.approximate import argument_text
from ctxguard.tokens.base import Message, Tool
from ctxguard.tokens.cache import DigestCache
from ctxguard.tokens.estimate import evenly
from ctxguard.tokens.media import IMAGE_TOKENS, media_tokens
from ctxguard.tokens.openai_tools import tool_schema_tokens
from ctxguard.tokens.text import encodable, sendable
from ctxguard.tokens.truncate import truncate_text

# OpenAI cookbook, "How to count tokens with tiktoken", num_tokens_from_messages (for gpt-3.5-turbo-0613
# and later).
_PER_MESSAGE, _PER_NAME, _PER_REPLY = 3, 1, 3
# Not published: what tool calls cost besides name and arguments. A guess on the high side.
_PER_CALL, _PER_CALL_LIST = 8, 12
_DOWNLOAD_SECONDS = 20.0
_CHUNK = 50_000
_LONG_SPACE = re.compile(rf"\s{{{_CHUNK}}}")
_OPENAI_CHAT = re.compile(r"(chatgpt-|gpt-\d|gpt-oss|o\d(-|$))")
# Largest count of one image where it is not the 85 + 8 x 170 of gpt-4o (platform.openai.com, "Images and
# vision"): the tiles of gpt-4o-mini; 1,536 patches times the model's factor for the newer small models.
_IMAGE_TOKENS = (
    ("gpt-4o-mini", 2833 + 8 * 5667),
    ("gpt-4.1-mini", 2489),
    ("gpt-4.1-nano", 3779),
    ("gpt-5-mini", 2489),
    ("gpt-5-nano", 3779),
    ("o4-mini", 2642),
)


class TiktokenCounter:
    """Counts for an OpenAI model: right for plain messages, close for tools.

    OpenAI publishes the vocabulary and a formula for messages, and one for flat tool schemas, in its
    cookbook; for tool calls, nested schemas and reasoning there is no rule. So ``exact`` is False, with a
    margin of 5 %.

    Args:
        model: e.g. ``"gpt-4o"``; a prefix such as ``openai/`` or ``azure/`` is allowed.
        image_tokens: what one image counts; None takes the published largest for the model.

    Attributes:
        exact: False; margin: 0.05; encoding_name: e.g. ``"o200k_base"``.

    Raises:
        CounterError: not an OpenAI model, or its vocabulary is neither in the cache folder nor downloadable.
    """

    exact = False
    margin = 0.05

    def __init__(self, model: str, *, image_tokens: int | None = None) -> None:
        bare = bare_model_name(model)
        self.encoding_name = encoding_name(model)
        self.name = f"tiktoken({bare})"
        self._model = bare
        if image_tokens is None:
            image_tokens = next((t for name, t in _IMAGE_TOKENS if bare.startswith(name)), IMAGE_TOKENS)
        self._image_tokens = image_tokens
        self._text = TiktokenTextCounter(_load(self.encoding_name, model))
        self.fingerprint = f"tiktoken-1-{self.encoding_name}-{image_tokens}-{bare in _OLD_TOOL_FORMULA}"

    def count(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Tokens of the whole prompt by OpenAI's formulas. ``template_kwargs`` mean nothing to OpenAI."""
        count = self._text.count
        total = _PER_REPLY + media_tokens(messages, self._image_tokens)
        for message in messages:
            total += _PER_MESSAGE + count(str(message.get("role", ""))) + count(reasoning_of(message))
            total += sum(count(text) for text in part_texts(message) if text)
            name = message.get("name")
            if isinstance(name, str):
                total += _PER_NAME + count(name)
            calls = tool_calls_of(message)
            total += _PER_CALL_LIST if calls else 0
            for call in calls:
                total += _PER_CALL + count(call_name(call)) + count(argument_text(call))
        if tools:
            total += tool_schema_tokens(
                tools, count, function_start=10 if self._model in _OLD_TOOL_FORMULA else 7
            )
        return total

    def count_text(self, text: str) -> int:
        """Tokens of a bare text; special tokens in it are plain text, as OpenAI takes them. Never raises."""
        return self._text.count(text)

    def truncate(self, text: str, max_tokens: int, *, marker: str = "\n…\n") -> str:
        """Head and tail of ``text`` around ``marker``, at most ``max_tokens`` tokens; see `truncate_text`."""
        return truncate_text(text, max_tokens, self._text, marker=marker)


_OLD_TOOL_FORMULA = frozenset({"gpt-3.5-turbo", "gpt-4"})


class TiktokenTextCounter:
    """Counts bare texts with one tiktoken encoding, remembering them."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        self._encoding = encoding
        self._cache = DigestCache()

    def count(self, text: str) -> int:
        """Tokens of ``text``."""
        key = DigestCache.key(text)
        known = self._cache.get(key)
        if known is None:
            known = self._count(sendable(text))
            self._cache.put(key, known)
        return known

    def token_starts(self, text: str) -> Sequence[int]:
        """For each token of ``text``, the index of the character in which it begins."""
        starts: list[int] = []
        at = 0
        for piece in _chunks(encodable(text)):
            ids = self._encode(piece)
            offsets = (
                evenly(piece, _bytes(piece)) if ids is None else self._encoding.decode_with_offsets(ids)[1]
            )
            starts.extend(at + offset for offset in offsets)
            at += len(piece)
        return starts

    def _count(self, text: str) -> int:
        counts = ((piece, self._encode(piece)) for piece in _chunks(text))
        return sum(_bytes(piece) if ids is None else len(ids) for piece, ids in counts)

    def _encode(self, text: str) -> list[int] | None:
        """The ids, or None where tiktoken panics; its tokens are no more than the bytes then."""
        try:
            return self._encoding.encode_ordinary(text)
        except BaseException as error:  # pyo3's PanicException is no Exception, and cannot be imported
            if type(error).__name__ != "PanicException":
                raise
            return None


def _bytes(text: str) -> int:
    return len(text.encode("utf-8"))


def _chunks(text: str) -> list[str]:
    """``[text]``, or pieces of it where tiktoken would run out of stack.

    On about a million characters of white space its regex engine overflows, and pyo3 raises a PanicException,
    which is a BaseException. Cut apart, such a text counts a token or so more for each piece, never fewer.
    """
    if len(text) <= _CHUNK or _LONG_SPACE.search(text) is None:
        return [text]
    return [text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK)]


def bare_model_name(model: str) -> str:
    """``"gpt-4o"`` of ``"openai/gpt-4o"`` and ``"azure/gpt-4o"``."""
    prefix, slash, rest = model.partition("/")
    return rest if slash and prefix in ("openai", "azure") else model


def is_openai_chat_model(model: str) -> bool:
    """Whether this names a chat model hosted by OpenAI (or one of its open ones, gpt-oss)."""
    bare = bare_model_name(model)
    return _OPENAI_CHAT.match(bare.removeprefix("ft:")) is not None


def encoding_name(model: str) -> str:
    """The encoding of an OpenAI model. One newer than the installed tiktoken is taken to use o200k_base.

    Raises:
        CounterError: not an OpenAI model.
    """
    bare = bare_model_name(model)
    try:
        return tiktoken.model.encoding_name_for_model(bare)
    except KeyError:
        if is_openai_chat_model(bare):
            return "o200k_base"
        raise CounterError(
            f"{model!r} is not an OpenAI model that tiktoken knows: pass tokenizer=… (the model's folder, "
            "or a transformers tokenizer) for an exact counter, or counter=ApproximateCounter()"
        ) from None


@lru_cache(maxsize=8)
def _load(name: str, model: str) -> tiktoken.Encoding:
    """The encoding, from the cache folder or the network, within `_DOWNLOAD_SECONDS`."""
    from tiktoken_ext import openai_public  # type: ignore[import-untyped]

    constructor = openai_public.ENCODING_CONSTRUCTORS[name]
    result: list[tiktoken.Encoding | Exception] = []

    def load() -> None:
        try:
            # Not through get_encoding: it holds a lock while it downloads, and has no timeout.
            result.append(tiktoken.Encoding(**constructor()))
        except Exception as error:  # requests, OS and hash errors alike: no vocabulary
            result.append(error)

    thread = threading.Thread(target=load, daemon=True, name="ctxguard-tiktoken")
    thread.start()
    thread.join(_DOWNLOAD_SECONDS)
    outcome = result[0] if result else TimeoutError(f"no answer within {_DOWNLOAD_SECONDS:g} s")
    if isinstance(outcome, tiktoken.Encoding):
        return outcome
    raise CounterError(
        f"the vocabulary {name} of {model!r} is neither in {str(cache_folder())!r} nor downloadable "
        f"({type(outcome).__name__}: {str(outcome)[:200]}). Set TIKTOKEN_CACHE_DIR to a folder that holds it "
        "(any machine with network fills one by using tiktoken once), or pass counter=ApproximateCounter()"
    ) from outcome


def cache_folder() -> Path:
    """Where tiktoken looks for vocabularies that it has downloaded before."""
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        if variable in os.environ:
            return Path(os.environ[variable])
    return Path(tempfile.gettempdir()) / "data-gym-cache"
