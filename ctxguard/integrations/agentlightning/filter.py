"""The daemon filter: what Agent Lightning's training daemon is shown of a batch.

`FailedRolloutFilter` goes in front of ``AgentModeDaemon`` (0.1.2 and 0.3, modes v0 and v1). What counts as a
result while the batch runs is decided in `CollectsResults`; here, which rollouts the base class builds its
batch from. It sees those that are trained on, with its own bookkeeping true while it looks; it is otherwise
unchanged.

Needs no import of Agent Lightning; `ctxguard.integrations.agentlightning.verl` has the finished classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ctxguard.integrations.accounting import (
    EXCLUDED_SHARE_WARNING,
    Delivery,
    FailureHandling,
    Settlement,
)
from ctxguard.integrations.agentlightning.collecting import CollectsResults, rows_of
from ctxguard.integrations.agentlightning.steps import StepSkipped
from ctxguard.integrations.trajectories import split_into_segments

logger = logging.getLogger("ctxguard")

PLACEHOLDER_GROUP = "ctxguard-placeholder"
"""Group of the rows that stand in where a batch has too few of its own; their reward and advantage are 0."""


class GroupOfRollout(str):
    """A group id (equal to the plain string) that also says which rollout the row is of."""

    rollout_id: str

    def __new__(cls, group: str, rollout_id: str) -> GroupOfRollout:
        made = super().__new__(cls, group)
        made.rollout_id = rollout_id
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return (GroupOfRollout, (str(self), self.rollout_id))


class FailedRolloutFilter(CollectsResults):
    """Mixin for ``AgentModeDaemon``: each queued rollout is accounted for exactly once.

    Settings are class attributes, since Agent Lightning makes the daemon itself; to change one, subclass::

        class MyDaemon(GuardedDaemon):
            failure_handling = "penalize(-1)"

        agl.VERL(config, daemon_cls=MyDaemon, trainer_cls=GuardedTrainer)

    Results of rollouts that the batch does not know are dropped and counted; of two results of a rollout one
    counts, a good one before a failed one; a rollout that never returns ends as failed, after the wait that
    `CollectsResults` sets. What the server still holds of a batch (v0) is thrown away between batches.
    """

    failure_handling: str = "exclude"
    """``"exclude"``: failed rollouts leave the batch. ``"zero"`` and ``"penalize(VALUE)"``: those that have
    rows (good turns before they failed) are trained on with that reward; those without cannot be.
    ``"raise"``: the run stops with `FailedRolloutsError`."""

    smallest_group: int = 2
    """Groups with fewer rollouts to train on are left out: GRPO gives a lone one its raw reward as
    advantage."""

    # What the base class has; its types are not known here.
    mini_batch_size: int
    pad_token_id: int
    reward_fillna_value: float | None
    _total_tasks_queued: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._handling = FailureHandling.parse(self.failure_handling)  # a typo ends the run at its start
        self.rows_needed: int | None = None
        """Fewest rows worth a step; set by a trainer that skips thin steps. None: nobody skips, so
        placeholder rows fill a batch up to one mini-batch."""
        super().__init__(*args, **kwargs)

    # The batch

    def get_train_data_batch(self, max_prompt_length: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The base class's batch of the rollouts that are trained on, and its metrics with ours.

        Raises:
            FailedRolloutsError: a rollout failed and ``failure_handling`` is ``"raise"``.
            StepSkipped: fewer rows than ``rows_needed``; only where a trainer has set that.
        """
        settlement = self._settle()
        settlement.raise_if_asked()
        shown = self._shown(settlement)
        parts = [part.triplets for part, _ in shown.values()]
        heads = [part[0] for part in parts] if self.is_trajectory else [row for part in parts for row in part]
        fitting = sum(len(row.prompt["token_ids"]) <= max_prompt_length for row in heads)
        metrics = self._metrics(settlement)
        if self.rows_needed is not None and fitting < self.rows_needed:
            raise StepSkipped({**metrics, "ctxguard/rows": fitting, "ctxguard/skipped_step": 1})
        placeholders = self._placeholders(fitting) if self.rows_needed is None else {}
        with self._showing({**shown, **placeholders}):
            batch, base_metrics = super().get_train_data_batch(  # type: ignore[misc]
                max_prompt_length, *args, **kwargs
            )
        self._name_rows(batch, shown)
        dropped = int(batch.batch["is_drop_mask"].sum())
        metrics["ctxguard/rows"] = len(batch) - len(placeholders)
        metrics["ctxguard/rows_too_long"] = dropped
        metrics["ctxguard/placeholder_rows"] = len(placeholders)
        if settlement.trained:
            metrics["ctxguard/rows_per_rollout"] = metrics["ctxguard/rows"] / len(settlement.trained)
        return batch, {**base_metrics, **self._true_counts(settlement, base_metrics), **metrics}

    def get_test_metrics(self) -> dict[str, Any]:
        """Validation metrics over the survivors, and the reward with failed rollouts at the fill value.

        Raises:
            FailedRolloutsError: a rollout failed and ``failure_handling`` is ``"raise"``.
        """
        settlement = self._settle()
        settlement.raise_if_asked()
        samples = self._task_id_to_original_sample
        survivors = {rollout: (self._results[rollout], samples[rollout]) for rollout in settlement.kept}
        fill = self.reward_fillna_value or 0.0
        rewards = [float(rollout.final_reward) for rollout, _ in survivors.values()]
        filled = (sum(rewards) + fill * len(settlement.failed)) / max(settlement.queued, 1)
        metrics: dict[str, Any] = {"val/reward": filled}
        if any(rollout.triplets for rollout, _ in survivors.values()):  # else the base class averages nothing
            with self._showing(survivors):
                metrics = super().get_test_metrics()  # type: ignore[misc]
        elif rewards:
            metrics = {"val/reward": sum(rewards) / len(rewards)}
        ours = self._metrics(settlement)
        ours = {name.replace("ctxguard/", "ctxguard/val/", 1): value for name, value in ours.items()}
        ours["ctxguard/val/reward_with_failures_filled"] = filled
        return {**metrics, **ours}

    def _settle(self) -> Settlement:
        with_rows = [rollout for rollout, result in self._results.items() if rows_of(result)]
        smallest = self.smallest_group if self.is_train else 1
        return self._account.settle(self._handling, with_rows, smallest_group=smallest)

    def _shown(self, settlement: Settlement) -> dict[str, tuple[Any, dict[str, Any]]]:
        """id → (rollout, sample) for the base class; one entry for each row-to-be at trajectory level.

        There the base class merges the turns of a rollout by a rule with two faults (a mask longer than its
        ids, and rows of wrong ids where an answer repeats the next prompt); a rollout that is shown
        piece by piece, each piece truly continuing, leaves it nothing to get wrong.
        """
        shown = {}
        for rollout_id, reward in settlement.trained.items():
            rollout, sample = self._results[rollout_id], self._task_id_to_original_sample[rollout_id]
            rows = rows_of(rollout)
            pieces = [rows]
            if self.is_trajectory:
                pieces = [[rows[index] for index in piece] for piece in split_into_segments(_ids(rows))]
            reward = rollout.final_reward if reward is None else reward
            for number, piece in enumerate(pieces):
                name = rollout_id if number == 0 else f"{rollout_id}#{number + 1}"
                part = rollout.model_copy(update={"final_reward": reward, "triplets": piece})
                shown[name] = (part, sample)
        return shown

    def _placeholders(self, rows: int) -> dict[str, tuple[Any, dict[str, Any]]]:
        """Rows of one padding token, with reward 0 in a group of their own, up to one mini-batch.

        Without them a base trainer fails on an empty batch, and rounds less than a mini-batch down to one.
        """
        missing = max(0, self.mini_batch_size - rows)
        if not missing:
            return {}
        logger.warning(
            "only %d rows to train on, less than a mini-batch of %d: filled up with %d empty ones; "
            "trainer_cls=GuardedTrainer skips such a step instead",
            rows,
            self.mini_batch_size,
            missing,
        )
        from agentlightning import Triplet

        token = {"token_ids": [self.pad_token_id]}
        triplet = Triplet(prompt=token, response=token, reward=0.0)
        some = next(iter(self._results.values()), None)
        names = [f"{PLACEHOLDER_GROUP}#{number + 1}" for number in range(missing)]
        model = type(some) if some is not None else _legacy_rollout_class()
        return {
            name: (
                model(rollout_id=name, final_reward=0.0, triplets=[triplet]),
                {"data_id": PLACEHOLDER_GROUP},
            )
            for name in names
        }

    @contextmanager
    def _showing(self, shown: Mapping[str, tuple[Any, dict[str, Any]]]) -> Iterator[None]:
        """The base class's bookkeeping holds exactly what it is shown, while it looks."""
        results, samples = self._results, self._task_id_to_original_sample
        held, queued, known = dict(results), self._total_tasks_queued, dict(samples)
        try:
            _fill(results, {name: rollout for name, (rollout, _) in shown.items()})
            _fill(samples, {name: sample for name, (_, sample) in shown.items()})
            self._total_tasks_queued = len(shown)
            yield
        finally:
            _fill(results, held)
            _fill(samples, known)
            self._total_tasks_queued = queued

    def _name_rows(self, batch: Any, shown: Mapping[str, tuple[Any, dict[str, Any]]]) -> None:
        """Rows carry their rollout's true id, and a group id that knows the rollout."""
        import numpy

        names = [str(name) for name in batch.non_tensor_batch["rollout_id_list"]]
        rollouts = [shown[name][0].rollout_id if name in shown else name for name in names]
        groups = batch.non_tensor_batch["data_id_list"]
        labelled: Any = numpy.empty(len(names), dtype=object)
        labelled[:] = [GroupOfRollout(str(g), rollout) for g, rollout in zip(groups, rollouts, strict=True)]
        batch.non_tensor_batch["data_id_list"] = labelled
        batch.non_tensor_batch["rollout_id_list"] = numpy.array(rollouts, dtype=object)

    def _metrics(self, settlement: Settlement) -> dict[str, Any]:
        counts = self._account.counts
        if settlement.excluded_share > EXCLUDED_SHARE_WARNING:
            logger.warning(
                "%.0f %% of the batch's %d rollouts are not trained on (%d failed, %d in groups too small): "
                "leaving them out hides failures from the model",
                100 * settlement.excluded_share,
                settlement.queued,
                len(settlement.failed),
                len(settlement.small_groups),
            )
        stale, self._stale = self._stale, 0
        return {
            "ctxguard/queued": settlement.queued,
            "ctxguard/kept": len(settlement.kept),
            "ctxguard/failed": len(settlement.failed),
            **{f"ctxguard/failed/{reason}": count for reason, count in sorted(settlement.reasons.items())},
            "ctxguard/stale": stale + counts[Delivery.STALE],
            "ctxguard/duplicate": counts[Delivery.DUPLICATE] + counts[Delivery.REPLACED],
            "ctxguard/small_groups": settlement.missing_groups,
            "ctxguard/small_group_rollouts": len(settlement.small_groups),
            "ctxguard/trained_rollouts": len(settlement.trained),
            "ctxguard/excluded_share": settlement.excluded_share,
            "ctxguard/waited": self._waited_seconds,
        }

    def _true_counts(self, settlement: Settlement, base: Mapping[str, Any]) -> dict[str, Any]:
        """The base class's own per-rollout metrics, over rollouts instead of what it was shown."""
        trained = settlement.trained
        rewards = [self._results[r].final_reward if own is None else own for r, own in trained.items()]
        pieces = [split_into_segments(_ids(rows_of(self._results[rollout]))) for rollout in trained]
        true = {
            "training/reward": sum(rewards) / len(rewards) if rewards else 0.0,
            "training/n_rollouts": len(trained),
            "training/n_rollouts_w_trace": len(trained),
            "training/n_rollouts_w_reward": len(trained),
            "training/n_unmerged_rollouts": sum(len(piece) > 1 for piece in pieces),
        }
        return {name: value for name, value in true.items() if name in base}

    @property
    def is_trajectory(self) -> bool:
        """Whether the turns of a rollout are merged into rows."""
        aggregator = getattr(self, "trace_aggregator", None) or {}
        return bool(aggregator.get("level", "transition") == "trajectory")


def _ids(rows: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    return [(row.prompt["token_ids"], row.response["token_ids"]) for row in rows]


def _fill(target: dict[str, Any], content: Mapping[str, Any]) -> None:
    target.clear()
    target.update(content)


def _legacy_rollout_class() -> Any:
    import agentlightning

    return getattr(agentlightning, "RolloutLegacy", None) or agentlightning.Rollout  # 0.1.2 has one class
