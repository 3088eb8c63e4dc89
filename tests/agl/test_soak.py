"""Three batches of 64 rollouts that overflow, crash, hang, come twice and come late: each ends exactly once.

The daemon and its server (v0) or the store (v1) are the real ones; workers speak their protocol and, in the place of
running an agent, do what a seeded fate says.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest
import requests
import torch
from agentlightning import RolloutLegacy, Span, Triplet
from agentlightning.store import LightningStoreClient

from ctxguard.integrations.agentlightning.verl import GuardedDaemon
from ctxguard.integrations.marks import METADATA_KEY, FailureMark
from tests.agl.rig import V0Rig, V1Rig, columns

BATCHES, TASKS, PER_TASK = 3, 16, 4
FATES = {"good": 10, "overflow": 3, "crash": 2, "hang": 1, "twice": 2, "late": 1}
OVERFLOW = FailureMark("context_overflow", numbers={"prompt_tokens": 61709, "limit": 20480})
KEPT = {"good", "twice"}
REASON = {"overflow": "context_overflow", "crash": "unmarked", "hang": "not_returned", "late": "not_returned"}


class QuickDaemon(GuardedDaemon):
    poll_seconds = 0.05
    max_quiet_seconds = 3.0


class Fates:
    """What happens to each rollout: drawn from a seeded generator when its task is made, so it can be summed up."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def tasks(self) -> list[dict[str, Any]]:
        drawn = [self._random.choices(list(FATES), list(FATES.values()), k=PER_TASK) for _ in range(TASKS)]
        return [{"fates": fates} for fates in drawn]


class Workers:
    """Takes tasks and settles them by their fate, in a thread, until stopped."""

    def __init__(self) -> None:
        self.handed_out: Counter[str] = Counter()
        self.done: list[str] = []
        self.late: list[Any] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self.work, daemon=True)

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stopped.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def work(self) -> None:
        raise NotImplementedError

    def running(self) -> bool:
        return not self._stopped.is_set()

    def fate(self, task: dict[str, Any]) -> str:
        """The rollouts of a task take its fates in the order in which they are handed out."""
        data_id = task["data_id"]
        self.handed_out[data_id] += 1
        fate: str = task["fates"][self.handed_out[data_id] - 1]
        self.done.append(fate)
        return fate


class V0Workers(Workers):
    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.endpoint = endpoint

    def work(self) -> None:
        while self.running():
            found = requests.get(f"{self.endpoint}/task", timeout=10).json()
            if found["is_available"]:
                self.settle(found["task"]["rollout_id"], self.fate(found["task"]["input"]))
            else:
                time.sleep(0.02)

    def settle(self, rollout_id: str, fate: str) -> None:
        turn = Triplet(prompt={"token_ids": [1, 2]}, response={"token_ids": [3]}, reward=1.0)
        good = RolloutLegacy(rollout_id=rollout_id, final_reward=1.0, triplets=[turn])
        bare = RolloutLegacy(rollout_id=rollout_id)
        marked = bare.model_copy(
            update={"metadata": {METADATA_KEY: OVERFLOW.to_dict()}, "triplets": [turn, turn]}
        )
        posts = {
            "good": [good],
            "twice": [good, good],
            "overflow": [marked],
            "crash": [bare],
            "hang": [],
            "late": [],
        }
        for rollout in posts[fate]:
            self.post(rollout)
        if fate == "late":
            self.late.append(good)

    def post(self, rollout: Any) -> None:
        requests.post(f"{self.endpoint}/rollout", json=rollout.model_dump(), timeout=10).raise_for_status()

    def deliver(self, late: list[Any]) -> None:
        for rollout in late:
            self.post(rollout)


class V1Workers(Workers):
    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.due: list[Any] = []
        self.deliver_now = threading.Event()

    def work(self) -> None:
        asyncio.run(self.poll())

    async def poll(self) -> None:
        store = LightningStoreClient(self.endpoint)
        while self.running():
            rollout = await store.dequeue_rollout()
            if rollout is not None:
                await self.settle(store, rollout, self.fate(rollout.input))
            elif self.deliver_now.is_set():
                for late in self.due:
                    await self.end(store, late, "succeeded")
                self.deliver_now.clear()
            else:
                await asyncio.sleep(0.02)
        await store.close()

    async def settle(self, store: Any, rollout: Any, fate: str) -> None:
        if fate in ("good", "twice", "overflow"):
            await self.trace(store, rollout, reward=None if fate == "overflow" else 1.0)
        if fate == "overflow":
            metadata = {METADATA_KEY: OVERFLOW.to_dict()}
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, metadata=metadata)
        if fate in ("good", "twice"):
            await self.end(store, rollout, "succeeded")
        if fate == "twice":
            await self.end(store, rollout, "succeeded")
        if fate in ("overflow", "crash"):
            await self.end(store, rollout, "failed")
        if fate == "late":
            self.late.append(rollout)

    async def trace(self, store: Any, rollout: Any, reward: float | None) -> None:
        ids = {"llm.hosted_vllm.prompt_token_ids": "[1, 2]", "llm.hosted_vllm.response_token_ids": "[[3]]"}
        spans = [("raw_gen_ai_request", ids)]
        if reward is not None:
            value = {"agentlightning.reward.0.name": "reward", "agentlightning.reward.0.value": reward}
            spans.append(("agentlightning.annotation", value))
        for number, (name, attributes) in enumerate(spans):
            span = Span.from_attributes(
                attributes=attributes,
                name=name,
                rollout_id=rollout.rollout_id,
                attempt_id=rollout.attempt.attempt_id,
                sequence_id=number,
            )
            await store.add_span(span)

    async def end(self, store: Any, rollout: Any, status: str) -> None:
        await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status=status)

    def deliver(self, late: list[Any]) -> None:
        self.due = late
        self.deliver_now.set()
        deadline = time.monotonic() + 10
        while self.deliver_now.is_set():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("mode", ["v0", "v1"])
def test_soak(mode, llama_cpp_server):
    rig: Any = (
        V0Rig(llama_cpp_server.base_url, QuickDaemon, rollouts_per_task=PER_TASK)
        if mode == "v0"
        else V1Rig(llama_cpp_server.base_url, daemon_class=QuickDaemon, rollouts_per_task=PER_TASK)
    )
    fates = Fates(seed=20480)
    with rig:
        workers = V0Workers(rig.endpoint) if mode == "v0" else V1Workers(rig.store_url)
        with workers:
            for number in range(BATCHES):
                tasks = fates.tasks()
                workers.done.clear()
                late, workers.late = workers.late, []
                rig.daemon.set_up_data_and_server(columns(tasks), [rig.backend])
                queued = set(rig.daemon._task_id_to_original_sample)
                workers.deliver(late)  # the batch before's, in the midst of this one
                rig.daemon.run_until_all_finished(verbose=False)
                batch, metrics = rig.daemon.get_train_data_batch(8, 8, torch.device("cpu"), number)
                account = rig.daemon._account
                settled = rig.daemon._settle()
                rig.daemon.clear_data_and_server()

                count = Counter(workers.done)
                assert sum(count.values()) == len(queued) == TASKS * PER_TASK
                assert set(settled.kept) | set(settled.failed) == queued
                assert not set(settled.kept) & set(settled.failed)
                assert (
                    metrics["ctxguard/kept"] + metrics["ctxguard/failed"] == metrics["ctxguard/queued"] == 64
                )
                assert metrics["ctxguard/kept"] == sum(count[fate] for fate in KEPT)
                reasons: Counter[str] = Counter()
                for fate, reason in REASON.items():
                    reasons[reason] += count[fate]
                assert Counter(settled.reasons) == +reasons
                if mode == "v0":  # a store has one status of a rollout, and forgets nothing that is late
                    assert metrics["ctxguard/stale"] == len(late)
                rows = set(batch.non_tensor_batch["rollout_id_list"])
                assert rows == set(settled.trained) <= set(settled.kept)
                assert account.queued == 64
