"""The counter for when there is nothing exact: a stated estimate, and one warning that it is one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ctxguard.messages import part_texts, reasoning_of, tool_calls_of
from ctxguard.messages.content import call_arguments, call_name
from ctxguard.tokens.base import Message, Tool
from ctxguard.tokens.estimate import EstimatingCounter
from ctxguard.tokens.media import IMAGE_TOKENS, media_tokens
from ctxguard.tokens.truncate import truncate_text

MARGIN = 0.15
_PER_MESSAGE = 7
_PER_CALL = 18
_PER_PROMPT = 8
_TOOLS_PREAMBLE = 140
_warned: set[str] = set()


class ApproximateCountWarning(UserWarning):
    """Prompts are counted with an estimate; the message says how to get an exact count."""


class ApproximateCounter:
    """Estimates the tokens of a prompt from its characters; needs no vocabulary.

    The fixed costs (a message 7, a tool call 18, a tools preamble 140 tokens) are Qwen3's template rounded
    up, the widest of the common ones. Measured on 3,052 prompts from 310 agent trajectories, the true count
    over the estimate is 0.92 on average for Qwen3 (99.9 % of the prompts below 1.14, the largest 1.17) and
    0.83 for OpenAI's o200k_base (1.09, 1.13): within the margin for 99.93 % and 100 %.
    ``tests/tokens/test_approximate.py`` repeats it on a third of them. Vocabularies much smaller than these,
    and scripts that a vocabulary does not know, cost more.

    Args:
        model: what it stands in for; names it in reports and in the one warning per process.
        image_tokens: what one image counts.
        warn: False keeps it silent.

    Attributes:
        exact: False; margin: 0.15.
    """

    exact = False
    margin = MARGIN

    def __init__(self, model: str = "", *, image_tokens: int = IMAGE_TOKENS, warn: bool = True) -> None:
        self.name = f"approximate({model})" if model else "approximate"
        self.fingerprint = f"approximate-1-{image_tokens}"
        self._image_tokens = image_tokens
        self._text = EstimatingCounter()
        if warn:
            _warn_once(model)

    def count(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """Estimated tokens of the whole prompt. ``template_kwargs`` are not looked at; never refuses."""
        count = self._text.count
        total = _PER_PROMPT + media_tokens(messages, self._image_tokens)
        for message in messages:
            total += _PER_MESSAGE + count(reasoning_of(message))
            total += sum(count(text) for text in part_texts(message) if text)
            for call in tool_calls_of(message):
                total += _PER_CALL + count(call_name(call)) + count(argument_text(call))
        if tools:
            total += _TOOLS_PREAMBLE + sum(count(_as_text(tool)) for tool in tools)
        return total

    def count_text(self, text: str) -> int:
        """Estimated tokens of a bare text. Never raises on any ``str``."""
        return self._text.count(text)

    def truncate(self, text: str, max_tokens: int, *, marker: str = "\n…\n") -> str:
        """Head and tail of ``text`` around ``marker``, estimated at no more than ``max_tokens``."""
        return truncate_text(text, max_tokens, self._text, marker=marker)


def argument_text(call: Mapping[str, Any]) -> str:
    """The arguments of a tool call as the text that they are sent as."""
    return _as_text(call_arguments(call))


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _warn_once(model: str) -> None:
    if model in _warned:
        return
    _warned.add(model)
    warnings.warn(
        f"prompts{f' for {model!r}' if model else ''} are counted with an estimate, and {MARGIN:.0%} is kept "
        "free for it. "
        "For exact counts pass tokenizer=… (the model's folder, or a transformers tokenizer), "
        "or for OpenAI models counter=TiktokenCounter(model)",
        ApproximateCountWarning,
        stacklevel=3,
    )
