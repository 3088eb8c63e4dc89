"""Agents under `mark_failures`; their task says how the rollout goes. For the runners of test_agent_side.py.

Works on 0.3 and on 0.1.2: there, only `Agent012` is used.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import agentlightning as agl
import openai

from ctxguard import ContextBudget, Guard
from ctxguard.integrations.agentlightning import (
    guarded_async_client,
    guarded_client,
    mark_failures,
    request_defaults,
    use_guard,
)

WINDOW = 2048
use_guard(
    Guard(
        ContextBudget(window=WINDOW, max_response_tokens=64),
        tokenizer=os.environ["CTXGUARD_TOKENIZER"],
        dialect="llama.cpp",
    )
)


class MyError(Exception):
    """An error of the agent's own."""


def messages(task: dict[str, Any], words: int = 8) -> list[Any]:
    return [{"role": "user", "content": "word " * words}]


def finish(task: dict[str, Any]) -> Any:
    if task["do"] == "raise":
        raise MyError("the tool broke")
    if task["do"] == "emit":
        agl.emit_reward(0.75)
    return None if task["do"] in ("none", "emit") else 1


def work(task: dict[str, Any], client: openai.OpenAI, options: dict[str, Any]) -> Any:
    """The agent's loop: one good call, and then what the task says."""
    if task["do"] == "no call":
        return 1.0
    client.chat.completions.create(**options, messages=messages(task), max_tokens=4)
    if task["do"] in ("overflow", "swallow"):
        try:
            client.chat.completions.create(**options, messages=messages(task, 5_000), max_tokens=4)
        except openai.BadRequestError:
            if task["do"] == "overflow":
                raise
    return finish(task)


@agl.rollout if hasattr(agl, "rollout") else lambda function: function
@mark_failures
def function_agent(task, llm):
    return work(task, guarded_client(llm), request_defaults(llm))


@agl.rollout if hasattr(agl, "rollout") else lambda function: function
@mark_failures
async def async_agent(task, llm, rollout):
    async with guarded_async_client(llm) as client:
        await asyncio.sleep(0)
        if task["do"] == "no call":
            return 1.0
        for words in (8, *([5_000] if task["do"] in ("overflow", "swallow") else [])):
            try:
                await client.chat.completions.create(
                    **request_defaults(llm), messages=messages(task, words), max_tokens=4
                )
            except openai.BadRequestError:
                if task["do"] == "overflow":
                    raise
    return finish(task)


@mark_failures
class Agent(agl.LitAgent):
    """0.3: a class with one method for both modes; the client is made from resources and rollout."""

    def rollout(self, task, resources, rollout):
        return work(task, guarded_client(resources, rollout), request_defaults(resources))


@mark_failures
class TwoModes(agl.LitAgent):
    """A class with a method for each mode, of which one calls the other; asynchronous."""

    async def training_rollout_async(self, task, resources, rollout):
        return await self.validation_rollout_async(task, resources, rollout)

    async def validation_rollout_async(self, task, resources, rollout):
        return work(task, guarded_client(resources, rollout), request_defaults(resources))


class Unmarked(agl.LitAgent):
    """The same agent without ctxguard, for comparison."""

    def rollout(self, task, resources, rollout):
        llm = resources["main_llm"]
        base_url = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        with openai.OpenAI(base_url=base_url, api_key="none") as client:
            return work(task, client, {"model": llm.model})


@mark_failures
class ReturnsTriplets(agl.LitAgent):
    """v0 mode: a list of triplets; the last one has the reward, or not."""

    def training_rollout(self, task, resources, rollout):
        client, options = guarded_client(resources), request_defaults(resources)
        client.chat.completions.create(**options, messages=messages(task), max_tokens=4)
        reward = {"triplets": 1.0, "rollout": None}.get(task["do"])
        triplets = [
            agl.Triplet(prompt={"token_ids": [1]}, response={"token_ids": [2]}, reward=r)
            for r in (None, reward)
        ]
        if task["do"] != "rollout":
            return triplets
        return agl.RolloutLegacy(rollout_id="x", final_reward=0.5, triplets=triplets)


class Agent012(agl.LitAgent):
    """0.1.2's signature; the methods are marked one by one."""

    @mark_failures
    def training_rollout(self, task, rollout_id, resources):
        return work(task, guarded_client(resources), request_defaults(resources))

    @mark_failures
    def validation_rollout(self, task, rollout_id, resources):
        return 1.0


class Async012(agl.LitAgent):
    """The same as a coroutine."""

    @mark_failures
    async def training_rollout_async(self, task, rollout_id, resources):
        return work(task, guarded_client(resources), request_defaults(resources))
