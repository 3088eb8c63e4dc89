"""The account of a batch: each queued rollout ends exactly once, as kept or as failed.

Free of any framework. A daemon tells the account what arrives; the account says what to do with it,
and in the end who is trained on. ``kept + failed == queued`` holds for every closed account.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from ctxguard.errors import ConfigurationError, FailedRolloutsError
from ctxguard.integrations.marks import FailureMark
from ctxguard.outcome import FailureReason

EXCLUDED_SHARE_WARNING = 0.2
"""Share of queued rollouts left out of training above which a warning is due: exclusion hides overflow
from the model that is being trained."""

_PENALIZE = re.compile(r"penalize\(\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*\)")


class Delivery(Enum):
    """What a delivered result was to the account."""

    TAKEN = "taken"
    """The first result of a queued rollout."""

    REPLACED = "replaced"
    """A good result; the failed one of an earlier attempt gives way."""

    DUPLICATE = "duplicate"
    """The rollout already has a result that is as good; this one is dropped."""

    STALE = "stale"
    """Not of this batch; dropped."""


@dataclass(frozen=True)
class FailureHandling:
    """What the trainer does with failed rollouts.

    Attributes:
        name: ``"exclude"`` (leave them out), ``"zero"`` or ``"penalize"`` (train on the rows they have, with
            a stated reward), ``"raise"`` (stop the run).
        reward: the reward of failed rollouts under ``zero`` and ``penalize``, None under the others.
    """

    name: str
    reward: float | None = None

    @classmethod
    def parse(cls, text: str | FailureHandling) -> FailureHandling:
        """Read ``exclude``, ``zero``, ``penalize(VALUE)`` or ``raise``.

        Raises:
            ConfigurationError: anything else.

        Example:
            >>> FailureHandling.parse("penalize(-1)").reward
            -1.0
        """
        if isinstance(text, FailureHandling):
            return text
        if text in ("exclude", "raise"):
            return cls(text)
        if text == "zero":
            return cls(text, 0.0)
        match = _PENALIZE.fullmatch(str(text))
        if match is None:
            raise ConfigurationError(
                f"failure handling {text!r} is unknown; use 'exclude', 'zero', 'penalize(VALUE)' with a "
                "number, or 'raise'"
            )
        return cls("penalize", float(match[1]))


@dataclass(frozen=True)
class Settlement:
    """How a batch ends.

    Attributes:
        kept: ids of the rollouts that succeeded.
        failed: id → mark of those that failed; ``kept`` and ``failed`` hold every queued id once.
        trained: id → reward to train with, None for the rollout's own; kept ones and, under ``zero`` and
            ``penalize``, failed ones that have rows.
        small_groups: ids that would be trained on but for their group, which has fewer than two of them.
        missing_groups: how many groups that makes.
        handling: what is done with failed rollouts.
    """

    kept: tuple[str, ...]
    failed: Mapping[str, FailureMark]
    trained: Mapping[str, float | None]
    small_groups: tuple[str, ...]
    missing_groups: int
    handling: FailureHandling

    @property
    def queued(self) -> int:
        """How many rollouts were queued."""
        return len(self.kept) + len(self.failed)

    @property
    def reasons(self) -> dict[str, int]:
        """Failed rollouts by reason."""
        return dict(Counter(mark.reason for mark in self.failed.values()))

    @property
    def excluded_share(self) -> float:
        """Share of the queued rollouts that is not trained on, 0 to 1."""
        return 1 - len(self.trained) / self.queued if self.queued else 0.0

    def raise_if_asked(self) -> None:
        """Stop the run where failures are handled as ``raise``.

        Raises:
            FailedRolloutsError: there are failed rollouts.
        """
        if self.handling.name == "raise" and self.failed:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.reasons.items()))
            raise FailedRolloutsError(
                f"{len(self.failed)} of {self.queued} rollouts failed ({reasons}) and failures are handled "
                "as 'raise'; 'exclude' leaves failed rollouts out of the batch instead",
                failed=len(self.failed),
                queued=self.queued,
                reasons=self.reasons,
            )


class BatchAccount:
    """The account of one batch.

    Args:
        groups: rollout id → group (the task that its rollouts share) of every queued rollout.
    """

    def __init__(self, groups: Mapping[str, Hashable]) -> None:
        self._groups = dict(groups)
        self._results: dict[str, FailureMark | None] = {}
        self.counts: Counter[Delivery] = Counter()

    @property
    def queued(self) -> int:
        """How many rollouts were queued."""
        return len(self._groups)

    @property
    def missing(self) -> tuple[str, ...]:
        """Ids of queued rollouts that have no result yet."""
        return tuple(rollout for rollout in self._groups if rollout not in self._results)

    @property
    def failures(self) -> dict[str, FailureMark]:
        """id → mark of the rollouts that have failed so far."""
        return {rollout: mark for rollout, mark in self._results.items() if mark is not None}

    def deliver(self, rollout_id: str, failure: FailureMark | None) -> Delivery:
        """Take note of a result.

        Args:
            rollout_id: whose result it is.
            failure: its mark, None for a rollout that succeeded.

        Returns:
            What the result was; only one that is `TAKEN` or `REPLACED` is to be used.
        """
        delivery = self._judge(rollout_id, failure)
        self.counts[delivery] += 1
        if delivery in (Delivery.TAKEN, Delivery.REPLACED):
            self._results[rollout_id] = failure
        return delivery

    def _judge(self, rollout_id: str, failure: FailureMark | None) -> Delivery:
        if rollout_id not in self._groups:
            return Delivery.STALE
        if rollout_id not in self._results:
            return Delivery.TAKEN
        return Delivery.REPLACED if self._results[rollout_id] and failure is None else Delivery.DUPLICATE

    def fail_missing(self, detail: str) -> tuple[str, ...]:
        """Every rollout without a result ends as failed (``not_returned``).

        Args:
            detail: what was waited for, in words.

        Returns:
            Their ids.
        """
        missing = self.missing
        for rollout in missing:
            self.deliver(rollout, FailureMark(FailureReason.NOT_RETURNED.value, detail, rollout_id=rollout))
        return missing

    def settle(
        self, handling: FailureHandling, with_rows: Iterable[str], *, smallest_group: int = 2
    ) -> Settlement:
        """Close the account.

        Args:
            handling: what to do with failed rollouts.
            with_rows: ids of the rollouts that have something to train on.
            smallest_group: fewest rollouts of a group that are trained on; 1 where an advantage needs no
                group. A lone member of a group would get its raw reward as advantage.

        Raises:
            ValueError: a queued rollout has no result yet.
        """
        if self.missing:
            raise ValueError(f"{len(self.missing)} of {self.queued} rollouts have no result yet")
        with_rows = set(with_rows)
        failed = self.failures
        kept = tuple(rollout for rollout in self._results if rollout not in failed)
        candidates: dict[str, float | None] = dict.fromkeys(kept)
        if handling.reward is not None:
            candidates.update(dict.fromkeys(failed, handling.reward))
        candidates = {rollout: reward for rollout, reward in candidates.items() if rollout in with_rows}
        sizes = Counter(self._groups[rollout] for rollout in candidates)
        small = tuple(rollout for rollout in candidates if sizes[self._groups[rollout]] < smallest_group)
        trained = {rollout: reward for rollout, reward in candidates.items() if rollout not in set(small)}
        return Settlement(
            kept=kept,
            failed=failed,
            trained=trained,
            small_groups=small,
            missing_groups=len({self._groups[rollout] for rollout in small}),
            handling=handling,
        )
