"""How long to wait for a rollout that does not end. Pure; times are seconds of a monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable


class RolloutWatch:
    """Knows of each open rollout since when it runs, and since when nothing has moved at all.

    One of it outlives the managers of single steps, so that a rollout that is carried over keeps its time.

    Args:
        wait_seconds: how long a rollout may run, and how long a queue may stand still.
        clock: the clock.
    """

    def __init__(self, wait_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.wait_seconds = wait_seconds
        self._clock = clock
        self._running_since: dict[str, float] = {}
        self._queued: set[str] = set()
        self._moved = clock()

    def enqueue(self, rollout_ids: Iterable[str]) -> None:
        """Rollouts were queued."""
        self._queued.update(rollout_ids)
        self._moved = self._clock()

    def overdue(self, rollout_id: str, state: str) -> str | None:
        """What is wrong with a rollout that is seen in a state, in words; None while there is hope.

        A running one is overdue ``wait_seconds`` after it was first seen to run. A queued one is overdue
        when no rollout has started or ended for that long: a long queue that moves is in order.
        """
        now = self._clock()
        if state == "queuing":
            quiet = now - self._moved
            return (
                f"queued, and no rollout started or ended for {quiet:.0f} s" if self._is_up(quiet) else None
            )
        has_moved = rollout_id in self._queued  # started, or started and ended, since the last look
        self._queued.discard(rollout_id)
        ran = None
        if state == "running":
            ran = now - self._running_since.setdefault(rollout_id, now)
        elif self._running_since.pop(rollout_id, None) is not None:
            has_moved = True
        if has_moved:
            self._moved = now
        return f"still running after {ran:.0f} s" if ran is not None and self._is_up(ran) else None

    def _is_up(self, seconds: float) -> bool:
        return seconds > self.wait_seconds
