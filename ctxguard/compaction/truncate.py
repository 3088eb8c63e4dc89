"""Cutting single messages that are too large, the newest ones included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ctxguard.compaction.base import CompactionContext, CompactionStrategy, Target, shorten
from ctxguard.errors import ConfigurationError
from ctxguard.messages import TextSpan, Turn


@dataclass(frozen=True)
class TruncateMessages(CompactionStrategy):
    """Cut the middle out of the largest texts, as much as is needed and never below a floor.

    Largest first: all texts above a common cap are cut to it, and the cap is as high as the need
    allows. Texts of the newest turn are included; the system message, the first task and pinned turns
    are not, nor are tool calls. The floor is ``keep_tokens``, or ``keep_share`` of the prompt limit.

    Attributes:
        keep_tokens: tokens that each text keeps at least; None takes ``keep_share``.
        keep_share: the same as a share of the prompt limit.
        target: ``"low"`` cuts down to the low mark, ``"high"`` only until the prompt fits.
    """

    keep_tokens: int | None = None
    keep_share: float = 0.5
    target: Target = "low"

    def __post_init__(self) -> None:
        if self.keep_tokens is not None and self.keep_tokens < 1:
            raise ConfigurationError(f"TruncateMessages: keep_tokens must be ≥ 1, got {self.keep_tokens}")
        if not 0 < self.keep_share <= 1:
            raise ConfigurationError(f"TruncateMessages: keep_share must be in (0, 1], got {self.keep_share}")

    def compact(self, turns: Sequence[Turn], context: CompactionContext) -> Sequence[Turn]:
        floor = self.keep_tokens or max(1, int(self.keep_share * context.prompt_limit))
        sizes = [
            (tokens, position, span)
            for position, turn in enumerate(turns)
            if not turn.pinned
            for span in turn.spans
            # No known vocabulary makes more than four tokens of a character; skip the sure cases.
            if len(span.text) * 4 > floor and (tokens := context.counter.count_text(span.text)) > floor
        ]
        if not sizes:
            return turns
        cap = max(floor, _cap(sorted((tokens for tokens, _, _ in sizes), reverse=True), context.need))
        short: dict[int, dict[TextSpan, str]] = {}
        for tokens, position, span in sizes:
            if tokens > cap:
                short.setdefault(position, {})[span] = shorten(span.text, cap, context.counter)
        return [turn.with_texts(short[i]) if i in short else turn for i, turn in enumerate(turns)]


def _cap(sizes: Sequence[int], need: int) -> int:
    """The highest cap that frees ``need`` tokens of these sizes (descending), at least 0."""
    total = 0
    for taken, size in enumerate(sizes, start=1):
        total += size
        following = sizes[taken] if taken < len(sizes) else 0
        if total - taken * following >= need:
            return max(0, (total - need) // taken)
    return 0
