"""The trainer of Agent Lightning 1.0 that accounts for each rollout once.

Imports Agent Lightning 1.0's trainer side, and with it verl, torch and ray.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from agentlightning.verl.agl_rollout_manager import AglAsyncRolloutManager, AglRolloutManager
from agentlightning.verl.trainer import AgentLightningRayPPOTrainer
from omegaconf import OmegaConf
from verl import DataProto

from ctxguard.budget import ContextBudget
from ctxguard.errors import BudgetError
from ctxguard.integrations.accounting import BatchAccount
from ctxguard.integrations.agentlightning_v1.adapter import AccountingAdapter
from ctxguard.integrations.agentlightning_v1.gateway import Told
from ctxguard.integrations.agentlightning_v1.manager import GRACE_SECONDS, GUARDED
from ctxguard.integrations.agentlightning_v1.settings import GuardSettings
from ctxguard.integrations.agentlightning_v1.watch import RolloutWatch

logger = logging.getLogger("ctxguard")


class StepSkipped(Exception):
    """Too little of a batch is trainable. ``args[0]`` has its metrics; it never leaves `GuardedTrainer`."""


class GuardedTrainer(AgentLightningRayPPOTrainer):  # type: ignore[misc]
    """``AgentLightningRayPPOTrainer`` that trains on what succeeded and accounts for the rest.

    Each queued rollout ends exactly once, as kept or as failed (``ctxguard/kept`` + ``ctxguard/failed`` =
    ``ctxguard/queued``), in the step that it is returned in; carried-over rollouts of asynchronous training
    stay open until then. Failed rollouts, groups that they leave too small, and rows whose prompt is too long
    leave the batch before advantages are computed. A step with fewer rows than one mini-batch, or than there
    are data-parallel workers, is skipped. Settings: `GuardSettings`, in the section ``ctxguard`` of the
    configuration.

    Advantages are taken per rollout or per row as ``algorithm.enable_rollout_level_advantage`` says (1.0's
    own; on by default), the loss as ``actor.policy_loss.loss_mode`` says.

    Arguments are those of the base class.

    Raises:
        ConfigurationError: the section ``ctxguard`` has an unknown key or a bad value.
        FailedRolloutsError: during the run, where failures are handled as ``"raise"``.
    """

    # What the base class has; its types are not known here.
    config: Any
    tokenizer: Any
    actor_rollout_wg: Any
    global_steps: int
    is_async: bool
    _carry_over_rollouts: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open_accounts()

    def _open_accounts(self) -> None:
        section = OmegaConf.select(self.config, "ctxguard")
        given: Any = None if section is None else OmegaConf.to_container(section, resolve=True)
        self._guard_settings = GuardSettings.of(given)
        wait = self._guard_settings.wait_seconds
        if wait is None:
            wait = float(self.config.agentlightning.rollout_timeout_seconds) + GRACE_SECONDS
        self._watch = RolloutWatch(wait)
        self._open_rollouts: dict[str, str] = {}
        self._skipped_steps = 0

    def _make_rollout_manager(self, manager_cls: type[Any]) -> Any:
        manager = super()._make_rollout_manager(GUARDED.get(manager_cls, manager_cls))
        manager.watch = self._watch
        manager.told = Told(budget=self._told_budget())
        return manager

    def _told_budget(self) -> ContextBudget | None:
        try:
            return ContextBudget.from_verl(self.config)
        except BudgetError as error:
            logger.warning("the agents are not told a budget: %s", error)
            return None

    def _train_step(self, timing_raw: dict[str, float], curr_step_profile: bool) -> Any:
        try:
            result = super()._train_step(timing_raw, curr_step_profile)
        except StepSkipped as skipped:
            metrics = skipped.args[0]
            self._skipped_steps += 1
            logger.warning(
                "step %d skipped: %d rows to train on, %d needed; %s",
                self.global_steps,
                metrics["ctxguard/rows"],
                self._fewest_rows(),
                {name: value for name, value in metrics.items() if name.startswith("ctxguard/failed")},
            )
            return None  # the base class's own way of skipping
        if result is not None:
            result[0]["ctxguard/skipped_steps"] = self._skipped_steps
        return result

    def _rollout(self, gen_batch: DataProto, is_train: bool) -> tuple[DataProto, dict[str, Any]]:
        """Run the rollouts of a batch; the rows to train on, and metrics. As the base class does it."""
        started = time.monotonic()
        servers = self._server_addresses()
        self._resume_all_rollout_generation()
        if self.is_async:
            self._resume_gateway()
        before: list[Any] = list(self._carry_over_rollouts)
        is_async_batch = self.is_async and is_train
        kind = AglAsyncRolloutManager if is_async_batch else AglRolloutManager
        manager = self._make_rollout_manager(kind)
        manager.delete_model()
        manager.register_model(servers)
        data = dict(gen_batch.non_tensor_batch)
        if is_async_batch:
            completed, self._carry_over_rollouts = manager.enqueue_and_wait_until_group_completed(
                data, before, is_train=True, target_finished_group_num=self.config.data.train_batch_size
            )
        else:
            completed = manager.enqueue_and_wait_until_completed(data, is_train=is_train)
        waited = time.monotonic() - started
        # Of an asynchronous batch, what is carried over stays open.
        carried = {rollout.rollout_id for rollout in self._carry_over_rollouts} if is_async_batch else set()
        adapter = self._make_adapter(self._account_of(manager.queued, carried, is_train=is_train))
        batch: DataProto | None = DataProto(batch=None)
        if is_train:
            batch, metrics = adapter.get_train_data_batch(completed, global_steps=self.global_steps)
            metrics.update(self._rollout_lifecycle_metrics(completed))
        else:
            metrics = adapter.get_test_metrics(completed, global_steps=self.global_steps)
        metrics["ctxguard/waited" if is_train else "ctxguard/val/waited"] = waited
        if is_async_batch:
            metrics["ctxguard/carried_over"] = len(carried)
            metrics.update(
                self._compute_async_rollout_metrics(
                    previous_carry_over_rollouts=before,
                    completed_rollouts=completed,
                    new_carry_over_rollouts=self._carry_over_rollouts,
                )
            )
        if self.is_async:
            metrics.update(self._pause_and_drain_gateway(reason=f"rollout_done step={self.global_steps}"))
        else:
            self._abort_all_rollout_requests()
        if batch is None:
            raise StepSkipped(metrics)
        return batch, metrics

    def _account_of(self, queued: Mapping[str, str], carried: set[str], *, is_train: bool) -> BatchAccount:
        """The account of what has to be settled now: all that is open, but for what is carried over."""
        if not is_train:
            return BatchAccount(queued)
        due = {**self._open_rollouts, **queued}
        self._open_rollouts = {rollout: due.pop(rollout) for rollout in carried if rollout in due}
        return BatchAccount(due)

    def _server_addresses(self) -> list[str]:
        if hasattr(self, "llm_server_manager"):  # verl 0.8
            return list(self.llm_server_manager.get_addresses())
        return list(self.async_rollout_manager.server_addresses)

    def _make_adapter(self, account: BatchAccount) -> AccountingAdapter:
        aggregator = self.config.agentlightning.trace_aggregator
        level = aggregator.get("level", "transition")
        lengths = self.config.data
        max_prompt, max_response, max_total = lengths.max_prompt_length, lengths.max_response_length, None
        if str(level).startswith("trajectory"):
            max_prompt = aggregator.get("trajectory_max_prompt_length", max_prompt)
            max_response = aggregator.get("trajectory_max_response_length", max_response)
            max_total = aggregator.get("trajectory_max_total_length")
        router_replay = "actor_rollout_ref.actor.megatron.router_replay.mode"
        updates = self.config.agentlightning.get("max_ppo_update_times", None)
        settings, mini_batch = self._guard_settings, self._mini_batch_rows()
        return AccountingAdapter(
            account=account,
            handling=settings.handling,
            smallest_group=settings.smallest_group_for(self.config.algorithm.adv_estimator),
            mini_batch_rows=mini_batch,
            fewest_rows=self._fewest_rows(),
            most_rows=None if updates is None else updates * mini_batch,
            max_prompt_length=max_prompt,
            max_response_length=max_response,
            max_total_length=max_total,
            device=torch.device("cpu"),
            pad_token_id=self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0,
            reward_fillna_value=self.config.agentlightning.reward_fillna_value,
            trace_aggregator_level=level,
            tokenizer=self.tokenizer,
            processor=getattr(self, "processor", None),
            require_routed_experts=OmegaConf.select(self.config, router_replay, default="disabled") == "R3",
        )

    def _mini_batch_rows(self) -> int:
        """Rows of a mini-batch as the base class cuts the batch (1.0.2 ``trainer.py``, ``_train_step``)."""
        settings = self.config.actor_rollout_ref
        return int(settings.actor.ppo_mini_batch_size) * int(settings.rollout.n)

    def _fewest_rows(self) -> int:
        """Fewest rows worth a step: one mini-batch, and one row for each data-parallel worker."""
        workers: int = self._get_dp_size(self.actor_rollout_wg, "actor")
        return max(self._mini_batch_rows(), workers)
