"""The points of a history at which an agent called the model, and what of it is there to stay.

A compaction must not depend on what an agent adds for one call and takes away again: reminders behind tool
results, the reasoning of the newest turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctxguard.messages import Message, is_text_result, lead_length, reasoning_of, without_reasoning
from ctxguard.messages.turns import RESULT_ROLES


def call_points(messages: Sequence[Message]) -> list[int]:
    """Lengths of the history at which an agent called the model, ascending; the last is this call.

    That is before each assistant message, and at the end. User and system messages that stand behind
    tool results (reminders) are not counted in: agents add them for one call and take them away again.
    """
    lead = lead_length(messages)
    calls = [i for i, m in enumerate(messages) if m.get("role") == "assistant" and i > lead]
    return sorted({_durable(messages, end) for end in (*calls, len(messages))})


def _durable(messages: Sequence[Message], end: int) -> int:
    shorter = end
    while shorter > 0 and messages[shorter - 1].get("role") in ("user", "system", "developer"):
        if is_text_result(messages[shorter - 1]):
            break
        shorter -= 1
    if shorter > 0 and _is_result(messages[shorter - 1]):
        return shorter
    return end


def _is_result(message: Message) -> bool:
    return message.get("role") in RESULT_ROLES or is_text_result(message)


def settled(history: Sequence[Message]) -> Sequence[Message]:
    """The history as the next call will show it: without the newest reasoning, if the agent drops its own.

    An agent that kept the reasoning of no earlier turn will drop this one's too.
    """
    said = [i for i, message in enumerate(history) if message.get("role") == "assistant"]
    if not said or not reasoning_of(history[said[-1]]):
        return history
    if any(reasoning_of(history[i]) for i in said[:-1]):
        return history
    newest = said[-1]
    return [*history[:newest], without_reasoning(history[newest]), *history[newest + 1 :]]
