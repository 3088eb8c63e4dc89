"""GRPO advantages per rollout instead of per row, as an advantage estimator of verl.

A rollout whose history was compacted, or whose template strips thinking, comes out as several rows. verl's
own GRPO counts each row as a sample of its group, so that such a rollout weighs more in the mean and the
deviation. Here each rollout counts once.

    algorithm.adv_estimator=ctxguard_grpo_per_rollout

Importing this module registers the estimator (verl's ``register_adv_est``); the module of `GuardedTrainer`
does so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from ctxguard.errors import ConfigurationError

ESTIMATOR = "ctxguard_grpo_per_rollout"
"""Name for ``algorithm.adv_estimator``."""


@register_adv_est(ESTIMATOR)  # type: ignore[untyped-decorator]
def grpo_per_rollout(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages in which each rollout of a group counts once, however many rows it has.

    With one row to a rollout they are those of verl's ``compute_grpo_outcome_advantage``: reward minus the
    group's mean, divided by the group's standard deviation (n - 1 in its denominator) plus ``epsilon``.
    A group of one rollout has no baseline; its advantage is 0 (verl gives it its raw reward).

    Args:
        token_level_rewards: shape (rows, response length).
        response_mask: shape (rows, response length); 1 where the model wrote the token.
        index: the group of each row, as `GroupOfRollout`, which says the rollout too.
        epsilon: keeps the division finite.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation; the setting of the same name in
            ``config`` goes first.
        config: verl's ``algorithm`` section, or None.

    Returns:
        Advantages and returns, both of shape (rows, response length) and equal.

    Raises:
        ConfigurationError: the rows do not say their rollout; the daemon has no `FailedRolloutFilter`.
    """
    divide = norm_adv_by_std_in_grpo
    if config is not None:
        divide = config.get("norm_adv_by_std_in_grpo", divide)
    with torch.no_grad():
        row_scores = token_level_rewards.sum(dim=-1).float()
        scores_of: dict[str, dict[str, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))
        for row, group in enumerate(index):
            if not hasattr(group, "rollout_id"):
                raise ConfigurationError(
                    f"row {row} does not say which rollout it is of: algorithm.adv_estimator={ESTIMATOR} "
                    "needs daemon_cls=GuardedDaemon, or another daemon with FailedRolloutFilter"
                )
            scores_of[str(group)][group.rollout_id].append(row_scores[row])
        advantages = torch.zeros_like(row_scores)
        for row, group in enumerate(index):
            scores = torch.stack([torch.stack(rows).mean() for rows in scores_of[str(group)].values()])
            if len(scores) < 2:
                continue
            advantages[row] = row_scores[row] - scores.mean()
            if divide:
                advantages[row] /= scores.std() + epsilon
        spread = advantages.unsqueeze(-1) * response_mask
    return spread, spread
