"""Whether a rollout failed and why, from what Agent Lightning 1.0 keeps of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ctxguard.client.overflow import classify
from ctxguard.integrations.marks import SPAN_NAME, FailureMark
from ctxguard.outcome import FailureReason

NOT_RETURNED = "ctxguard: not returned"
"""How the error message begins that `AccountsForRollouts` gives a rollout that it gives up."""

# What 1.0.2's controllers say of a rollout whose time was up (local_reconciler.py, k8s_reconciler.py).
_TIMED_OUT = (NOT_RETURNED, "local subprocess timed out", "Job failed: DeadlineExceeded")

Event = tuple[str, Mapping[str, Any]]
"""Type and data of an event."""


def as_events(events: Iterable[Any]) -> list[Event]:
    """Events as they come (Agent Lightning's objects, or JSON), as types and data in the same order."""
    return [
        (event["event_type"], event["data"]) if isinstance(event, Mapping) else (event.event_type, event.data)
        for event in events
    ]


def failure_of(
    *,
    state: str | None,
    error_message: str | None,
    events: Sequence[Event],
    reward: float | None,
    has_rows: bool | None = None,
) -> FailureMark | None:
    """What makes a rollout a failed one, None for a good one.

    The agent's own mark comes first, whatever the state says; then the state; then the reward: a rollout
    without one did not succeed, and if the server refused a prompt of it as too long, that is why.

    Args:
        state: the rollout's final state, ``"succeeded"`` or ``"failed"``.
        error_message: what the controller says of a failed one.
        events: its events, oldest first.
        reward: its reward, None without one.
        has_rows: whether there is something to train on; None where that does not matter (validation).
    """
    for kind, data in reversed(events):
        mark = FailureMark.from_dict(data) if kind == SPAN_NAME else None
        if mark is not None:
            return mark
    refused = [is_overflow(data) for kind, data in events if kind == "model_request"]
    if state != "succeeded":
        return _of_failed(error_message or "", last_call_refused=bool(refused) and refused[-1])
    if reward is None:
        if any(refused):
            detail = "it ended without a reward after the server had refused a prompt as too long"
            return FailureMark(FailureReason.SWALLOWED_OVERFLOW.value, detail)
        return FailureMark(FailureReason.NO_REWARD.value, "it ended without a reward")
    if not math.isfinite(reward):
        return FailureMark(FailureReason.INVALID_REWARD.value, f"the reward is {reward}")
    if has_rows is False:
        return FailureMark(FailureReason.NO_ROWS.value, "no prompt and response ids to train on")
    return None


def _of_failed(message: str, *, last_call_refused: bool) -> FailureMark:
    said = message or "the controller gave no reason"
    if message.startswith(_TIMED_OUT):
        return FailureMark(FailureReason.NOT_RETURNED.value, said)
    if last_call_refused:
        detail = f"the server refused its last prompt as too long ({said})"
        return FailureMark(FailureReason.CONTEXT_OVERFLOW.value, detail)
    return FailureMark(FailureReason.UNMARKED.value, said)


def is_overflow(data: Mapping[str, Any]) -> bool:
    """Whether a ``model_request`` event, whole or trimmed, is a refusal for the prompt's length."""
    status = data.get("http_status")
    if not isinstance(status, int) or status < 400:
        return False
    body = data.get("response")
    if not isinstance(body, Mapping) or not body:
        body = {"error": data.get("error")}  # the triplet view keeps only this
    return classify(status=status, body=body).is_overflow


def is_good_call(data: Mapping[str, Any]) -> bool:
    """Whether Agent Lightning would make a row of a ``model_request`` event, by its own rule."""
    status = data.get("http_status")
    return data.get("status") != "error" and not (isinstance(status, int) and status >= 400)
