"""Shortening what tools answered: on first sight, or when the history has grown too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ctxguard.compaction.base import CLEARED, CompactionContext, CompactionStrategy, shorten
from ctxguard.errors import ConfigurationError
from ctxguard.messages import TextSpan, Turn


@dataclass(frozen=True)
class CapToolResults(CompactionStrategy):
    """Cut every tool result to a size of your choice the first time it is seen.

    The most effective single measure, and the one that keeps the sent prefix most stable: a result
    has its final form from the first call on. It is not in the default list, because it shortens
    results even while everything would fit.

    Attributes:
        max_tokens: tokens a result may have; None leaves tools that ``per_tool`` does not name alone.
        per_tool: other limits by tool name.
    """

    max_tokens: int | None = 2_000
    per_tool: Mapping[str, int] = field(default_factory=dict)

    on_first_sight: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for limit in (self.max_tokens, *self.per_tool.values()):
            if limit is not None and limit < 1:
                raise ConfigurationError(f"CapToolResults: a limit must be at least 1 token, got {limit}")

    def compact(self, turns: Sequence[Turn], context: CompactionContext) -> Sequence[Turn]:
        return [turn if turn.pinned else self._cap(turn, context) for turn in turns]

    def _cap(self, turn: Turn, context: CompactionContext) -> Turn:
        short: dict[TextSpan, str] = {}
        for span in turn.spans:
            limit = self.per_tool.get(span.tool, self.max_tokens)
            # No known vocabulary makes more than four tokens of a character; skip the sure cases.
            if span.kind != "result" or limit is None or len(span.text) * 4 <= limit:
                continue
            text = shorten(span.text, limit, context.counter)
            if text is not span.text:
                short[span] = text
        return turn.with_texts(short) if short else turn


@dataclass(frozen=True)
class ClearToolResults(CompactionStrategy):
    """Replace old tool results by a short marker, oldest first; the calls stay.

    Graded: the last one is cut, not cleared, so that no more is lost than needed.

    Attributes:
        keep_last_turns: newest turns whose results stay whole.
        min_tokens: results this small are not worth clearing.
        exclude_tools: names of tools whose results are never cleared.
    """

    keep_last_turns: int = 1
    min_tokens: int = 64
    exclude_tools: frozenset[str] = frozenset()

    def compact(self, turns: Sequence[Turn], context: CompactionContext) -> Sequence[Turn]:
        count = context.counter.count_text
        marker_tokens = count(CLEARED)
        need = context.need
        compacted = list(turns)
        for position, turn in enumerate(_old(turns, self.keep_last_turns)):
            if need <= 0:
                break
            if turn.pinned or turn.newest:
                continue
            short: dict[TextSpan, str] = {}
            for span in turn.spans:
                if need <= 0 or span.kind != "result" or span.tool in self.exclude_tools:
                    continue
                tokens = count(span.text)
                if tokens < max(self.min_tokens, marker_tokens + 1):
                    continue
                keep = tokens - need
                text = CLEARED
                if keep >= max(self.min_tokens, 2 * marker_tokens):
                    text = shorten(span.text, keep, context.counter)
                short[span] = text
                need -= tokens - count(text)
            if short:
                compacted[position] = turn.with_texts(short)
        return compacted


def _old(turns: Sequence[Turn], keep_last: int) -> Sequence[Turn]:
    return turns[: max(0, len(turns) - keep_last)]
