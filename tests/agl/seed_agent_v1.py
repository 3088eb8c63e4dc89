"""The report's agent in v1 mode: its prompt grows turn by turn until the server refuses it."""

from __future__ import annotations

import os
import time
from typing import Any

import agentlightning as agl
import openai


@agl.rollout
def agent(task: dict[str, Any], llm: agl.LLM) -> float:
    """One call per turn; each prompt is ``grow`` words longer than the one before.

    A task says: ``turns``; ``words`` of the first prompt; ``grow``; ``reward``; ``ends``: "well", or what
    happens instead after the last turn: "crash" (an error of its own), "exit" (its process dies), "hang".
    """
    client = openai.OpenAI(base_url=llm.endpoint, api_key="none", max_retries=0)
    for turn in range(int(task["turns"])):
        content = "word " * (int(task["words"]) + turn * int(task["grow"]))
        client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": content}], max_tokens=4
        )
    if task["ends"] == "crash":
        raise LookupError("the tool fell over")
    if task["ends"] == "exit":
        os._exit(1)
    if task["ends"] == "hang":
        time.sleep(3600)
    return float(task["reward"])
