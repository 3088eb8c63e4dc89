"""A counter whose counts can be worked out by hand: a token is a word, a message costs two more."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ctxguard.messages import reasoning_of, text_of, tool_calls_of

_WORD = re.compile(r"\S+")


class WordCounter:
    """Counts words. Renders reasoning and tool calls; refuses nothing."""

    name = "words"
    exact = True
    margin = 0.0
    fingerprint = "words"

    def count(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        total = sum(self.count_text(json.dumps(tool)) for tool in tools or ())
        for message in messages:
            total += 2 + self.count_text(text_of(message)) + self.count_text(reasoning_of(message))
            for call in tool_calls_of(message):
                total += self.count_text(str(call["function"]))
        return total

    def count_text(self, text: str) -> int:
        return len(_WORD.findall(text))

    def truncate(self, text: str, max_tokens: int, *, marker: str = "\n…\n") -> str:
        words = _WORD.findall(text)
        if len(words) <= max_tokens:
            return text
        kept = max_tokens - self.count_text(marker)
        if kept < 0:
            return " ".join(words[:max_tokens])
        head = kept - kept // 2
        return " ".join(words[:head]) + marker + " ".join(words[len(words) - kept // 2 :])


def words(count: int, tag: str = "w") -> str:
    """A text of ``count`` words, all different."""
    return " ".join(f"{tag}{i}" for i in range(count))


def call(call_id: str, name: str = "read", arguments: str = "{}") -> dict[str, Any]:
    """A native tool call."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(*calls: dict[str, Any], content: str | None = None, **extra: Any) -> dict[str, Any]:
    """An assistant message, with tool calls if any."""
    message: dict[str, Any] = {"role": "assistant", "content": content, **extra}
    if calls:
        message["tool_calls"] = list(calls)
    return message


def result(call_id: str, content: Any) -> dict[str, Any]:
    """A native tool result."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def user(content: Any) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    """A system message."""
    return {"role": "system", "content": content}


def agent_history(turns: int, result_words: int = 100, *, system_words: int = 10) -> list[dict[str, Any]]:
    """System, task, then ``turns`` turns of one call and one result each."""
    messages = [system(words(system_words, "s")), user("please find the bug")]
    for turn in range(turns):
        messages.append(assistant(call(f"c{turn}", arguments=f'{{"path": "f{turn}.py"}}')))
        messages.append(result(f"c{turn}", words(result_words, f"r{turn}_")))
    return messages
