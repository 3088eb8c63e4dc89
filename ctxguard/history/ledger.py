"""The ledger: which compaction a known history has, found again by what the history says.

It is a cache of a pure function (the manager's fold), so losing an entry costs time and changes
nothing. Only summaries, which a model wrote, cannot be computed again; a store keeps them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from ctxguard.history.recipe import Recipe


class Known(NamedTuple):
    """What is known of a history: its recipe, and an upper bound of its view's size.

    Attributes:
        recipe: what it is compacted to.
        tokens: size of the view, in tokens as decisions are made on them; at most so many.
    """

    recipe: Recipe
    tokens: int


class Ledger:
    """Chain digest of a history → its recipe. Bounded, least recently used out first, thread-safe.

    Args:
        max_entries: entries kept; one is written per call, most share their recipe with the last.
        max_summaries: summaries kept.
    """

    def __init__(self, max_entries: int = 65_536, max_summaries: int = 4_096) -> None:
        self._recipes: OrderedDict[bytes, Known] = OrderedDict()
        self._summaries: OrderedDict[bytes, str] = OrderedDict()
        self._announced: OrderedDict[bytes, None] = OrderedDict()
        self._max_entries = max_entries
        self._max_summaries = max_summaries
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._recipes)

    def longest(self, chain: Sequence[bytes], ends: Sequence[int]) -> tuple[int, Known] | None:
        """The longest known one of the prefixes that end at ``ends`` (ascending): its position, and it."""
        with self._lock:
            for position in range(len(ends) - 1, -1, -1):
                key = chain[ends[position]]
                known = self._recipes.get(key)
                if known is not None:
                    self._recipes.move_to_end(key)
                    return position, known
        return None

    def put(self, key: bytes, known: Known) -> None:
        """Remember what is known of a history."""
        with self._lock:
            self._recipes[key] = known
            self._recipes.move_to_end(key)
            while len(self._recipes) > self._max_entries:
                self._recipes.popitem(last=False)

    def announce(self, key: bytes) -> bool:
        """Whether a compaction is new: True the first time it is asked about."""
        with self._lock:
            is_new = key not in self._announced
            self._announced[key] = None
            while len(self._announced) > self._max_entries:
                self._announced.popitem(last=False)
            return is_new

    def summary(self, key: bytes) -> str | None:
        """A stored summary, or None."""
        with self._lock:
            return self._summaries.get(key)

    def put_summary(self, key: bytes, text: str) -> None:
        """Remember a summary."""
        with self._lock:
            self._summaries[key] = text
            while len(self._summaries) > self._max_summaries:
                self._summaries.popitem(last=False)

    def forget(self) -> None:
        """Drop all recipes (tests do this; summaries stay, since nothing can compute them again)."""
        with self._lock:
            self._recipes.clear()
            self._announced.clear()
