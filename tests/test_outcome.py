"""Every rollout ends in exactly one outcome, and a failure is never a reward."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import pickle

import pytest

from ctxguard import ContextOverflowError, FailureReason, current_scope, guarded_rollout
from tests.test_scope import ANSWERED

OVERFLOW = ContextOverflowError(
    "too long", prompt_tokens=61_709, limit=19_456, window=20_480, output_tokens=1_024, attempts=1
)


def answered_call() -> None:
    """What a wrapped client does on an answered call."""
    scope = current_scope()
    assert scope is not None
    scope.begin_call()
    scope.record(ANSWERED)


def failed_call() -> None:
    """What a wrapped client does on an unrecoverable overflow."""
    scope = current_scope()
    assert scope is not None
    scope.begin_call()
    scope.latch(OVERFLOW)
    raise OVERFLOW


def calls(outcome):
    return (outcome.calls.tried, outcome.calls.ok, outcome.calls.overflow)


def in_both_forms(body):
    """The same rollout as a function, a coroutine function and a method."""

    @guarded_rollout
    def sync(task):
        return body(task)

    @guarded_rollout
    async def coroutine(task):
        await asyncio.sleep(0)
        return body(task)

    class Agent:
        @guarded_rollout
        def rollout(self, task):
            return body(task)

    return [sync("t"), asyncio.run(coroutine("t")), Agent().rollout("t")]


def test_a_reward_is_a_success():
    def body(task):
        answered_call()
        return 1

    for outcome in in_both_forms(body):
        assert (outcome.status, outcome.reward, outcome.failure) == ("succeeded", 1.0, None)
        assert calls(outcome) == (1, 1, 0)


def test_a_zero_reward_is_a_success_too():
    def body(task):
        answered_call()
        return 0

    assert [outcome.reward for outcome in in_both_forms(body)] == [0.0, 0.0, 0.0]


def test_an_overflow_is_a_failure_with_its_numbers():
    def body(task):
        answered_call()
        failed_call()

    for outcome in in_both_forms(body):
        assert outcome.is_failed
        assert outcome.reward is None
        assert outcome.failure.reason is FailureReason.CONTEXT_OVERFLOW
        assert outcome.failure.numbers == {
            "prompt_tokens": 61_709,
            "limit": 19_456,
            "window": 20_480,
            "output_tokens": 1_024,
            "attempts": 1,
        }
        assert calls(outcome) == (2, 1, 1)


def test_an_overflow_wrapped_by_a_framework_is_still_one():
    def body(task):
        try:
            failed_call()
        except ContextOverflowError as error:
            raise RuntimeError("agent step failed") from error

    for outcome in in_both_forms(body):
        assert outcome.failure.reason is FailureReason.CONTEXT_OVERFLOW
        assert isinstance(outcome.error, RuntimeError)


def swallow(task):
    answered_call()
    with contextlib.suppress(ContextOverflowError):
        failed_call()
    return 1.0


def test_a_swallowed_overflow_is_a_failure_not_a_reward():
    for outcome in in_both_forms(swallow):
        assert outcome.failure.reason is FailureReason.SWALLOWED_OVERFLOW
        assert outcome.reward is None
        assert outcome.failure.numbers["prompt_tokens"] == 61_709


def test_a_swallowed_overflow_is_accepted_only_when_asked_and_answered_later():
    def recovers(task):
        swallow(task)
        answered_call()
        return 1.0

    assert guarded_rollout(recovers)("t").is_failed
    assert guarded_rollout(recovers, accept_after_recovery=True)("t").reward == 1.0
    assert guarded_rollout(swallow, accept_after_recovery=True)("t").is_failed


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, FailureReason.NO_REWARD),
        (float("nan"), FailureReason.INVALID_REWARD),
        (float("inf"), FailureReason.INVALID_REWARD),
        ("1.0", FailureReason.INVALID_REWARD),
        ({"reward": 1.0}, FailureReason.INVALID_REWARD),
    ],
)
def test_what_is_not_a_finite_number_is_not_a_reward(value, reason):
    def body(task):
        answered_call()
        return value

    assert [outcome.failure.reason for outcome in in_both_forms(body)] == [reason] * 3


def test_the_reward_can_be_taken_out_of_the_result():
    @guarded_rollout(reward_of=lambda result: result["reward"], require_calls=False)
    def rollout():
        return {"reward": 0.5, "answer": 42}

    outcome = rollout()
    assert outcome.reward == 0.5
    assert outcome.value["answer"] == 42


def test_a_rollout_without_an_answered_call_is_a_failure():
    outcome = guarded_rollout(lambda: 1.0)()
    assert outcome.failure.reason is FailureReason.NO_CALLS
    assert "wrap the client" in outcome.failure.detail


def test_an_unexpected_exception_keeps_its_type_and_traceback_in_the_log(caplog):
    def body(task):
        answered_call()
        raise KeyError("boom")

    with caplog.at_level(logging.INFO, "ctxguard"):
        outcome = guarded_rollout(body, rollout_id="r-7")("t")
    assert outcome.failure.reason is FailureReason.EXCEPTION
    assert isinstance(outcome.error, KeyError)
    assert "in body" in caplog.text
    assert "rollout r-7 failed: exception" in caplog.text


def test_an_overflow_is_one_line_at_info_level_with_its_numbers(caplog):
    with caplog.at_level(logging.INFO, "ctxguard"):
        guarded_rollout(lambda: failed_call(), rollout_id="r")()
    assert [(record.levelname, "61709" in record.message) for record in caplog.records] == [("INFO", True)]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, asyncio.CancelledError, SystemExit])
def test_cancellation_passes_through(stop):
    def body():
        raise stop

    with pytest.raises(stop):
        guarded_rollout(body)()


def test_one_failure_does_not_end_the_others():
    @guarded_rollout(require_calls=False)
    async def rollout(i):
        if i == 3:
            raise OVERFLOW
        return float(i)

    async def batch():
        return await asyncio.gather(*(rollout(i) for i in range(8)))

    outcomes = asyncio.run(batch())
    assert [outcome.is_failed for outcome in outcomes] == [i == 3 for i in range(8)]


def test_signature_name_and_coroutine_ness_stay():
    async def rollout(self, task, *, model="m"):
        """Doc."""

    guarded = guarded_rollout(rollout)
    assert inspect.iscoroutinefunction(guarded)
    assert inspect.signature(guarded) == inspect.signature(rollout)
    assert (guarded.__name__, guarded.__doc__) == ("rollout", "Doc.")


def test_ids_may_come_from_the_arguments():
    @guarded_rollout(
        rollout_id=lambda task: task["id"], attempt_id=lambda task: task["attempt"], require_calls=False
    )
    def rollout(task):
        return 1.0

    outcome = rollout({"id": "r-1", "attempt": "a-2"})
    assert (outcome.rollout_id, outcome.attempt_id) == ("r-1", "a-2")


def test_an_outcome_can_be_sent_to_another_process_and_written_as_json():
    outcome = guarded_rollout(lambda: failed_call(), rollout_id="r")()
    copy = pickle.loads(pickle.dumps(outcome))
    assert copy == outcome
    assert copy.error.limit == 19_456
    plain = json.loads(json.dumps(outcome.to_dict()))
    assert plain["failure"]["reason"] == "context_overflow"


def test_a_bare_refusal_of_the_provider_counts_as_overflow():
    class Refusal(Exception):
        status_code = 400
        body = {"message": "This model's maximum context length is 20480 tokens. However, your request has 49088 "
                           "input tokens. Please reduce the length of the input messages."}  # fmt: skip

    def body():
        raise Refusal("Error code: 400")

    assert guarded_rollout(body)().failure.reason is FailureReason.CONTEXT_OVERFLOW
