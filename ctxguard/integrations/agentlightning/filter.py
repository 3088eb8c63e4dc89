"""The daemon filter: what Agent Lightning's training daemon is shown of a batch.

`FailedRolloutFilter` goes in front of ``AgentModeDaemon`` (0.1.2 and 0.3, modes v0 and v1) and takes over
three things: what counts as a result while the batch runs, which rollouts the base class builds its batch
from, and what is left in the server afterwards. The base class sees the rollouts that are trained on, with
its own bookkeeping true while it looks; it is otherwise unchanged.

Needs no import of Agent Lightning; `ctxguard.integrations.agentlightning.verl` has the finished classes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ctxguard.integrations.accounting import (
    EXCLUDED_SHARE_WARNING,
    BatchAccount,
    Delivery,
    FailureHandling,
    Settlement,
)
from ctxguard.integrations.marks import SPAN_ATTRIBUTE, SPAN_NAME, FailureMark
from ctxguard.integrations.trajectories import split_into_segments
from ctxguard.outcome import FailureReason

logger = logging.getLogger("ctxguard")

PLACEHOLDER_GROUP = "ctxguard-placeholder"
"""Group of the rows that stand in where a batch has too few of its own; their reward and advantage are 0."""


class StepSkipped(Exception):
    """Too little of a batch is trainable; `SkipsThinSteps` catches it. ``args[0]`` has the metrics."""


class GroupOfRollout(str):
    """A group id (equal to the plain string) that also says which rollout the row is of."""

    rollout_id: str

    def __new__(cls, group: str, rollout_id: str) -> GroupOfRollout:
        made = super().__new__(cls, group)
        made.rollout_id = rollout_id
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return (GroupOfRollout, (str(self), self.rollout_id))


class FailedRolloutFilter:
    """Mixin for ``AgentModeDaemon``: each queued rollout is accounted for exactly once.

    Settings are class attributes, since Agent Lightning makes the daemon itself; to change one, subclass::

        class MyDaemon(GuardedDaemon):
            failure_handling = "penalize(-1)"

        agl.VERL(config, daemon_cls=MyDaemon, trainer_cls=GuardedTrainer)

    Results of rollouts that the batch does not know are dropped and counted; of two results of a rollout one
    counts, a good one before a failed one; a rollout that never returns ends as failed. What the server
    still holds of a batch (v0) is thrown away between batches.
    """

    failure_handling: str = "exclude"
    """``"exclude"``: failed rollouts leave the batch. ``"zero"`` and ``"penalize(VALUE)"``: those that have
    rows (good turns before they failed) are trained on with that reward; those without cannot be.
    ``"raise"``: the run stops with `FailedRolloutsError`."""

    smallest_group: int = 2
    """Groups with fewer rollouts to train on are left out: GRPO gives a lone one its raw reward as
    advantage."""

    max_quiet_seconds: float | None = None
    """How long to wait for a next result before the missing rollouts end as failed (``not_returned``); None:
    twice the daemon's ``llm_timeout_seconds``."""

    poll_seconds: float = 1.0
    """Pause between two looks at the results."""

    # What the base class has; its types are not known here.
    server: Any
    store: Any
    adapter: Any
    is_train: bool
    mini_batch_size: int
    pad_token_id: int
    reward_fillna_value: float | None
    llm_timeout_seconds: float
    _total_tasks_queued: int
    _task_id_to_original_sample: dict[str, dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.rows_needed: int | None = None
        """Fewest rows worth a step; set by a trainer that skips thin steps. None: nobody skips, so
        placeholder rows fill a batch up to one mini-batch."""
        self._account = BatchAccount({})
        self._stale = 0
        self._waited_seconds = 0.0
        super().__init__(*args, **kwargs)

    # Between batches

    def set_up_data_and_server(self, *args: Any, **kwargs: Any) -> None:
        """Queue a batch, as the base class does, and open its account."""
        super().set_up_data_and_server(*args, **kwargs)  # type: ignore[misc]
        samples = self._task_id_to_original_sample
        self._account = BatchAccount({rollout: sample["data_id"] for rollout, sample in samples.items()})

    def clear_data_and_server(self) -> None:
        """End a batch: the base class's bookkeeping, and what the server still holds of it."""
        super().clear_data_and_server()  # type: ignore[misc]
        if not self._is_v1:
            self._in_server_loop(self._drain)

    def _drain(self) -> None:
        """Throw away the v0 server's results, queued copies and claims: a claim would be queued again."""
        held = self.server._store
        if held is None:  # not started yet, or shut down
            return
        self._stale += len(held._completed_rollouts)
        held._completed_rollouts.clear()
        held._processing_tasks.clear()
        while not held._task_queue.empty():
            held._task_queue.get_nowait()

    def _in_server_loop(self, work: Callable[[], None]) -> None:
        """Run something short in the v0 server's loop, which owns its queue; from there or another thread."""

        async def run() -> None:
            work()

        loop, running = self.server.loop, None
        with suppress(RuntimeError):
            running = asyncio.get_running_loop()
        if loop is None or loop is running:
            work()
        else:
            asyncio.run_coroutine_threadsafe(run(), loop).result(timeout=60)

    # While a batch runs

    async def _async_run_until_finished(self, verbose: bool = True) -> None:
        account, started = self._account, time.monotonic()
        limit = 2 * self.llm_timeout_seconds if self.max_quiet_seconds is None else self.max_quiet_seconds
        last_arrival = started
        while account.missing:
            if await self._collect():
                last_arrival = time.monotonic()
                if verbose:
                    self._tell_progress()
            if not account.missing:
                break
            if time.monotonic() - last_arrival > limit:
                await self._give_up(limit)
                break
            await asyncio.sleep(self.poll_seconds)
        if self._is_v1:
            await self._look_again_at_failed()
        self._waited_seconds = time.monotonic() - started

    async def _collect(self) -> bool:
        """Take in what has arrived; whether a rollout of this batch was among it."""
        arrived = await self._arrived_v1() if self._is_v1 else await self._arrived_v0()
        news = [self._take(rollout, failure) for rollout, failure in arrived]
        return any(news)

    def _take(self, rollout: Any, failure: FailureMark | None) -> bool:
        rollout_id = rollout.rollout_id
        delivery = self._account.deliver(rollout_id, failure)
        if delivery not in (Delivery.TAKEN, Delivery.REPLACED):
            return False
        self._results[rollout_id] = rollout
        if failure is not None:
            logger.warning("rollout %s failed: %s %s", rollout_id, failure.reason, failure.numbers)
        return True

    async def _arrived_v0(self) -> list[tuple[Any, FailureMark | None]]:
        rollouts = await self.server.retrieve_completed_rollouts()
        ended = {rollout.rollout_id for rollout in rollouts}
        if ended:
            self._unqueue(ended)
        return [(rollout, self._failure_of(rollout)) for rollout in rollouts]

    def _unqueue(self, ended: set[str]) -> None:
        """A rollout that has ended is not run again: take copies that a time-out put back off the queue."""
        queue = self.server._store._task_queue
        waiting = [queue.get_nowait() for _ in range(queue.qsize())]
        for task in waiting:
            if task.rollout_id not in ended:
                queue.put_nowait(task)

    async def _arrived_v1(self) -> list[tuple[Any, FailureMark | None]]:
        ended = await self.store.wait_for_rollouts(rollout_ids=list(self._account.missing), timeout=0)
        return [await self._read_v1(rollout) for rollout in ended]

    async def _read_v1(self, rollout: Any) -> tuple[Any, FailureMark | None]:
        legacy = await self._validate_data_v1(rollout)  # type: ignore[attr-defined]
        failure = await self._mark_v1(rollout)
        if failure is None and not legacy.triplets:  # its reward, if any, is found beside them only
            detail = f"the runner says {rollout.status}, but no call with token ids was recorded"
            failure = FailureMark(FailureReason.NO_ROWS.value, detail)
        return legacy, failure or self._failure_of(legacy)

    async def _mark_v1(self, rollout: Any) -> FailureMark | None:
        """What marks the latest attempt as failed: its metadata, its marker span, or its status alone."""
        attempt = await self.store.get_latest_attempt(rollout.rollout_id)
        mark = FailureMark.in_metadata(getattr(attempt, "metadata", None))
        if mark is None:
            spans = await self.store.query_spans(rollout.rollout_id, attempt_id="latest", name=SPAN_NAME)
            marks = (FailureMark.from_json((span.attributes or {}).get(SPAN_ATTRIBUTE)) for span in spans)
            mark = next((found for found in marks if found), None)
        if mark is None and rollout.status in ("failed", "cancelled"):
            status = getattr(attempt, "status", None)
            detail = f"the runner says {rollout.status} (attempt {status}), and nobody marked it"
            mark = FailureMark(FailureReason.UNMARKED.value, detail)
        return mark

    async def _look_again_at_failed(self) -> None:
        """A rollout whose time ran out may have ended well in the meantime."""
        failed = list(self._account.failures)
        for rollout in await self.store.query_rollouts(rollout_id_in=failed) if failed else ():
            if rollout.status == "succeeded":
                legacy, failure = await self._read_v1(rollout)
                if failure is None:
                    self._take(legacy, None)

    async def _give_up(self, limit: float) -> None:
        missing = self._account.fail_missing(f"no result within {limit:g} s of the one before")
        logger.error("%d rollouts did not return and end as failed", len(missing))
        if self._is_v1:
            for rollout in missing:
                await self.store.update_rollout(rollout_id=rollout, status="cancelled")

    def _tell_progress(self) -> None:
        done, failed = self._account.queued - len(self._account.missing), len(self._account.failures)
        # On standard output as the base class has it: a Ray worker's output is the log of the run.
        print(f"Completed {done}/{self._account.queued} tasks ({failed} failed)...")  # noqa: T201

    def _failure_of(self, rollout: Any) -> FailureMark | None:
        """The failure that a result itself shows: its mark, or a reward that is none."""
        mark = FailureMark.in_metadata(rollout.metadata)
        if mark is not None:
            return mark
        reward = rollout.final_reward
        if reward is None and not rollout.triplets:
            detail = "posted with neither a reward nor anything to train on, and nobody marked it"
            return FailureMark(FailureReason.UNMARKED.value, detail)
        if reward is None:
            return FailureMark(FailureReason.NO_REWARD.value, "posted without a reward")
        if not math.isfinite(reward):
            return FailureMark(FailureReason.INVALID_REWARD.value, f"the reward is {reward}")
        if self.is_train and not _rows(rollout):
            return FailureMark(FailureReason.NO_ROWS.value, "no prompt and response ids to train on")
        return None

    def _validate_data(self, rollout: Any) -> None:
        """The base class warns here that it will fill in a reward; it will not."""

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
        """Validation metrics over the survivors, and the reward with failed rollouts at the fill value."""
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
        with_rows = [rollout for rollout, result in self._results.items() if _rows(result)]
        smallest = self.smallest_group if self.is_train else 1
        handling = FailureHandling.parse(self.failure_handling)
        return self._account.settle(handling, with_rows, smallest_group=smallest)

    def _shown(self, settlement: Settlement) -> dict[str, tuple[Any, dict[str, Any]]]:
        """id → (rollout, sample) for the base class; one entry for each row-to-be at trajectory level.

        There the base class merges the turns of a rollout by a rule with two faults (a mask longer than its
        ids, and rows of wrong ids where an answer repeats the next prompt); a rollout that is shown
        piece by piece, each piece truly continuing, leaves it nothing to get wrong.
        """
        shown = {}
        for rollout_id, reward in settlement.trained.items():
            rollout, sample = self._results[rollout_id], self._task_id_to_original_sample[rollout_id]
            rows = _rows(rollout)
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
        pieces = [split_into_segments(_ids(_rows(self._results[rollout]))) for rollout in trained]
        true = {
            "training/reward": sum(rewards) / len(rewards) if rewards else 0.0,
            "training/n_rollouts": len(trained),
            "training/n_rollouts_w_trace": len(trained),
            "training/n_rollouts_w_reward": len(trained),
            "training/n_unmerged_rollouts": sum(len(piece) > 1 for piece in pieces),
        }
        return {name: value for name, value in true.items() if name in base}

    # What differs between versions

    @property
    def is_trajectory(self) -> bool:
        """Whether the turns of a rollout are merged into rows."""
        aggregator = getattr(self, "trace_aggregator", None) or {}
        return bool(aggregator.get("level", "transition") == "trajectory")

    @property
    def _is_v1(self) -> bool:
        return getattr(self, "mode", "v0") == "v1"

    @property
    def _results(self) -> dict[str, Any]:
        found = getattr(self, "_completed_rollouts_v0", None)  # 0.2 and newer
        return self._completed_rollouts if found is None else found  # type: ignore[attr-defined,no-any-return]


class SkipsThinSteps:
    """Mixin for ``AgentLightningTrainer``: a step with too little to train on is skipped.

    Too little is fewer rows than ``ppo_mini_batch_size`` (the trainer would round them down to none) or than
    there are data-parallel workers. Its metrics say so (``ctxguard/skipped_step``).
    """

    config: Any
    agent_mode_daemon: Any
    actor_rollout_wg: Any
    async_rollout_manager: Any

    def _train_step(self, batch_dict: dict[str, Any]) -> dict[str, Any]:
        mini_batch = self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        self.agent_mode_daemon.rows_needed = max(mini_batch, self.actor_rollout_wg.world_size)
        try:
            metrics: dict[str, Any] = super()._train_step(batch_dict)  # type: ignore[misc]
        except StepSkipped as skipped:
            metrics = skipped.args[0]
            logger.warning(
                "step skipped: %d rows to train on, %d needed",
                metrics["ctxguard/rows"],
                self.agent_mode_daemon.rows_needed,
            )
            # What the step does after its rollouts, in its order
            self.agent_mode_daemon.clear_data_and_server()
            self.async_rollout_manager.sleep()
            return metrics
        return {**metrics, "ctxguard/skipped_step": 0}


def _rows(rollout: Any) -> list[Any]:
    """The triplets of a rollout that can be trained on: those with prompt and response ids."""
    return [t for t in rollout.triplets or () if t.prompt.get("token_ids") and t.response.get("token_ids")]


def _ids(rows: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    return [(row.prompt["token_ids"], row.response["token_ids"]) for row in rows]


def _fill(target: dict[str, Any], content: Mapping[str, Any]) -> None:
    target.clear()
    target.update(content)


def _legacy_rollout_class() -> Any:
    import agentlightning

    return getattr(agentlightning, "RolloutLegacy", None) or agentlightning.Rollout  # 0.1.2 has one class
