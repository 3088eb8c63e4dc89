"""Everyday habits of agents must not make the guard compact more often, nor differently.

Each habit is driven for 60 turns through a wrapped client against a server that knows its window.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from ctxguard import ChatTemplateCounter, ContextBudget, Guard
from ctxguard.messages import text_of, tool_calls_of
from ctxguard.testing import ScriptedModel, WindowedServer
from tests.conversations import DIRT, TOOLS

TURNS = 60
WINDOW = 8_192
BUDGET = ContextBudget(window=WINDOW, max_response_tokens=1_024)
TASK = [
    {"role": "system", "content": "You are a careful agent."},
    {"role": "user", "content": "Find the bug."},
]
NOTE = "\n[steps left: {}]"

History = list[dict[str, Any]]


def turn(number: int, *, reasoning: bool = False) -> History:
    """One turn of a tool agent: about 600 tokens of result; every fifth has parallel calls."""
    chance = random.Random(number)
    ids = [f"call-{number}-{i}" for i in range(2 if number % 5 == 0 else 1)]
    arguments = [
        json.dumps({"path": f"src/module_{number}.py", "first_line": i * 10}) for i, _ in enumerate(ids)
    ]
    calls = [
        {"id": i, "type": "function", "function": {"name": "read", "arguments": a}}
        for i, a in zip(ids, arguments, strict=True)
    ]
    said: dict[str, Any] = {"role": "assistant", "content": f"I read module {number}.", "tool_calls": calls}
    if reasoning:
        said["reasoning_content"] = f"I should look at module {number}. " * chance.randint(2, 12)
    results = [
        {
            "role": "tool",
            "tool_call_id": i,
            "content": "\n".join(f"{n:4} {chance.choice(DIRT)} {chance.random()}" for n in range(22)),
        }
        for i in ids
    ]
    return [said, *results]


# A habit makes of the agent's own history what it sends on call ``n``.
Habit = Callable[[History, int], History]


def plain(history: History, n: int) -> History:
    return history


def dumps_with_none_fields(history: History, n: int) -> History:
    return [
        ChatCompletionMessage.model_validate(m).model_dump() if m["role"] == "assistant" else m
        for m in history
    ]


def redumps_arguments(history: History, n: int) -> History:
    def redump(call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.loads(call["function"]["arguments"])
        spelled = json.dumps(arguments, indent=n % 3 or None, sort_keys=n % 2 == 0)
        return {**call, "function": {**call["function"], "arguments": spelled}}

    return [
        {**m, "tool_calls": [redump(c) for c in m["tool_calls"]]} if "tool_calls" in m else m for m in history
    ]


def drops_old_reasoning(history: History, n: int) -> History:
    newest = max(i for i, m in enumerate(history) if m["role"] in ("assistant", "user"))
    return [
        m if i >= newest else {k: v for k, v in m.items() if k != "reasoning_content"}
        for i, m in enumerate(history)
    ]


def clock_in_system_prompt(history: History, n: int) -> History:
    clock = f"You are a careful agent. It is 2026-12-01 {n // 6:02}:{n % 60:02}:{(n * 7) % 60}."
    return [{"role": "system", "content": clock}, *history[1:]]


def note_in_last_message(history: History, n: int) -> History:
    last = history[-1]
    return [*history[:-1], {**last, "content": last["content"] + NOTE.format(TURNS - n)}]


def moving_cache_control(history: History, n: int) -> History:
    last = history[-1]
    part = {"type": "text", "text": last["content"], "cache_control": {"type": "ephemeral"}}
    return [*history[:-1], {**last, "content": [part]}]


def ephemeral_last_message(history: History, n: int) -> History:
    return [*history, {"role": "user", "content": f"Reminder: {TURNS - n} steps left, answer in time."}]


def trims_its_own_history(history: History, n: int) -> History:
    starts = [i for i, m in enumerate(history) if m["role"] == "assistant"]
    return history if len(starts) <= 20 else [*history[:2], *history[starts[-20] :]]


HABITS: dict[str, Habit] = {
    "plain": plain,
    "model_dump with None fields": dumps_with_none_fields,
    "arguments re-dumped": redumps_arguments,
    "old reasoning dropped": drops_old_reasoning,
    "a clock in the system prompt": clock_in_system_prompt,
    "a note inside the last message": note_in_last_message,
    "a moving cache_control": moving_cache_control,
    "an ephemeral last message": ephemeral_last_message,
    "the agent trims its own history": trims_its_own_history,
}


@dataclass
class Run:
    """What a driven agent sent: the views, and how often one did not extend the former."""

    views: list[list[Any]] = field(default_factory=list)
    compactions: int = 0

    def note(self, sent: list[Any]) -> None:
        view = [_gist(m) for m in sent if m["role"] != "system" and not text_of(m).startswith("Reminder:")]
        former = self._last if self.views else []
        self.compactions += view[: len(former)] != former
        self._last = view
        self.views.append(sent)


def _gist(message: dict[str, Any]) -> Any:
    """What a message says, without what a habit changes about its spelling."""
    calls = [json.loads(call["function"]["arguments"]) for call in tool_calls_of(message)]
    return (message["role"], text_of(message).split(NOTE[:13])[0], calls)


@pytest.fixture(scope="module")
def counter(qwen3_folder):
    return ChatTemplateCounter.from_folder(qwen3_folder)


@pytest.fixture(scope="module")
def server(counter):
    with WindowedServer(counter, window=WINDOW, model=ScriptedModel(lambda messages, tools: "ok")) as server:
        yield server


@pytest.fixture
def guarded(counter, server) -> Iterator[tuple[Guard, openai.OpenAI]]:
    guard = Guard(BUDGET, counter=counter)
    client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
    yield guard, guard.wrap(client)
    client.close()


def send(client: openai.OpenAI, server: WindowedServer, messages: History) -> list[Any]:
    """One call; returns what arrived at the server."""
    client.chat.completions.create(model="m", messages=messages, tools=TOOLS)  # type: ignore[arg-type]
    sent: list[Any] = server.requests[-1]["messages"]
    return sent


def drive(
    habit: Habit,
    guard: Guard,
    client: Any,
    server: WindowedServer,
    *,
    reasoning: bool = False,
    forget: bool = False,
) -> Run:
    run, history, chance = Run(), list(TASK), random.Random(5)
    for number in range(TURNS):
        if forget and chance.random() < 0.1:
            guard.ledger.forget()
        run.note(send(client, server, habit(history, number)))
        history += turn(number, reasoning=reasoning)
    return run


def _needs_reasoning(name: str) -> bool:
    return name == "old reasoning dropped"


@pytest.fixture(scope="module")
def plain_compactions(counter, server):
    counts = {}
    for reasoning in (False, True):
        client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
        guard = Guard(BUDGET, counter=counter)
        counts[reasoning] = drive(plain, guard, guard.wrap(client), server, reasoning=reasoning).compactions
        client.close()
    return counts


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_does_not_make_the_guard_compact_more_often(
    name, guarded, server, plain_compactions, record_property
):
    guard, client = guarded
    reasoning = _needs_reasoning(name)
    run = drive(HABITS[name], guard, client, server, reasoning=reasoning)
    record_property("compactions", run.compactions)
    record_property("plain", plain_compactions[reasoning])
    assert plain_compactions[reasoning] >= 5
    if name == "the agent trims its own history":
        return  # every call begins anew: the views stay correct, the figure is reported
    assert run.compactions <= plain_compactions[reasoning] * 1.25


@pytest.mark.parametrize("name", HABITS)
def test_dropping_the_ledger_at_random_calls_changes_no_view(name, guarded, counter, server):
    _, client = guarded
    reasoning = _needs_reasoning(name)
    kept = drive(HABITS[name], guarded[0], client, server, reasoning=reasoning)
    forgetful = Guard(BUDGET, counter=counter)
    plain_client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
    lost = drive(
        HABITS[name], forgetful, forgetful.wrap(plain_client), server, reasoning=reasoning, forget=True
    )
    plain_client.close()
    assert lost.views == kept.views


def test_going_on_from_the_compacted_list_compacts_no_more_often(guarded, server, plain_compactions):
    _, client = guarded
    run, history = Run(), list(TASK)
    for number in range(TURNS):
        sent = send(client, server, history)
        run.note(sent)
        history = [*sent, *turn(number)]
    assert run.compactions <= plain_compactions[False] * 1.25
    assert all(text_of(m).count("cut to fit the context window") <= 1 for view in run.views for m in view)


def test_two_branches_from_one_prefix_do_not_disturb_each_other(guarded, server, plain_compactions):
    _, client = guarded
    trunk = list(TASK)
    for number in range(TURNS // 2):
        send(client, server, trunk)
        trunk += turn(number)
    runs, branches = (Run(), Run()), (list(trunk), list(trunk))
    for number in range(TURNS // 2, TURNS):
        for i, branch in enumerate(branches):
            runs[i].note(send(client, server, branch))
            branch += turn(number + 1_000 * i)
    for run in runs:
        assert run.compactions <= plain_compactions[False] * 1.25 / 2 + 1
