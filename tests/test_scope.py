"""A scope belongs to one rollout: its tasks and threads share it, two rollouts never do."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ctxguard import ContextOverflowError, current_scope
from ctxguard.events import Answered, Compacted, Counted, Refused
from ctxguard.scope import RolloutScope, ids_from_url, open_scope, server_identity

IDS = {"model": "m", "rollout_id": "r", "attempt_id": None, "call": 1}
ANSWERED = Answered(**IDS, predicted_tokens=5, served_tokens=5, completion_tokens=1, exact=True, attempts=1)


def counted(tokens):
    return Counted(
        **IDS,
        prompt_tokens=tokens,
        prompt_limit=9,
        output_tokens=1,
        exact=True,
        path="untouched",
        messages=1,
        history=1,
        digest="",
    )


def test_scopes_open_and_close_and_nest():
    assert current_scope() is None
    with open_scope("outer") as outer:
        with open_scope("inner", "a1") as inner:
            assert current_scope() is inner
            assert (inner.rollout_id, inner.attempt_id) == ("inner", "a1")
        assert current_scope() is outer
    assert current_scope() is None
    assert outer.closed


def test_rollouts_without_an_id_get_different_ones():
    with open_scope() as one, open_scope() as other:
        assert one.rollout_id != other.rollout_id


async def test_tasks_and_to_thread_of_a_rollout_share_its_scope_and_two_rollouts_never_do():
    async def rollout(name):
        with open_scope(name) as scope:
            inside = await asyncio.gather(
                asyncio.create_task(_scope_soon()), asyncio.to_thread(current_scope), _scope_soon()
            )
            assert all(found is scope for found in inside)
            return scope

    one, other = await asyncio.gather(rollout("one"), rollout("other"))
    assert one is not other


async def _scope_soon():
    await asyncio.sleep(0)
    return current_scope()


def test_a_scope_that_leaks_out_of_its_rollout_is_no_longer_current():
    seen = []
    started, finish = threading.Event(), threading.Event()

    async def leak():
        with open_scope("r"):
            task = asyncio.create_task(_late(started, seen))
        finish.set()
        await task

    asyncio.run(leak())
    assert seen == [None]


async def _late(started, seen):
    await asyncio.sleep(0.01)
    seen.append(current_scope())


def test_counts_follow_the_events():
    scope = RolloutScope("r")
    assert [scope.begin_call(), scope.begin_call()] == [1, 2]
    for event in (counted(5), counted(9), counted(7), ANSWERED):
        scope.record(event)
    scope.record(
        Compacted(
            **IDS, tokens_before=9, tokens_after=5, dropped=1, altered=1, strategies=(), reason="high_mark"
        )
    )
    scope.record(
        Refused(
            **IDS, refusal="prompt_too_long", status=400, prompt_tokens=9, limit=8, learnt=True, evidence="x"
        )
    )
    calls = scope.calls
    assert (calls.tried, calls.ok, calls.compacted, calls.refused, calls.peak_prompt_tokens) == (
        2,
        1,
        1,
        1,
        9,
    )


def test_the_first_failure_is_latched_and_later_answers_are_noted():
    scope = RolloutScope("r")
    first = ContextOverflowError("first")
    scope.latch(first)
    scope.record(ANSWERED)
    assert scope.failure is first
    assert scope.answered_after_failure
    scope.latch(ContextOverflowError("second"))
    assert scope.failure is first
    assert not scope.answered_after_failure
    assert scope.calls.overflow == 2


def test_counting_is_safe_between_threads():
    scope = RolloutScope("r")
    threads = [threading.Thread(target=lambda: [scope.begin_call() for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scope.calls.tried == 4_000


@pytest.mark.parametrize(
    ("url", "ids", "identity"),
    [
        ("http://h:1/rollout/r-1/attempt/a-2/v1", ("r-1", "a-2"), "http://h:1/v1"),
        ("http://h:1/rollout/r-1/v1/", ("r-1", None), "http://h:1/v1"),
        ("http://h:1/v1/", None, "http://h:1/v1"),
    ],
)
def test_a_servers_identity_ignores_the_rollout_in_its_url(url, ids, identity):
    assert ids_from_url(url) == ids
    assert server_identity(url) == identity
