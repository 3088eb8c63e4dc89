"""What counts as a result while a batch runs, and what the server may keep of it afterwards.

`CollectsResults` takes over the waiting of Agent Lightning's ``AgentModeDaemon``: in place of "as many
results as tasks" each rollout of the batch ends once, as kept or as failed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ctxguard.integrations.accounting import BatchAccount, Delivery
from ctxguard.integrations.marks import SPAN_ATTRIBUTE, SPAN_NAME, FailureMark
from ctxguard.outcome import FailureReason

logger = logging.getLogger("ctxguard")


class CollectsResults:
    """Mixin for ``AgentModeDaemon``: the account of a batch, filled from server (v0) or store (v1)."""

    max_quiet_seconds: float | None = None
    """How long to wait for a next result, in seconds, before the missing rollouts end as failed
    (``not_returned``); None: twice the daemon's ``llm_timeout_seconds``."""

    poll_seconds: float = 1.0
    """Pause between two looks at the results, in seconds."""

    # What the base class has; its types are not known here.
    server: Any
    store: Any
    is_train: bool
    llm_timeout_seconds: float
    _task_id_to_original_sample: dict[str, dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
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
        if self.is_train and not rows_of(rollout):
            return FailureMark(FailureReason.NO_ROWS.value, "no prompt and response ids to train on")
        return None

    def _validate_data(self, rollout: Any) -> None:
        """The base class warns here that it will fill in a reward; it will not."""

    # What differs between versions

    @property
    def _is_v1(self) -> bool:
        return getattr(self, "mode", "v0") == "v1"

    @property
    def _results(self) -> dict[str, Any]:
        found = getattr(self, "_completed_rollouts_v0", None)  # 0.2 and newer
        return self._completed_rollouts if found is None else found  # type: ignore[attr-defined,no-any-return]


def rows_of(rollout: Any) -> list[Any]:
    """The triplets of a rollout that can be trained on: those with prompt and response ids."""
    return [t for t in rollout.triplets or () if t.prompt.get("token_ids") and t.response.get("token_ids")]
