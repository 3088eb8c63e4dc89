"""An agent of Agent Lightning 1.0 that reads the log of a day, hour by hour: more than fits its model.

The controller starts it for each rollout, in a process or a Kubernetes job of its own, with the task in
``TASK`` and ``ANSWER``. ``TOKENIZER`` is the folder of the model's tokenizer. No Agent Lightning is needed.
"""

from __future__ import annotations

import json
import os
import random
import re
from typing import Any

from ctxguard.integrations.agentlightning_v1 import guarded_client, guarded_run

SYSTEM = "Read the log hour by hour. Say after each hour what you know so far. Answer with the hour's number."
HOUR = {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "read_log", "parameters": HOUR}}]


def read_log(arguments: str) -> str:
    """The tool: the requests of an hour. A model that is still learning asks for odd things."""
    try:
        hour = range(24)[json.loads(arguments)["hour"]]
    except (ValueError, TypeError, LookupError):
        return "error: give the hour, a number from 0 to 23"
    statuses = random.Random(hour).choices([200, 500], [9, 1], k=60)
    return "\n".join(f"{hour:02}:{n:02} GET /orders/{hour * 60 + n} {s}" for n, s in enumerate(statuses))


def find_hour(client: Any, question: str) -> str:
    """An ordinary tool loop, which sends its whole history every time; what the model says in the end."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(32):
        answer = client.chat.completions.create(model="auto", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            log = read_log(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": log})
    return ""


class LogReader:
    @guarded_run  # one outcome: the reward that is returned, or one event that says why it failed
    def run(self) -> float:
        client = guarded_client(tokenizer=os.environ.get("TOKENIZER"), response="enforce")
        said = find_hour(client, os.environ["TASK"])
        return float(re.findall(r"\d+", said)[-1:] == [os.environ["ANSWER"]])


if __name__ == "__main__":
    LogReader().run()
