"""Rollout managers of Agent Lightning 1.0 that wait for each rollout for a stated time, and tell the agents.

Needs Agent Lightning's server parts only, neither verl nor torch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentlightning.hooks import RolloutHooks
from agentlightning.verl.agl_rollout_manager import AglAsyncRolloutManager, AglRolloutManager

from ctxguard.integrations.agentlightning_v1.failures import NOT_RETURNED
from ctxguard.integrations.agentlightning_v1.gateway import Told
from ctxguard.integrations.agentlightning_v1.telling import with_told
from ctxguard.integrations.agentlightning_v1.watch import RolloutWatch

if TYPE_CHECKING:
    from agentlightning.schemas import RolloutCreate

logger = logging.getLogger("ctxguard")

GRACE_SECONDS = 120.0
"""How much longer than the controller's own time-out a manager waits by default."""


class AccountsForRollouts:
    """Mixin for ``AglRolloutManagerBase``: what was queued is known, and each rollout ends.

    Attributes:
        watch: decides when a rollout is given up; set one to carry it from manager to manager.
        told: what the agents are told; the model servers are added as they are registered.
        queued: rollout id → group of what this manager has queued.
    """

    # What the base class has; its types are not known here.
    client: Any
    _hooks: RolloutHooks | None
    _rollout_config: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watch = RolloutWatch(float(self._rollout_config["timeout_seconds"]) + GRACE_SECONDS)
        self.told = Told()
        self.queued: dict[str, str] = {}

    def register_model(self, server_addresses: list[str]) -> list[Any]:
        """Register the model servers, as the base class does, and remember them for the agents."""
        models: list[Any] = super().register_model(server_addresses)  # type: ignore[misc]
        servers = tuple(model.endpoint for model in models)
        self.told = replace(self.told, servers=servers, model=models[0].model if models else None)
        return models

    def _create_rollouts(self, data: dict[str, Any], *, is_train: bool) -> list[Any]:
        hooks = self._hooks
        self._hooks = _Telling(self.told, hooks)
        try:
            created: list[Any] = super()._create_rollouts(data, is_train=is_train)  # type: ignore[misc]
        finally:
            self._hooks = hooks
        self.queued.update({rollout.rollout_id: rollout.data_id for rollout in created})
        self.watch.enqueue(rollout.rollout_id for rollout in created)
        return created

    def _get_rollout(self, rollout_id: str) -> Any:
        """The rollout as the server has it. One that is overdue ends here, as failed."""
        rollout: Any = super()._get_rollout(rollout_id)  # type: ignore[misc]
        detail = self.watch.overdue(rollout_id, rollout.status.state.value)
        if detail is None:
            return rollout
        logger.error("rollout %s did not return and ends as failed: %s", rollout_id, detail)
        status = {"state": "failed", "error_message": f"{NOT_RETURNED}: {detail}"}
        answer = self.client.patch(f"/api/rollouts/{rollout_id}", json={"status": status})
        if answer.status_code != 409:  # a conflict: it has ended by itself in the meantime
            answer.raise_for_status()
        return super()._get_rollout(rollout_id)  # type: ignore[misc]


class _Telling(RolloutHooks):  # type: ignore[misc]
    """Hooks for the time of queueing only: the user's own, then what is told."""

    def __init__(self, told: Told, hooks: RolloutHooks | None) -> None:
        self.told = told
        self.hooks = hooks

    def on_enqueue(self, request: RolloutCreate) -> RolloutCreate:
        if self.hooks is not None:
            request = self.hooks.on_enqueue(request)
        return with_told(request, self.told)


class GuardedRolloutManager(AccountsForRollouts, AglRolloutManager):  # type: ignore[misc]
    """``AglRolloutManager`` whose rollouts all end; see `AccountsForRollouts`."""


class GuardedAsyncRolloutManager(AccountsForRollouts, AglAsyncRolloutManager):  # type: ignore[misc]
    """``AglAsyncRolloutManager`` whose rollouts all end; see `AccountsForRollouts`."""


GUARDED: Mapping[type[Any], type[Any]] = {
    AglRolloutManager: GuardedRolloutManager,
    AglAsyncRolloutManager: GuardedAsyncRolloutManager,
}
"""Agent Lightning's manager → ours."""
