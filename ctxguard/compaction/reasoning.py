"""Dropping the reasoning text of earlier turns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ctxguard.compaction.base import CompactionContext, CompactionStrategy
from ctxguard.messages import Message, Turn, part_texts, reasoning_of, with_part_texts, without_reasoning

_THINK = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


@dataclass(frozen=True)
class DropOldReasoning(CompactionStrategy):
    """Take the reasoning out of every turn but the newest: ``reasoning_content`` and ``<think>`` blocks.

    Does nothing where the chat template leaves old reasoning out anyway.
    """

    def compact(self, turns: Sequence[Turn], context: CompactionContext) -> Sequence[Turn]:
        compacted = [
            turn if turn.pinned or turn.newest or turn.kind != "assistant" else _without_reasoning(turn)
            for turn in turns
        ]
        if all(new is old for new, old in zip(compacted, turns, strict=True)):
            return turns
        return compacted if context.count(compacted) < context.count(turns) else turns


def _without_reasoning(turn: Turn) -> Turn:
    messages = tuple(_strip(message) for message in turn.messages)
    if all(new is old for new, old in zip(messages, turn.messages, strict=True)):
        return turn
    return replace(turn, messages=messages)


def _strip(message: Message) -> Message:
    if message.get("role") != "assistant":
        return message
    if reasoning_of(message):
        message = without_reasoning(message)
    texts = {
        part: _THINK.sub("", text)
        for part, text in enumerate(part_texts(message))
        if text and "<think>" in text and _THINK.search(text)
    }
    return with_part_texts(message, texts) if texts else message
