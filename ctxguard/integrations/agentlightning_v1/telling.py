"""How the trainer's side tells its agents something: in the rollout's metadata, which they can read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctxguard.integrations.agentlightning_v1.gateway import Told
from ctxguard.integrations.marks import METADATA_KEY

if TYPE_CHECKING:
    from agentlightning.schemas import RolloutCreate


def with_told(request: RolloutCreate, told: Told) -> RolloutCreate:
    """The request with what is told in its metadata; what a hook of the user's has put there stays."""
    metadata: Any = request.metadata or {}
    if not isinstance(metadata, dict):
        metadata = metadata.model_dump(exclude_none=True)
    return request.model_copy(update={"metadata": {METADATA_KEY: told.to_dict(), **metadata}})
