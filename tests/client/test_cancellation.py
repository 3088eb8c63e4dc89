"""Cancellation passes through at every effect, and leaves nothing half-done."""

from __future__ import annotations

import asyncio

import openai
import pytest

from ctxguard import ContextBudget, Guard, SummarizeOldTurns
from ctxguard.testing import ScriptedModel, WindowedServer
from tests.doubles import WordCounter, agent_history, user

WINDOW = 1_000


def slow_server():
    model = ScriptedModel(lambda messages, tools: "ok")
    return WindowedServer(WordCounter(), window=WINDOW, model=model, delay_seconds=1.5)


async def cancel_soon(guard, server, messages):
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0)
    task = asyncio.create_task(guard.wrap(client).chat.completions.create(model="m", messages=messages))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.close()


async def test_a_cancelled_call_is_no_failure_of_its_rollout():
    guard = Guard(ContextBudget(window=WINDOW, max_response_tokens=100), counter=WordCounter())
    with slow_server() as server, guard.scope("r") as scope:
        await cancel_soon(guard, server, [user("hi")])
        assert scope.failure is None
        assert (scope.calls.tried, scope.calls.ok) == (1, 0)


async def test_a_call_cancelled_in_the_middle_of_a_summary_sends_nothing_more():
    guard = Guard(
        ContextBudget(window=WINDOW, max_response_tokens=100),
        counter=WordCounter(),
        strategies=[SummarizeOldTurns(max_summary_tokens=50)],
    )
    with slow_server() as server:
        await cancel_soon(guard, server, agent_history(9))
        assert len(server.requests) == 1  # the summary's; the call itself was never sent
        assert len(guard.ledger) <= 9


async def test_a_timeout_around_a_call_works_as_without_the_guard():
    guard = Guard(ContextBudget(window=WINDOW), counter=WordCounter())
    with slow_server() as server:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0)
        guarded = guard.wrap(client)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(guarded.chat.completions.create(model="m", messages=[user("hi")]), 0.3)
        await client.close()
