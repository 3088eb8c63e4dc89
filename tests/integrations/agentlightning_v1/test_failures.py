"""What makes a rollout of 1.0 a failed one, by what Agent Lightning keeps of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ctxguard.integrations.agentlightning_v1.failures import Event, as_events, failure_of
from ctxguard.integrations.marks import SPAN_NAME, FailureMark

OK: Event = ("model_request", {"status": "ok", "http_status": 200, "response": {"choices": []}})
VLLM = {
    "message": "This model's maximum context length is 2048 tokens. However, your request has 2430 input tokens.",
    "type": "BadRequestError",
    "code": 400,
}
REFUSED: Event = ("model_request", {"status": "error", "http_status": 400, "response": {"error": VLLM}})
TRIMMED: Event = ("model_request", {"status": "error", "http_status": 400, "error": VLLM})
"""The same in the triplet view."""
OTHER: Event = (
    "model_request",
    {"status": "error", "http_status": 400, "response": {"error": {"message": "unknown role 'robot'"}}},
)
REWARD: Event = ("reward", {"value": 1.0})
MARK: Event = (SPAN_NAME, FailureMark("no_calls", "it called nobody").to_dict())


def reason(*events: Event, state: str = "succeeded", message: str | None = None, **facts: Any) -> str | None:
    facts = {"reward": 1.0 if REWARD in events else None, **facts}
    mark = failure_of(state=state, error_message=message, events=events, **facts)
    return mark and mark.reason


def test_a_reward_and_no_mark_is_a_success() -> None:
    assert reason(OK, REWARD) is None
    assert reason(OK, REFUSED, OK, REWARD) is None, "it recovered and was paid"


def test_the_agents_own_mark_comes_first() -> None:
    assert reason(OK, MARK, REWARD) == "no_calls"
    assert reason(OK, REFUSED, MARK, state="failed", message="subprocess exited with code 1") == "no_calls"


@pytest.mark.parametrize("refused", [REFUSED, TRIMMED], ids=["whole", "trimmed"])
def test_a_refusal_explains_what_nobody_marked(refused: Event) -> None:
    assert reason(OK, refused, state="failed", message="subprocess exited with code 1") == "context_overflow"
    assert reason(refused, OK, state="failed") == "unmarked", "it went on after the refusal"
    assert reason(OK, refused) == "swallowed_overflow"
    assert reason(OK) == "no_reward"


def test_other_refusals_are_not_about_length() -> None:
    assert reason(OK, OTHER, state="failed") == "unmarked"
    assert reason(OK, OTHER) == "no_reward"


@pytest.mark.parametrize(
    "message",
    [
        "local subprocess timed out",
        "Job failed: DeadlineExceeded — Job was active longer than specified deadline",
        "ctxguard: not returned: still running after 1920 s",
    ],
)
def test_a_rollout_whose_time_was_up_did_not_return(message: str) -> None:
    assert reason(OK, state="failed", message=message) == "not_returned"


def test_what_cannot_be_trained_on() -> None:
    assert reason(OK, REWARD, reward=float("nan")) == "invalid_reward"
    assert reason(OK, REWARD, has_rows=False) == "no_rows"
    assert reason(OK, REWARD, has_rows=True) is None


def test_events_come_as_objects_or_as_json() -> None:
    as_object = SimpleNamespace(event_type="reward", data={"value": 1.0})
    as_json = {"event_type": "reward", "data": {"value": 1.0}, "timestamp": 0.0}
    assert as_events([as_object, as_json]) == [REWARD, REWARD]
