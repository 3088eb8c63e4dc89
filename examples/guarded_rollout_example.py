"""End every rollout in exactly one outcome: a reward, or a failure with its reason and numbers.

``MODEL=Qwen/Qwen3-8B TOKENIZER=/models/Qwen3-8B python -m examples.guarded_rollout_example``
"""

from __future__ import annotations

import os
from typing import Any

from openai import OpenAI

from ctxguard import Guard, RolloutOutcome, guarded_rollout

PARAMETERS = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "read_page", "parameters": PARAMETERS}}]


def read_page(arguments: str) -> str:
    """The tool. A real one would look at its arguments."""
    return f"Page {arguments}: " + "It was a dark and stormy night. " * 100


@guarded_rollout
def rollout(client: OpenAI, task: str) -> float:
    """An ordinary tool agent; returns the reward."""
    messages: list[Any] = [{"role": "user", "content": task}]
    for _ in range(30):
        answer = client.chat.completions.create(
            model=os.environ["MODEL"], messages=messages, tools=TOOLS, max_tokens=256
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return 1.0 if "stormy" in (message.content or "") else 0.0
        for call in message.tool_calls:
            page = read_page(call.function.arguments if call.type == "function" else "")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": page})
    return 0.0


def main() -> list[RolloutOutcome]:
    """Two rollouts; the second one's task is longer than any window."""
    client = Guard(tokenizer=os.environ.get("TOKENIZER")).wrap(OpenAI())
    tasks = [
        "Read the book, page by page. What was the weather like?",
        "Summarize this: " + "blah " * 200_000,
    ]
    outcomes = [rollout(client, task) for task in tasks]
    for outcome in outcomes:
        if outcome.failure is None:
            print(f"{outcome.status}: reward {outcome.reward}, {outcome.calls.compacted} compactions")
        else:
            print(f"{outcome.status}: {outcome.failure.reason.value} {outcome.failure.numbers}")
    return outcomes


if __name__ == "__main__":
    main()
