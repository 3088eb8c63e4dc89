"""The agent of the report: it retries a refused prompt for a while, then gives up with the server's error."""

from __future__ import annotations

import time
from typing import Any

import agentlightning
import openai


class SeedAgent(agentlightning.LitAgent):  # type: ignore[misc]
    """One call per rollout, its prompt ``words`` long. Its triplets have ids of the served lengths.

    A task says: ``words``; ``tries`` and ``pause``: how often it sends a refused prompt, and the seconds
    between; ``think``: seconds before it returns; ``reward``.
    """

    def training_rollout(self, task: dict[str, Any], rollout_id: str, resources: Any) -> list[Any]:
        llm = resources["main_llm"]
        client = openai.OpenAI(base_url=llm.endpoint, api_key="none", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "word " * int(task["words"])}]
        for left in reversed(range(int(task["tries"]))):
            try:
                answer = client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)
                break
            except openai.BadRequestError:
                if not left:
                    raise
                time.sleep(float(task["pause"]))
        time.sleep(float(task["think"]))
        assert answer.usage is not None
        return [
            agentlightning.Triplet(
                prompt={"token_ids": list(range(answer.usage.prompt_tokens))},
                response={"token_ids": list(range(answer.usage.completion_tokens))},
                reward=float(task["reward"]),
            )
        ]
