"""From completed rollouts to the rows that are trained on: ``RolloutAdapter`` with an account.

Imports Agent Lightning 1.0's trainer side, and with it verl and torch.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from agentlightning.verl.rollout_adapter import RolloutAdapter

from ctxguard.integrations.accounting import (
    EXCLUDED_SHARE_WARNING,
    BatchAccount,
    Delivery,
    FailureHandling,
    Settlement,
)
from ctxguard.integrations.agentlightning_v1.failures import as_events, failure_of
from ctxguard.integrations.agentlightning_v1.flooring import Row, rows_to_keep

logger = logging.getLogger("ctxguard")

_ZERO_ROWS = "emitted zero training rows"  # 1.0.2 rollout_adapter.py:658


class AccountingAdapter(RolloutAdapter):  # type: ignore[misc]
    """``RolloutAdapter`` that sees the rollouts that are trained on, and says what became of the others.

    Args:
        account: the batch's account; the completed rollouts are delivered to it here.
        handling: what to do with failed rollouts.
        smallest_group: fewest rollouts of a group that are trained on.
        mini_batch_rows: the trainer cuts a batch to a multiple of this many rows.
        fewest_rows: fewer rows than this are none.
        most_rows: the trainer takes at most this many rows; None: all.
        options: those of ``RolloutAdapter``.
    """

    def __init__(
        self,
        *,
        account: BatchAccount,
        handling: FailureHandling,
        smallest_group: int = 2,
        mini_batch_rows: int = 1,
        fewest_rows: int = 1,
        most_rows: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.account = account
        self.handling = handling
        self.smallest_group = smallest_group
        self.mini_batch_rows = mini_batch_rows
        self.fewest_rows = fewest_rows
        self.most_rows = most_rows

    def get_train_data_batch(
        self, completed_rollouts: Sequence[Any], *, global_steps: int = 0
    ) -> tuple[Any, dict[str, Any]]:
        """The batch, None where too little is trainable, and its metrics.

        Raises:
            FailedRolloutsError: a rollout failed and failures are handled as ``"raise"``.
        """
        taken = self._deliver(completed_rollouts, is_train=True)
        failures = self.account.failures
        self._raise_if_asked()
        candidates = [
            rollout if rollout.rollout_id not in failures else _rewarded(rollout, self.handling.reward)
            for rollout in taken
            if rollout.triplets and (rollout.rollout_id not in failures or self.handling.reward is not None)
        ]
        batch, base_metrics = self._base_batch(candidates, global_steps)
        names, usable = _rows_of(batch)
        with_rows = {name for name, fits in zip(names, usable, strict=True) if fits}
        settlement = self.account.settle(self.handling, with_rows, smallest_group=self.smallest_group)
        rows = [i for i, name in enumerate(names) if usable[i] and name in settlement.trained]
        kept = self._whole_mini_batches(rows, names, candidates)
        metrics = {
            **base_metrics,
            **_true_counts(settlement, candidates, base_metrics, len(kept)),
            **self._metrics(settlement),
            "ctxguard/rows": len(rows),
            "ctxguard/rows_too_long": len(usable) - sum(usable),
            "ctxguard/rows_cut_off": len(rows) - len(kept),
            "ctxguard/skipped_step": int(not kept),
        }
        if settlement.trained:
            metrics["ctxguard/rows_per_rollout"] = len(rows) / len(settlement.trained)
        return (batch[kept] if kept else None), metrics

    def get_test_metrics(self, completed_rollouts: Sequence[Any], *, global_steps: int = 0) -> dict[str, Any]:
        """Validation metrics over the survivors, and the reward with failed rollouts at the fill value.

        Raises:
            FailedRolloutsError: a rollout failed and failures are handled as ``"raise"``.
        """
        taken = self._deliver(completed_rollouts, is_train=False)
        self._raise_if_asked()
        settlement = self.account.settle(self.handling, (), smallest_group=1)
        survivors = [rollout for rollout in taken if rollout.rollout_id not in settlement.failed]
        rewards = [float(rollout.final_reward) for rollout in survivors]
        filled = sum(rewards) + self.reward_fillna_value * len(settlement.failed)
        filled /= max(settlement.queued, 1)
        metrics = {"val/reward": sum(rewards) / len(rewards) if rewards else filled}
        if any(rollout.triplets for rollout in survivors):  # else the base class has nothing to average
            metrics = super().get_test_metrics(survivors, global_steps=global_steps)
        ours = self._metrics(settlement, warn=False)
        del ours["ctxguard/trained_rollouts"], ours["ctxguard/excluded_share"]
        ours = {name.replace("ctxguard/", "ctxguard/val/", 1): value for name, value in ours.items()}
        return {**metrics, **ours, "ctxguard/val/reward_with_failures_filled": filled}

    def _deliver(self, completed_rollouts: Iterable[Any], *, is_train: bool) -> list[Any]:
        """Enter results into the account; those that are to be used, with their complete calls only."""
        taken: dict[str, Any] = {}
        for rollout in completed_rollouts:
            triplets = [triplet for triplet in rollout.triplets or () if _is_complete(triplet)]
            state = rollout.rollout_state
            failure = failure_of(
                state=None if state is None else str(getattr(state, "value", state)),
                error_message=rollout.error_message,
                events=as_events(rollout.events),
                reward=rollout.final_reward,
                has_rows=bool(triplets) if is_train else None,
            )
            delivery = self.account.deliver(rollout.rollout_id, failure)
            if delivery in (Delivery.TAKEN, Delivery.REPLACED):
                taken[rollout.rollout_id] = rollout.model_copy(update={"triplets": triplets})
                if failure is not None:
                    logger.warning(
                        "rollout %s failed: %s %s", rollout.rollout_id, failure.reason, failure.numbers
                    )
        self.account.fail_missing("the rollout manager did not return it")
        return list(taken.values())

    def _raise_if_asked(self) -> None:
        self.account.settle(self.handling, (), smallest_group=1).raise_if_asked()

    def _base_batch(self, candidates: list[Any], global_steps: int) -> tuple[Any, dict[str, Any]]:
        if not candidates:
            return None, {}
        try:
            batch, metrics = super().get_train_data_batch(candidates, global_steps=global_steps)
        except RuntimeError as error:
            if _ZERO_ROWS not in str(error):
                raise
            return None, {}
        return batch, metrics

    def _whole_mini_batches(self, rows: list[int], names: list[str], candidates: list[Any]) -> list[int]:
        """The rows that stay when the batch is cut to whole mini-batches; none if there are too few."""
        by_id = {rollout.rollout_id: rollout for rollout in candidates}
        of = [by_id[names[index]] for index in rows]
        kept = rows_to_keep(
            [Row(rollout.data_id, rollout.rollout_id, float(rollout.final_reward)) for rollout in of],
            mini_batch=self.mini_batch_rows,
            most=self.most_rows,
            smallest_group=self.smallest_group,
        )
        return [rows[index] for index in kept] if len(kept) >= self.fewest_rows else []

    def _metrics(self, settlement: Settlement, *, warn: bool = True) -> dict[str, Any]:
        counts = self.account.counts
        if warn and settlement.excluded_share > EXCLUDED_SHARE_WARNING:
            logger.warning(
                "%.0f %% of the batch's %d rollouts are not trained on (%d failed, %d in groups too small): "
                "leaving them out hides failures from the model",
                100 * settlement.excluded_share,
                settlement.queued,
                len(settlement.failed),
                len(settlement.small_groups),
            )
        return {
            "ctxguard/queued": settlement.queued,
            "ctxguard/kept": len(settlement.kept),
            "ctxguard/failed": len(settlement.failed),
            **{f"ctxguard/failed/{reason}": count for reason, count in sorted(settlement.reasons.items())},
            "ctxguard/stale": counts[Delivery.STALE],
            "ctxguard/duplicate": counts[Delivery.DUPLICATE] + counts[Delivery.REPLACED],
            "ctxguard/small_groups": settlement.missing_groups,
            "ctxguard/small_group_rollouts": len(settlement.small_groups),
            "ctxguard/trained_rollouts": len(settlement.trained),
            "ctxguard/excluded_share": settlement.excluded_share,
        }


def _is_complete(triplet: Any) -> bool:
    return bool(triplet.prompt.get("token_ids") and triplet.response.get("token_ids"))


def _rewarded(rollout: Any, reward: float | None) -> Any:
    return rollout.model_copy(update={"final_reward": reward})


def _rows_of(batch: Any) -> tuple[list[str], list[bool]]:
    """The rollout of each row, and whether its prompt is within the limit: the trainer drops the others."""
    if batch is None:
        return [], []
    names = [str(name) for name in batch.non_tensor_batch["rollout_id_list"]]
    return names, [not dropped for dropped in batch.batch["is_drop_mask"].tolist()]


def _true_counts(
    settlement: Settlement, candidates: list[Any], base: dict[str, Any], rows: int
) -> dict[str, Any]:
    """The base class's own counts, over what is trained on instead of what it was shown."""
    trained = [rollout for rollout in candidates if rollout.rollout_id in settlement.trained]
    rewards = [float(rollout.final_reward) for rollout in trained]
    own = Counter(rollout.rollout_id in settlement.failed for rollout in trained)
    true = {
        "training/reward": sum(rewards) / len(rewards) if rewards else 0.0,
        "training/n_sample": rows,
        "training/n_rollouts": len(trained),
        "training/n_rollouts_w_trace": len(trained),
        "training/n_rollouts_w_reward": own[False],
    }
    return {name: value for name, value in true.items() if name in base}
