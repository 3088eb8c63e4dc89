"""The daemon and the trainer for Agent Lightning 0.3, ready to be named.

    from ctxguard.integrations.agentlightning.verl import GuardedDaemon, GuardedTrainer

    algorithm = agl.VERL(config, daemon_cls=GuardedDaemon, trainer_cls=GuardedTrainer)

Both are found by name in a Ray worker. Importing this module imports verl and torch (10 s).
"""

from __future__ import annotations

from agentlightning.verl.daemon import AgentModeDaemon
from agentlightning.verl.trainer import AgentLightningTrainer

from ctxguard.integrations.agentlightning import advantages
from ctxguard.integrations.agentlightning.filter import FailedRolloutFilter
from ctxguard.integrations.agentlightning.steps import SkipsThinSteps

__all__ = ["PER_ROLLOUT", "GuardedDaemon", "GuardedTrainer"]

PER_ROLLOUT = advantages.ESTIMATOR
"""``"ctxguard_grpo_per_rollout"``, a value of ``algorithm.adv_estimator``: GRPO in which each rollout of a
group counts once. verl's own ``grpo`` counts each row."""


class GuardedDaemon(FailedRolloutFilter, AgentModeDaemon):  # type: ignore[misc]
    """``AgentModeDaemon`` that accounts for each queued rollout once; see `FailedRolloutFilter`."""


class GuardedTrainer(SkipsThinSteps, AgentLightningTrainer):  # type: ignore[misc]
    """``AgentLightningTrainer`` that skips a step with too little to train on; see `SkipsThinSteps`."""
