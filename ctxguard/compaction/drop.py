"""Dropping the oldest turns: the last thing that is done before giving up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ctxguard.compaction.base import CompactionContext, CompactionStrategy
from ctxguard.messages import Turn


@dataclass(frozen=True)
class DropOldestTurns(CompactionStrategy):
    """Leave out the oldest turns, as few as are needed.

    What stands before the first task, the task itself, pinned turns and the newest turn stay. A cut
    ends where an assistant turn begins, so that user and assistant still alternate where they did.

    Attributes:
        keep_last_turns: newest assistant turns that stay.
    """

    keep_last_turns: int = 1

    def compact(self, turns: Sequence[Turn], context: CompactionContext) -> Sequence[Turn]:
        cuts = allowed_cuts(turns, self.keep_last_turns)
        if not cuts:
            return turns
        target = context.count(turns) - context.need
        # The smallest cut that reaches the target, else the largest; searched in growing steps from a guess.
        low, high, step = 0, len(cuts) - 1, 1
        middle = min(_guess(turns, cuts, context), max(0, high - 1))
        while low < high:
            if context.count(without(turns, cuts[middle])) <= target:
                high = middle
                middle = max(low, high - step)
            else:
                low = middle + 1
                middle = min(high - 1, low + step - 1)
            step *= 2
        if low == len(cuts) - 1 and low > 0 and context.is_refused(without(turns, cuts[low])):
            low -= 1  # strict templates refuse two user messages in a row: keep the turn between them
        return without(turns, cuts[low])


def _guess(turns: Sequence[Turn], cuts: Sequence[int], context: CompactionContext) -> int:
    """Position of the cut that should free what is needed, by the rough cost of the turns."""
    rough = sum(map(context.cost, turns))
    need = context.need * rough / max(1, context.count(turns))
    freed = begin = 0
    for position, cut in enumerate(cuts):
        dropped = (t for t in turns[begin:cut] if not (t.pinned or t.newest))
        freed += sum(map(context.cost, dropped))
        begin = cut
        if freed >= need:
            return position
    return len(cuts) - 1


def allowed_cuts(turns: Sequence[Turn], keep_last_turns: int = 1) -> list[int]:
    """Positions before which everything may be dropped that is neither pinned nor newest, ascending.

    Each but the last is the beginning of an assistant turn; the last one drops all that may go.
    """
    end = next((i for i, turn in enumerate(turns) if turn.newest), len(turns))
    if keep_last_turns > 1:
        assistants = [i for i, turn in enumerate(turns) if turn.kind == "assistant"]
        end = min([end, *assistants[-keep_last_turns:]])
    cuts = []
    droppable = 0
    for position in range(end + 1):
        at_border = position == end or turns[position].kind == "assistant"
        if droppable and at_border:
            cuts.append(position)
        if position < end and not turns[position].pinned:
            droppable += 1
    return cuts


def without(turns: Sequence[Turn], cut: int) -> list[Turn]:
    """The turns without what may be dropped before the cut."""
    return [turn for position, turn in enumerate(turns) if position >= cut or turn.pinned or turn.newest]
