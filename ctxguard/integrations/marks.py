"""The mark of a failed rollout: how the agent's process tells the trainer's that a rollout failed, and why.

One JSON-serialisable form for every carrier: rollout metadata (Agent Lightning's v0 mode), attempt
metadata and a span (v1 mode), an event (1.0). It holds figures and ids, no text of the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ctxguard.outcome import FailureReason, RolloutOutcome

METADATA_KEY = "ctxguard"
"""Key of the mark in the metadata of a rollout or an attempt."""

SPAN_NAME = "ctxguard.failed"
"""Name of the marker span, and of the event in Agent Lightning 1.0."""

SPAN_ATTRIBUTE = "ctxguard.failure"
"""Attribute of the marker span; its value is the mark as JSON."""


@dataclass(frozen=True)
class FailureMark:
    """One rollout's failure, as it travels.

    Attributes:
        reason: why; a `FailureReason` value.
        detail: one sentence for people.
        numbers: its figures, e.g. ``{"prompt_tokens": 61709, "limit": 20480}``.
        calls: the rollout's `CallCounts` as a dict; empty where nobody counted.
        rollout_id: the rollout, ``""`` where the carrier already says it.
        attempt_id: the attempt, None where there is no such notion.
    """

    reason: str
    detail: str = ""
    numbers: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    rollout_id: str = ""
    attempt_id: str | None = None

    @classmethod
    def of(cls, outcome: RolloutOutcome) -> FailureMark:
        """The mark of a failed outcome.

        Raises:
            ValueError: the outcome is not a failed one.
        """
        if outcome.failure is None:
            raise ValueError(f"rollout {outcome.rollout_id} succeeded; only a failed rollout is marked")
        failure = outcome.failure
        return cls(
            reason=failure.reason.value,
            detail=failure.detail,
            numbers=dict(failure.numbers),
            calls=dict(asdict(outcome.calls)),
            rollout_id=outcome.rollout_id,
            attempt_id=outcome.attempt_id,
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serialisable form that `from_dict` reads."""
        return {"failed": True, **asdict(self)}

    def to_json(self) -> str:
        """`to_dict` as JSON, for carriers that take a string only."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: Any) -> FailureMark | None:
        """Read a mark; None for anything that is not one (no key ``failed``, another type)."""
        if not isinstance(data, Mapping) or not data.get("failed"):
            return None
        calls, numbers = data.get("calls"), data.get("numbers")
        attempt = data.get("attempt_id")
        return cls(
            reason=str(data.get("reason") or FailureReason.UNMARKED.value),
            detail=str(data.get("detail") or ""),
            numbers=dict(numbers) if isinstance(numbers, Mapping) else {},
            calls=dict(calls) if isinstance(calls, Mapping) else {},
            rollout_id=str(data.get("rollout_id") or ""),
            attempt_id=None if attempt is None else str(attempt),
        )

    @classmethod
    def from_json(cls, text: Any) -> FailureMark | None:
        """Read a mark from JSON text; None for anything that is not one."""
        try:
            return cls.from_dict(json.loads(text))
        except (TypeError, ValueError):
            return None

    @classmethod
    def in_metadata(cls, metadata: Any) -> FailureMark | None:
        """The mark in a rollout's or an attempt's metadata, or None."""
        return cls.from_dict(metadata.get(METADATA_KEY)) if isinstance(metadata, Mapping) else None
