"""The training step: skipped where too little of its batch can be trained on."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("ctxguard")


class StepSkipped(Exception):
    """Too little of a batch is trainable; `SkipsThinSteps` catches it. ``args[0]`` has the metrics."""


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
