"""A server and a trainer in miniature, whose token ids can be worked out by hand: a token is a word."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ctxguard.integrations.trajectories import split_into_segments
from ctxguard.messages import text_of
from tests.doubles import WordCounter

_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


class WordIdCounter(WordCounter):
    """Renders each message as role, words, end; then the generation prompt. Knows the ids of all of them.

    Args:
        strips_thinking: leave out the thinking of answers before the last user message, as Qwen3's template.
    """

    name = "word ids"

    def __init__(self, *, strips_thinking: bool = False) -> None:
        self.strips_thinking = strips_thinking
        self.fingerprint = f"word ids, strips_thinking={strips_thinking}"
        self._vocabulary: dict[str, int] = {}

    def ids_of_text(self, text: str) -> list[int]:
        return [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in text.split()]

    def ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        last_user = max((i for i, m in enumerate(messages) if m.get("role") == "user"), default=-1)
        rendered = []
        for index, message in enumerate(messages):
            text = text_of(message)
            if self.strips_thinking and message["role"] == "assistant" and index < last_user:
                text = _THINKING.sub("", text)
            rendered.append(f"<{message['role']}> {text} {_calls(message)} <end>")
        return self.ids_of_text(" ".join(rendered) + " <assistant>")

    def count(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        return len(self.ids(messages))

    def generated(self, answer: Mapping[str, Any], max_tokens: int) -> list[int]:
        """The ids of an answer: its words, its calls and the end, as far as the output limit lets it come."""
        return self.ids_of_text(f"{text_of(answer)} {_calls(answer)} <end>")[:max_tokens]


def _calls(message: Mapping[str, Any]) -> str:
    return " ".join(str(call["function"]["name"]) for call in message.get("tool_calls") or ())


def row_lengths(turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[int, int]]:
    """The rows that the trainer makes of these calls: tokens of the first prompt, and of all behind it."""
    rows = []
    for row in split_into_segments(turns):
        first, last = turns[row[0]], turns[row[-1]]
        rows.append((len(first[0]), len(last[0]) + len(last[1]) - len(first[0])))
    return rows
