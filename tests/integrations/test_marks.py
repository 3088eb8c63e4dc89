"""The mark of a failed rollout survives every carrier, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest

from ctxguard import FailureReason, guarded_rollout
from ctxguard.integrations.marks import METADATA_KEY, FailureMark

MARK = FailureMark(
    "context_overflow",
    "61709 tokens",
    {"prompt_tokens": 61709, "limit": 20480},
    {"tried": 3, "ok": 2},
    "r-1",
    "a-1",
)


@pytest.mark.parametrize(
    "carry",
    [
        lambda mark: FailureMark.from_dict(mark.to_dict()),
        lambda mark: FailureMark.from_json(mark.to_json()),
        lambda mark: FailureMark.in_metadata(
            json.loads(json.dumps({METADATA_KEY: mark.to_dict(), "data_id": "d"}))
        ),
    ],
    ids=["dict", "json", "metadata"],
)
@pytest.mark.parametrize("mark", [MARK, FailureMark("no_reward")], ids=["full", "bare"])
def test_it_comes_back_as_it_left(carry, mark):
    assert carry(mark) == mark


@pytest.mark.parametrize(
    "other", [None, "", "text", 7, [], {}, {"failed": False, "reason": "x"}, {"reason": "x"}]
)
def test_other_things_are_no_marks(other):
    assert FailureMark.from_dict(other) is None
    assert FailureMark.in_metadata({METADATA_KEY: other}) is None
    assert FailureMark.from_json(json.dumps(other)) is None


@pytest.mark.parametrize("text", [None, "", "{", 7, b"\xff"])
def test_broken_json_is_no_mark(text):
    assert FailureMark.from_json(text) is None


def test_a_mark_of_a_stranger_is_read_as_far_as_it_goes():
    assert FailureMark.from_dict({"failed": True, "numbers": "many", "calls": 3}) == FailureMark("unmarked")


def test_it_is_made_of_a_failed_outcome():
    outcome = guarded_rollout(lambda: None, rollout_id="r-1", attempt_id="a-1", require_calls=False)()  # type: ignore[call-overload]
    mark = FailureMark.of(outcome)
    assert (mark.reason, mark.rollout_id, mark.attempt_id) == (FailureReason.NO_REWARD.value, "r-1", "a-1")
    assert mark.calls["tried"] == 0


def test_a_good_outcome_has_none():
    outcome = guarded_rollout(lambda: 1.0, rollout_id="r-1", require_calls=False)()  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="rollout r-1 succeeded; only a failed rollout is marked"):
        FailureMark.of(outcome)
