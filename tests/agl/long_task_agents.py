"""The examples' agents with a small budget, and the same without ctxguard, run by one runner; for test_long_tasks.py."""

from __future__ import annotations

import os
from typing import Any

import agentlightning as agl
import openai

from ctxguard import ContextBudget, Guard
from ctxguard.integrations.agentlightning import record_sent, request_defaults, use_guard
from examples.agentlightning_litagent import LogReader, read_logs
from examples.agentlightning_rollout import finder, search

WINDOW, PROMPT = 2048, 1792
RESPONSE = WINDOW - PROMPT

# In place of the guard of the examples, whose window is larger.
use_guard(
    Guard(
        ContextBudget(window=WINDOW, max_prompt_tokens=PROMPT, max_response_tokens=RESPONSE),
        tokenizer=os.environ.get("TOKENIZER"),
        on_report=record_sent,
    )
)


class UnguardedLogReader(agl.LitAgent):
    def rollout(self, task: Any, resources: Any, rollout: Any) -> float:
        url = resources["main_llm"].get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)
        with openai.OpenAI(base_url=url, api_key="none") as client:
            return read_logs(client, request_defaults(resources), task)


@agl.rollout
async def unguarded_finder(task: Any, llm: agl.LLM) -> float:
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key="none") as client:
        return await search(client, request_defaults(llm), task)


AGENTS: dict[str, Any] = {
    "guarded reader": LogReader(),
    "unguarded reader": UnguardedLogReader(),
    "guarded finder": finder,
    "unguarded finder": unguarded_finder,
}


class ByTask(agl.LitAgent):
    """Runs the agent that the task names: a runner takes a while to start, and has one agent."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
        agent = AGENTS[task["agent"]]
        if agent.is_async():
            return await agent.rollout_async(task, resources, rollout)
        return agent.rollout(task, resources, rollout)
