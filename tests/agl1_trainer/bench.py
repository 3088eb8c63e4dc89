"""Trainers on a bench: the real ones, with what needs a GPU or Ray's workers replaced by nothing.

Their own code runs from the data loader through queueing, waiting, rows, dropping, verl's advantages and up to the
actor's update, whose batch is kept.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from agentlightning.verl.trainer import AgentLightningRayPPOTrainer
from omegaconf import OmegaConf
from verl import DataProto

from ctxguard.integrations.agentlightning_v1.__main__ import read_config
from ctxguard.integrations.agentlightning_v1.trainer import GuardedTrainer
from tests.agl1.rig import AGENTS, KEY, Agl1

N = 4
"""Rollouts of a task."""


def config_for(server: Agl1, **changes: Any) -> Any:
    """Agent Lightning's own configuration, with small lengths and one mini-batch of one task."""
    settings = {
        "agentlightning.agl_base_url": server.url,
        "agentlightning.agl_key": KEY,
        "agentlightning.rollout_timeout_seconds": 60,
        "agentlightning.local.agent_class": f"{AGENTS}:ByTask",
        "agentlightning.local.env_map": {"TASK": "input.task"},
        "agentlightning.trace_aggregator.level": "transition",
        "agentlightning.trace_aggregator.trajectory_max_prompt_length": 64,
        "agentlightning.trace_aggregator.trajectory_max_response_length": 64,
        "algorithm.adv_estimator": "grpo",
        "data.max_prompt_length": 64,
        "data.max_response_length": 16,
        "data.train_batch_size": 1,
        "actor_rollout_ref.model.path": server.model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
        "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",  # else advantages come scaled
        "actor_rollout_ref.rollout.n": N,
        "trainer.balance_batch": False,
        "trainer.val_before_train": False,
        "trainer.logger": ["console"],
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        **changes,
    }
    config = read_config([])
    for name, value in settings.items():
        OmegaConf.update(config, name, value, merge=False, force_add=True)
    return config


def batch_of(*tasks: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as the data loader gives it."""
    return {
        "task": np.array([json.dumps(task) for task in tasks], dtype=object),
        "fake_ids": torch.ones(len(tasks), 1, dtype=torch.int),
    }


class _Bench:
    """Mixin: no workers, no GPU. Everything else is the trainer's."""

    def __init__(
        self,
        config: Any,
        train: Sequence[Sequence[Mapping[str, Any]]],
        val: Sequence[Sequence[Mapping[str, Any]]] = (),
        servers: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
        self.processor = None
        self.is_async = config.agentlightning.async_rollout.enabled
        self.global_steps, self.epoch, self.total_training_steps = 1, 0, len(train)
        self._hooks = self._agl_client = self._train_dataloader_iter = None
        self._carry_over_rollouts: list[Any] = []
        self.train_dataloader = [batch_of(*tasks) for tasks in train]
        self.val_dataloader = [batch_of(*tasks) for tasks in val]
        self.use_reference_policy = self.use_critic = False
        self.llm_server_manager = SimpleNamespace(get_addresses=lambda: list(servers) or ["127.0.0.1:9"])
        nothing = lambda *args, **kwargs: None  # noqa: E731
        self.checkpoint_manager = SimpleNamespace(sleep_replicas=nothing, update_weights=nothing)
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 0)
        self.actor_rollout_wg = None
        self.trained: list[DataProto] = []
        if isinstance(self, GuardedTrainer):
            self._open_accounts()

    def _get_dp_size(self, worker_group: Any, role: str) -> int:
        return 1

    def _load_checkpoint(self) -> None:
        """There is none."""

    def _resume_all_rollout_generation(self) -> None:
        """The model servers are always up."""

    _abort_all_rollout_requests = _resume_all_rollout_generation

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, float]:
        zeros = torch.zeros_like(batch.batch["responses"], dtype=torch.float32)
        return DataProto.from_dict({"old_log_probs": zeros}), 0.0

    def _update_actor(self, batch: DataProto) -> DataProto:
        self.trained.append(batch)
        return DataProto(meta_info={"metrics": {}})

    def step(self) -> Any:
        """One training step's metrics; None where it was skipped."""
        result = self._train_step({}, False)
        self.global_steps += 1
        return None if result is None else result[0]


class Unguarded(_Bench, AgentLightningRayPPOTrainer):
    """Agent Lightning's trainer."""


class Guarded(_Bench, GuardedTrainer):
    """Ours."""


def fates(*fates: Mapping[str, Any]) -> dict[str, Any]:
    """A task whose rollouts go differently."""
    return {"id": uuid.uuid4().hex, "fates": list(fates)}


def advantages(batch: DataProto) -> list[tuple[float, list[float]]]:
    """Of each rollout in a trained batch, its reward and the advantages of its rows; sorted."""
    rows: dict[str, tuple[float, list[float]]] = {}
    mask = batch.batch["response_mask"].bool()
    scores = batch.batch["token_level_scores"].float().sum(dim=-1)
    for index, rollout in enumerate(batch.non_tensor_batch["rollout_id_list"]):
        values = batch.batch["advantages"][index][mask[index]]
        assert torch.allclose(values, values[0])
        reward = round(float(scores[index]), 3)
        rows.setdefault(str(rollout), (reward, []))[1].append(round(float(values[0]), 3))
    return sorted(rows.values())
