"""Which rows leave a batch that has to be cut to whole mini-batches. Pure.

Agent Lightning 1.0's trainer cuts the batch down to a multiple of its mini-batch *before* it computes
advantages, at random and row by row. A group that is left with one rollout this way would get that rollout's
raw reward as its advantage. Here a group keeps rows of two rollouts, or leaves whole.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A row of the batch: its group, its rollout and the rollout's reward."""

    group: Hashable
    rollout: Hashable
    reward: float


def rows_to_keep(
    rows: Sequence[Row],
    *,
    mini_batch: int,
    most: int | None = None,
    smallest_group: int = 2,
    rng: random.Random | None = None,
) -> list[int]:
    """Indices of the rows to keep, ascending: a multiple of ``mini_batch``, as many as can be.

    First to leave are rows of groups whose rollouts all have the same reward, which teach nothing; then,
    spread over the groups at random, rows that their group can do without; last, whole groups.

    Args:
        rows: the rows; each group has at least ``smallest_group`` rollouts among them.
        mini_batch: rows of a mini-batch.
        most: keep at most this many.
        smallest_group: rollouts that a group keeps, 1 or 2.
        rng: for the choice among equals.

    Returns:
        The indices; empty where there is less than one mini-batch.
    """
    rng = rng or random.Random()
    cut = _Cut(rows, smallest_group, rng)
    target = len(rows) if most is None else min(most, len(rows))
    target = target // mini_batch * mini_batch
    cut.drop_same_rewards(len(cut.kept) - target)
    cut.drop_spare(len(cut.kept) - target)
    while len(cut.kept) > target:
        if not cut.drop_group(len(cut.kept) - target):
            target -= mini_batch  # an odd number of rows cannot leave groups of two: one mini-batch less
    return sorted(cut.kept)


class _Cut:
    def __init__(self, rows: Sequence[Row], smallest_group: int, rng: random.Random) -> None:
        self.rows = rows
        self.smallest_group = smallest_group
        self.rng = rng
        self.kept = set(range(len(rows)))
        self.members: dict[Hashable, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            self.members[row.group].append(index)

    def drop_same_rewards(self, count: int) -> None:
        """Rows of groups without any spread of rewards, whole groups first."""
        for group in self._shuffled():
            members = self._of(group)
            if count <= 0:
                return
            if len({self.rows[index].reward for index in members}) > 1:
                continue
            if len(members) <= count:
                self.kept.difference_update(members)
                count -= len(members)
            else:
                count -= self._drop_spare_of(group, count)

    def drop_spare(self, count: int) -> None:
        """Rows that leave their group large enough, one from each group in turn."""
        groups = self._shuffled()
        while count > 0:
            dropped = 0
            for group in groups:
                if dropped < count:
                    dropped += self._drop_spare_of(group, 1)
            if not dropped:
                return
            count -= dropped

    def drop_group(self, count: int) -> bool:
        """One whole group of at most so many rows; False where there is none."""
        groups = [group for group in self._shuffled() if 0 < len(self._of(group)) <= count]
        if groups:
            self.kept.difference_update(self._of(groups[0]))
        return bool(groups)

    def _drop_spare_of(self, group: Hashable, count: int) -> int:
        """Drop up to so many rows of a group, as long as rows of enough rollouts stay; how many it were."""
        members = self._of(group)
        self.rng.shuffle(members)
        left = Counter(self.rows[index].rollout for index in members)
        dropped = 0
        # Rows whose rollout has others go first: the group then keeps all of its rewards.
        for index in sorted(members, key=lambda index: -left[self.rows[index].rollout]):
            rollout = self.rows[index].rollout
            if dropped == count:
                break
            if left[rollout] > 1 or len(left) > self.smallest_group:
                left[rollout] -= 1
                if not left[rollout]:
                    del left[rollout]
                self.kept.discard(index)
                dropped += 1
        return dropped

    def _of(self, group: Hashable) -> list[int]:
        return [index for index in self.members[group] if index in self.kept]

    def _shuffled(self) -> list[Hashable]:
        groups = list(self.members)
        self.rng.shuffle(groups)
        return groups
