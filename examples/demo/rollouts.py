"""The same agents twice: unguarded with a plain client, and guarded. And what is noted of each rollout."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import openai

from ctxguard import Failure, Guard, RolloutOutcome, TokenCounter, guarded_rollout
from ctxguard.events import Answered, Event
from examples.demo.agent import Agent
from examples.demo.tasks import Task
from examples.demo.tools import SourceTree


@dataclass
class Row:
    """What is noted of one rollout; a row of the table.

    Attributes:
        task: name of its task.
        form: how it writes tool calls.
        fits: whether its task leaves room for work in the window.
        calls: calls of the model that the agent made.
        refusals: requests that the server refused for their length.
        compactions: calls for which the history was compacted.
        history_tokens: the agent's whole history at the end, as a prompt.
        peak_prompt_tokens: the largest prompt that was sent.
        differences: predicted minus served prompt tokens, for each request for which the server told them.
        outcome: how it ended, for people.
        status: ``"succeeded"``, ``"failed"``, or ``"no result"``: what the trainer would get to know.
        reason: why it failed.
        reward: its reward, None without one.
    """

    task: str
    form: str
    fits: bool
    calls: int = 0
    refusals: int = 0
    compactions: int = 0
    history_tokens: int = 0
    peak_prompt_tokens: int = 0
    differences: list[int] = field(default_factory=list)
    outcome: str = ""
    status: str = "no result"
    reason: str | None = None
    reward: float | None = None

    @classmethod
    def of(cls, task: Task) -> Row:
        """A row to begin with."""
        return cls(task.name, task.form, task.fits)


class Watcher(Protocol):
    """Who wants to see how it goes."""

    def step(self, task: str, prompt_tokens: int) -> None:
        """An agent got an answer."""

    def end(self, row: Row) -> None:
        """A rollout has ended."""


@dataclass(frozen=True)
class Runner:
    """Runs all tasks at once.

    Attributes:
        client: a plain client of the server.
        model: the served model's name.
        tree: what the agents look into.
        tasks: one for each rollout.
        counter: counts prompts as the server does.
        watcher: is told of every step.
    """

    client: openai.AsyncOpenAI
    model: str
    tree: SourceTree
    tasks: Sequence[Task]
    counter: TokenCounter
    watcher: Watcher

    async def unguarded(self) -> list[Row]:
        """Plain client, plain agents: the first refusal ends the rollout, and nothing is left of it."""
        return list(await asyncio.gather(*(self._unguarded(task) for task in self.tasks)))

    async def _unguarded(self, task: Task) -> Row:
        row = Row.of(task)

        def note(served: int) -> None:
            row.calls += 1
            row.peak_prompt_tokens = max(row.peak_prompt_tokens, served)
            row.differences.append(self._count(agent) - served)

        def on_answer(agent: Agent, served: int) -> None:
            note(served)
            self.watcher.step(task.name, served)

        agent = Agent(self.client, self.model, self.tree, task, on_answer)
        try:
            row.reward = await agent.run()
        except openai.BadRequestError as refusal:
            note(_refused_tokens(refusal))
            row.refusals, row.reason = 1, "refused"
            row.outcome = f"no result: {refusal.status_code} at call {row.calls}"
        else:
            row.status, row.outcome = "succeeded", f"reward {row.reward:.2f}"
        row.history_tokens = self._count(agent)
        self.watcher.end(row)
        return row

    async def guarded(self) -> list[Row]:
        """The same agents with one guard: it asks the server for the window and fits every call into it."""
        answered: dict[str | None, list[Answered]] = defaultdict(list)

        def on_event(event: Event) -> None:
            if isinstance(event, Answered):
                answered[event.rollout_id].append(event)

        guard = Guard(counter=self.counter, on_event=on_event)
        client = guard.wrap(self.client)

        @guarded_rollout(rollout_id=lambda agent: agent.task.name)
        async def rollout(agent: Agent) -> float:
            return await agent.run()

        async def run(task: Task) -> Row:
            agent = Agent(
                client, self.model, self.tree, task, lambda _, served: self.watcher.step(task.name, served)
            )
            row = self._guarded_row(agent, await rollout(agent), answered[task.name])
            self.watcher.end(row)
            return row

        return list(await asyncio.gather(*(run(task) for task in self.tasks)))

    def _guarded_row(self, agent: Agent, outcome: RolloutOutcome, answered: Sequence[Answered]) -> Row:
        row = Row.of(agent.task)
        row.calls, row.refusals = outcome.calls.tried, outcome.calls.refused
        row.compactions = outcome.calls.compacted
        row.history_tokens = self._count(agent)
        row.peak_prompt_tokens = outcome.calls.peak_prompt_tokens
        row.differences = [event.predicted_tokens - (event.served_tokens or 0) for event in answered]
        row.status, row.reward = outcome.status, outcome.reward
        if outcome.failure is None:
            row.outcome = f"reward {outcome.reward:.2f}"
        else:
            row.reason = outcome.failure.reason.value
            row.outcome = f"failed: {row.reason}, {_figures(outcome.failure)}"
        return row

    def _count(self, agent: Agent) -> int:
        request = agent.request
        return self.counter.count(request["messages"], tools=request.get("tools"))


def _refused_tokens(refusal: openai.BadRequestError) -> int:
    """The size of the prompt that llama.cpp refused: it tells, so this is one more count to compare with."""
    body = refusal.body
    tokens = body.get("n_prompt_tokens") if isinstance(body, dict) else None
    if not isinstance(tokens, int):
        raise refusal  # refused for another reason than its length
    return tokens


def _figures(failure: Failure) -> str:
    """The figures of a failure in few words."""
    numbers = failure.numbers
    if {"prompt_tokens", "limit"} <= numbers.keys():
        return f"{numbers['prompt_tokens']:,} tokens, limit {numbers['limit']:,}"
    return failure.detail[:60]
