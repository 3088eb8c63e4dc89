"""What a compaction strategy is given, and what it must give back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ctxguard.effects import Flow
from ctxguard.messages import Turn
from ctxguard.tokens.base import TokenCounter

Target = Literal["low", "high"]

CLEARED = "[tool result removed to fit the context window]"
"""Stands in place of a tool result that was cleared. A fixed text: clearing twice changes nothing."""

CUT = "\n[... cut to fit the context window ...]\n"
"""Stands where the middle of a text was cut out. A text is never marked twice."""


@dataclass
class CompactionContext:
    """What a strategy needs to know. Made anew for each strategy run.

    Attributes:
        need: tokens to free so that the strategy's target holds; always > 0 when it runs.
        prompt_limit: the limit of the prompt, in tokens.
        counter: counts texts (``count_text``) and cuts them (``truncate``).
        count: tokens of the whole prompt if it were made of these turns.
        cost: tokens of one turn by itself, roughly: to find where to begin, not to decide.
        is_refused: whether the chat template refuses these turns.
        may_ask_model: False while an earlier compaction is being computed again: stored summaries may be
            used then. A strategy that would have to ask sets ``is_deferred`` and returns the turns as
            they are; compaction is then left to the end of the history, where asking is permitted.
        is_deferred: see ``may_ask_model``.
        notes: a strategy appends what the report should say beside its numbers.
    """

    need: int
    prompt_limit: int
    counter: TokenCounter
    count: Callable[[Sequence[Turn]], int]
    cost: Callable[[Turn], int]
    is_refused: Callable[[Sequence[Turn]], bool]
    may_ask_model: bool = True
    is_deferred: bool = False
    notes: list[str] = field(default_factory=list)


class CompactionStrategy:
    """One way of making a history smaller: whole turns in, whole turns out.

    Override `compact`, or `compact_flow` if the strategy asks a model. A strategy

    - is a frozen dataclass of its settings (its ``repr`` identifies it in the ledger),
    - depends on nothing but its arguments: same turns and need, same result,
    - frees about ``context.need`` tokens, no more than it must, the oldest first,
    - never touches a turn that is ``pinned``, never drops one that is ``newest``,
    - returns what it cannot shorten as it was: the very same objects.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class DropThoughts(CompactionStrategy):
        ...     def compact(self, turns, context):
        ...         return [t for t in turns if t.pinned or t.newest or t.tool_names != ("think",)]
    """

    target: Target = "low"
    """``"low"``: run until the low mark is reached. ``"high"``: only until the prompt fits at all."""

    on_first_sight: ClassVar[bool] = False
    """True: runs over every message on every call, before anything is counted (see `CapToolResults`)."""

    @property
    def name(self) -> str:
        """The strategy's name in reports."""
        return type(self).__name__

    def compact(self, turns: Sequence[Turn], context: CompactionContext) -> Sequence[Turn]:
        """The turns, smaller."""
        raise TypeError(f"{self.name} must override compact() or compact_flow()")

    def compact_flow(self, turns: Sequence[Turn], context: CompactionContext) -> Flow[Sequence[Turn]]:
        """As `compact`, for strategies that ask a model: a generator that yields effects."""
        yield from ()
        return self.compact(turns, context)


def shorten(text: str, max_tokens: int, counter: TokenCounter) -> str:
    """Head and tail of a text around `CUT`, at most ``max_tokens`` tokens; one mark, however often cut."""
    if counter.count_text(text) <= max_tokens:
        return text
    unmarked = text.replace(CUT, "")
    if unmarked is not text:
        # Without its mark the text may just fit; it must be cut again, or the mark would be lost.
        max_tokens = min(max_tokens, counter.count_text(unmarked) - 1)
    return counter.truncate(unmarked, max(max_tokens, 0), marker=CUT)
