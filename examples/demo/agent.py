"""The agent loop: an ordinary one. It takes an OpenAI client and knows nothing of ctxguard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import openai

from examples.demo.forms import REMINDER, Message, request_tools, system_message, turn
from examples.demo.tasks import Task
from examples.demo.tools import SourceTree

MAX_TOKENS = 16
"""Output limit of every request. The model's text is noise, so little of it will do."""


@dataclass
class Agent:
    """One agent at one task.

    Attributes:
        client: the client that it calls; guarded or not makes no difference here.
        model: the model's name.
        tree: what its tools look into.
        task: its task.
        on_answer: called after each answer with the agent and the answer's ``usage.prompt_tokens``.
        history: the whole conversation; sent on every call, it only ever grows.
    """

    client: openai.AsyncOpenAI
    model: str
    tree: SourceTree
    task: Task
    on_answer: Callable[[Agent, int], None]
    history: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = [system_message(self.task.form), {"role": "user", "content": self.task.question}]

    async def run(self) -> float:
        """Work until the script ends; returns the reward, computed from what the tools found."""
        script = self.task.script()
        calls = next(script)
        for number in range(1, 1_000):
            await self._ask_model()  # would choose the calls, if its weights were not random
            results = [self.tree.run(call) for call in calls]
            self.history += turn(self.task.form, number, calls, results)
            try:
                calls = script.send(results)
            except StopIteration as end:
                await self._ask_model()  # would write the final answer
                reward: float = end.value
                return reward
        raise RuntimeError("the script does not end")

    @property
    def request(self) -> dict[str, Any]:
        """Messages and tools of the next request."""
        messages = list(self.history)
        if self.task.form == "reminder":
            messages.append({"role": "user", "content": REMINDER})
        tools = request_tools(self.task.form)
        return {"messages": messages} if tools is None else {"messages": messages, "tools": tools}

    async def _ask_model(self) -> None:
        answer = await self.client.chat.completions.create(
            model=self.model, max_tokens=MAX_TOKENS, temperature=0, **self.request
        )
        self.on_answer(self, answer.usage.prompt_tokens if answer.usage else 0)
