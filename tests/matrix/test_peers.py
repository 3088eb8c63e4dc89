"""What the libraries above the OpenAI SDK make of our overflow error, and that they are guarded at all.

Run by `make test-matrix`, in an environment that has them.
"""

from __future__ import annotations

from typing import Any

import litellm
import openai
import pytest
from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

from ctxguard import ContextBudget, FailureReason, Guard, guarded_rollout
from ctxguard.client.openai import OpenAIContextOverflowError
from ctxguard.testing import ScriptedModel, WindowedServer
from tests.doubles import WordCounter, agent_history, user, words

WINDOW = 1_000
TOO_LONG = words(2_000)


@pytest.fixture
def server():
    with WindowedServer(
        WordCounter(), window=WINDOW, model=ScriptedModel(lambda messages, tools: "ok")
    ) as server:
        yield server


@pytest.fixture
def guarded(server):
    guard = Guard(ContextBudget(window=WINDOW, max_response_tokens=100), counter=WordCounter())
    options: dict[str, Any] = {"base_url": server.base_url, "api_key": "k", "max_retries": 0}
    client = openai.OpenAI(**options)
    yield guard.wrap(client), guard.wrap(openai.AsyncOpenAI(**options))
    client.close()


def test_litellm_makes_its_own_overflow_error_of_ours(guarded, server):
    client, _ = guarded
    answer = litellm.completion(model="openai/m", messages=agent_history(30), client=client)
    assert answer.choices[0].message.content == "ok"
    assert WordCounter().count(server.requests[0]["messages"]) <= 900
    with pytest.raises(litellm.ContextWindowExceededError) as caught:
        litellm.completion(model="openai/m", messages=[user(TOO_LONG)], client=client)
    assert caught.value.status_code == 400
    assert len(server.requests) == 1  # not retried as a server error


def test_langchain_makes_its_own_overflow_error_of_ours(guarded, server):
    client, aclient = guarded
    model = ChatOpenAI(
        model="m",
        api_key="k",
        max_retries=0,
        client=client.chat.completions,
        async_client=aclient.chat.completions,
    )
    assert model.invoke([("user", "hi")]).content == "ok"
    with pytest.raises(ContextOverflowError):
        model.invoke([("user", TOO_LONG)])
    assert len(server.requests) == 1


async def test_the_agents_sdk_hands_our_error_through(guarded, server):
    set_tracing_disabled(True)
    _, aclient = guarded
    agent = Agent(name="a", model=OpenAIChatCompletionsModel(model="m", openai_client=aclient))
    assert (await Runner.run(agent, "hi")).final_output == "ok"
    with pytest.raises(OpenAIContextOverflowError):
        await Runner.run(agent, TOO_LONG)
    await aclient.close()
    assert len(server.requests) == 1


def test_a_rollout_that_ends_in_a_librarys_own_overflow_error_is_a_context_overflow(guarded):
    client, _ = guarded

    @guarded_rollout
    def rollout() -> float:
        litellm.completion(model="openai/m", messages=[user(TOO_LONG)], client=client)
        return 1.0

    outcome = rollout()
    assert outcome.failure.reason is FailureReason.CONTEXT_OVERFLOW
    assert outcome.failure.numbers["limit"] == 900
