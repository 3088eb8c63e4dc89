"""Agents whose calls are compacted, summarised or refused; test_tracing.py looks at what the tracers saw."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import agentlightning as agl
import openai

from ctxguard import ContextBudget, DropOldestTurns, Guard, SummarizeOldTurns
from ctxguard.effects import Flow, ModelCall
from ctxguard.integrations.agentlightning import (
    guarded_async_client,
    guarded_client,
    mark_failures,
    record_sent,
    request_defaults,
)

WINDOW = 2048
MAX_TOKENS = 8
REPORTS = os.environ["CTXGUARD_REPORTS"]
"""File to which each call's sent messages are written, one JSON object a line."""


class Summarize(SummarizeOldTurns):
    """Takes any summary of the tiny model, whose text is noise that ends at its output limit."""

    def _ask(self, transcript: str, context: Any) -> Flow[str | None]:
        answer = yield ModelCall(
            [{"role": "user", "content": transcript}], self.max_summary_tokens, self.model
        )
        return f"notes: {len(answer.text)} characters of noise"


as_rollout = getattr(agl, "rollout", lambda function: function)  # 0.1.2 has none


def guard(task: dict[str, Any]) -> Guard:
    """A guard for one rollout, so that no rollout finds the summaries of another."""

    def note(report: Any) -> None:
        with open(REPORTS, "a") as file:
            sent = [dict(message) for message in report.sent]
            file.write(json.dumps({"task": task["id"], "path": report.path, "sent": sent}) + "\n")
        if task.get("record"):
            record_sent(report)

    strategies = [Summarize(max_summary_tokens=16), DropOldestTurns()] if task["do"] == "summarize" else None
    return Guard(
        ContextBudget(window=WINDOW, max_response_tokens=64),
        tokenizer=os.environ["CTXGUARD_TOKENIZER"],
        strategies=strategies,
        on_report=note,
    )


def turns(task: dict[str, Any]) -> list[list[Any]]:
    """The history before each call; that of a compacted rollout outgrows the window at the last call."""
    if task["do"] == "refuse":
        return [user("hello"), user("word " * 5_000)]
    history = user(f"task {task['id']}")
    histories = [list(history)]
    pages, words = (6, 160) if task["do"] == "summarize" else (2, 500)  # two tokens each
    for number in range(pages):
        history += [{"role": "assistant", "content": f"looked at page {number}"}, *user(f"{number} " * words)]
        histories.append(list(history))
    return histories


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@as_rollout
@mark_failures(accept_after_recovery=True)
def agent(task, llm, rollout):
    with guarded_client(llm, guard=guard(task)) as client:
        for messages in turns(task):
            with contextlib.suppress(openai.BadRequestError):
                client.chat.completions.create(
                    **request_defaults(llm), messages=messages, max_tokens=MAX_TOKENS
                )
        if task["do"] == "refuse":
            client.chat.completions.create(
                **request_defaults(llm), messages=user("ok"), max_tokens=MAX_TOKENS
            )
    return 1.0


@as_rollout
@mark_failures(accept_after_recovery=True)
async def async_agent(task, llm, rollout):
    async with guarded_async_client(llm, guard=guard(task)) as client:
        for messages in [*turns(task), *([user("ok")] if task["do"] == "refuse" else [])]:
            with contextlib.suppress(openai.BadRequestError):
                await client.chat.completions.create(
                    **request_defaults(llm), messages=messages, max_tokens=MAX_TOKENS
                )
    return 1.0


class Agent(agl.LitAgent):
    """v0 mode, which gives resources and rollout by name, and 0.1.2, which gives id and resources by place."""

    @mark_failures(accept_after_recovery=True)
    def training_rollout(self, task, rollout_id=None, resources=None, rollout=None):
        with guarded_client(resources, guard=guard(task)) as client:
            for messages in turns(task):
                client.chat.completions.create(
                    **request_defaults(resources),
                    messages=messages,
                    max_tokens=MAX_TOKENS,
                    extra_body={"return_token_ids": True},  # 0.1.2's tracer stumbles over a None
                )
        return 1.0
