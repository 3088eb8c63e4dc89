"""Typed calls of the public surface: read by the type checker (`make lint`), run by nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openai import AsyncOpenAI, OpenAI

from ctxguard import (
    ApproximateCounter,
    CapToolResults,
    CompactionStrategy,
    ContextBudget,
    Fit,
    FitReport,
    Guard,
    HistoryManager,
    RolloutOutcome,
    Turn,
    default_strategies,
    guarded_rollout,
    wrap_openai,
)
from ctxguard.compaction import CompactionContext
from ctxguard.events import Event


def on_event(event: Event) -> None: ...


def on_report(report: FitReport) -> None: ...


budget = ContextBudget(window=20_480, max_response_tokens=1_024)
guard = Guard(
    budget,
    tokenizer="models/m",
    dialect="llama.cpp",
    strategies=[CapToolResults(max_tokens=2_000, per_tool={"grep": 500}), *default_strategies()],
    mode="observe",
    response="enforce",
    pin=lambda turn: turn.kind == "user",
    pin_tools={"plan"},
    on_event=on_event,
    on_report=on_report,
)
client: OpenAI = guard.wrap(OpenAI())
aclient: AsyncOpenAI = wrap_openai(AsyncOpenAI(), 20_480, counter=ApproximateCounter())
fit: Fit = HistoryManager(ApproximateCounter(), budget).fit([{"role": "user", "content": "hi"}])

with guard.scope("r", "a") as scope, guard.using("off"):
    tried: int = scope.calls.tried


@guarded_rollout
def rollout(task: str) -> float:
    return 1.0


@guarded_rollout(rollout_id="r", require_calls=False)
async def arollout(task: str) -> float:
    return 1.0


outcome: RolloutOutcome = rollout("task")


async def run() -> RolloutOutcome:
    return await arollout("task")


@dataclass(frozen=True)
class Mine(CompactionStrategy):
    def compact(self, turns: Sequence[Turn], context: CompactionContext) -> Sequence[Turn]:
        return [turn for turn in turns if turn.pinned or turn.newest]
