"""The client that writes a failed rollout's mark into the metadata it posts (0.1, and v0 mode of 0.3)."""

from __future__ import annotations

from typing import Any

from agentlightning import AgentLightningClient

from ctxguard.integrations.agentlightning.marking import stamp


class MarkingClient(AgentLightningClient):  # type: ignore[misc]
    """``Trainer.fit(agent, MarkingClient("http://…"))`` instead of the bare URL.

    After an exception the runner posts an empty rollout; this one says why it is empty. Arguments are those
    of ``AgentLightningClient``.
    """

    def post_rollout(self, rollout: Any) -> Any:
        """Post a rollout, with its mark if it failed."""
        stamp(rollout)
        return super().post_rollout(rollout)

    async def post_rollout_async(self, rollout: Any) -> Any:
        """Post a rollout, with its mark if it failed."""
        stamp(rollout)
        return await super().post_rollout_async(rollout)
