"""Batches for the trainer's side: a daemon that is given its results by hand, and verl's own GRPO on its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import agentlightning
import numpy as np
import torch
from agentlightning import Triplet
from verl.trainer.ppo.ray_trainer import AdvantageEstimator, compute_advantage, compute_response_mask

from ctxguard.integrations.marks import METADATA_KEY, FailureMark
from ctxguard.testing.child_process import free_port

IS_0_1 = agentlightning.__version__.startswith("0.1.")
Rollout = agentlightning.Rollout if IS_0_1 else agentlightning.RolloutLegacy

PROMPT, ANSWER = [11, 12, 13], [21, 22]
FAILED = None
"""Stands for the reward of a failed rollout."""


@dataclass(frozen=True)
class Result:
    """One rollout of a task: its reward, how many turns it has, and its mark if it is a marked failure."""

    reward: float | None
    turns: int = 1
    mark: FailureMark | None = None

    def rollout(self, rollout_id: str) -> Any:
        turn = Triplet(prompt={"token_ids": PROMPT}, response={"token_ids": ANSWER})
        metadata = {METADATA_KEY: self.mark.to_dict()} if self.mark else {}
        return Rollout(
            rollout_id=rollout_id, final_reward=self.reward, triplets=[turn] * self.turns, metadata=metadata
        )


def overflow(turns: int = 0) -> Result:
    """A failed rollout, marked, with some good turns before it failed."""
    return Result(FAILED, turns, FailureMark("context_overflow", "61709 tokens", {"prompt_tokens": 61709}))


def daemon_with(
    kind: type[Any], tasks: Sequence[Sequence[Result]], *, is_train: bool = True, **options: Any
) -> Any:
    """A daemon (v0, never started) whose batch has run: for each task its rollouts, ``t0r0``, ``t0r1``, …"""
    daemon = kind(
        free_port(),
        **{
            "train_rollout_n": max(map(len, tasks)),
            "train_information": {"model": "m"},
            "tokenizer": None,
            "mini_batch_size": 2,
            "pad_token_id": 0,
            **({} if IS_0_1 else {"mode": "v0"}),
            **options,
        },
    )
    daemon.is_train = is_train
    results = {f"t{t}r{r}": result for t, task in enumerate(tasks) for r, result in enumerate(task)}
    samples = {name: {"data_id": name.split("r")[0]} for name in results}
    daemon._task_id_to_original_sample.update(samples)
    daemon._total_tasks_queued = len(results)
    rollouts = [result.rollout(name) for name, result in results.items()]
    if hasattr(daemon, "_account"):
        from ctxguard.integrations.accounting import BatchAccount

        daemon._account = BatchAccount({name: sample["data_id"] for name, sample in samples.items()})
        for rollout in rollouts:
            daemon._take(rollout, daemon._failure_of(rollout))
    else:
        daemon._completed_rollouts_v0.update({rollout.rollout_id: rollout for rollout in rollouts})
    return daemon


def batch_of(daemon: Any, *, prompt: int = 8, response: int = 8) -> tuple[Any, dict[str, Any]]:
    step = () if IS_0_1 else (0,)
    result: tuple[Any, dict[str, Any]] = daemon.get_train_data_batch(
        prompt, response, torch.device("cpu"), *step
    )
    return result


def advantages(batch: Any, estimator: Any = AdvantageEstimator.GRPO) -> dict[str, list[float]]:
    """rollout id → the advantage of each of its rows, as the trainer would compute it with verl."""
    batch.non_tensor_batch["uid"] = batch.non_tensor_batch["data_id_list"]
    if "response_mask" not in batch.batch:
        batch.batch["response_mask"] = compute_response_mask(batch)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"].float()
    batch = compute_advantage(
        batch, adv_estimator=estimator, num_repeat=4, norm_adv_by_std_in_grpo=True, config={}
    )
    rows: dict[str, list[float]] = {}
    for name, values in zip(
        batch.non_tensor_batch["rollout_id_list"], batch.batch["advantages"], strict=True
    ):
        spread = values[values != 0]
        assert len(spread) == 0 or torch.allclose(spread, spread[0])
        rows.setdefault(str(name), []).append(round(float(spread[0]) if len(spread) else 0.0, 3))
    return rows


def same(value: Any) -> Any:
    """numpy numbers as Python's, for comparing metrics."""
    return value.item() if isinstance(value, np.generic) else value
