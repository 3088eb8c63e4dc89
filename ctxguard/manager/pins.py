"""Which turns must stay: the system message, the task, the newest turn, and what the user pins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ctxguard.messages import Turn, first_task, newest_turn


@dataclass(frozen=True)
class Pins:
    """What the user wants kept as it is.

    Attributes:
        predicate: turns for which it is true, None for no such turns.
        tools: names of tools; turns that call one of them.
    """

    predicate: Callable[[Turn], bool] | None = None
    tools: frozenset[str] = frozenset()

    def mark(self, turns: Sequence[Turn]) -> list[Turn]:
        """Say of each turn whether it is pinned and whether it belongs to the newest."""
        task = first_task(turns)
        newest = newest_turn(turns)
        lead = next((i for i, turn in enumerate(turns) if turn.kind != "system"), len(turns))
        system = next((i for i, turn in enumerate(turns) if turn.kind == "system"), None)
        marked = []
        for position, turn in enumerate(turns):
            pinned = (
                position < lead
                or position == system
                or (task is not None and position <= task)
                or not self.tools.isdisjoint(turn.tool_names)
                or (self.predicate is not None and self.predicate(turn))
            )
            marked.append(replace(turn, pinned=pinned, newest=newest is not None and position >= newest))
        return marked
