"""The hook that writes a failed rollout's mark into the metadata of its attempt (0.3, v1 mode)."""

from __future__ import annotations

from typing import Any

import agentlightning as agl

from ctxguard.integrations.agentlightning.marking import waiting_marks
from ctxguard.integrations.marks import METADATA_KEY


class FailureMarkHook(agl.Hook):  # type: ignore[misc]
    """Writes the mark of `mark_failures` into the attempt's metadata, beside its span.

    ``agl.Trainer(hooks=[FailureMarkHook()], …)``. The trainer's side finds the span without it; the metadata
    is also there where spans got lost, and in Agent Lightning's dashboard.
    """

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        """Called after each attempt, also after an exception, before its status is set."""
        mark = waiting_marks.take(rollout.rollout_id, rollout.attempt.attempt_id)
        if mark is not None:
            metadata = {**(rollout.attempt.metadata or {}), METADATA_KEY: mark.to_dict()}
            store = runner.get_store()
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, metadata=metadata)
