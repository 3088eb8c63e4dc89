"""How an agent writes tool calls and their results into its history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from examples.demo.tools import TOOLS, ToolCall

Message = dict[str, Any]

Form = Literal["native", "parallel", "reminder", "text"]
"""``native``: ``tool_calls`` and the role ``tool``. ``parallel``: the same, several calls in one message.
``reminder``: a reminder ends every prompt and is gone in the next. ``text``: no tools in the request; calls
and results are tagged text in assistant and user messages (Hermes, Qwen-Agent)."""

SYSTEM = (
    "You answer questions about the source code of Python's standard library. Look things up with your "
    "tools before you answer; never guess. Say where you found what you report, as path and line."
)
REMINDER = "Reminder: one step at a time. Stop as soon as everything is found."


def system_message(form: Form) -> Message:
    """The system message; in text form it describes the tools."""
    if form != "text":
        return {"role": "system", "content": SYSTEM}
    schemas = "\n".join(json.dumps(tool) for tool in TOOLS)
    how = (
        f"You may call these tools:\n<tools>\n{schemas}\n</tools>\nWrite each call as "
        '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
    )
    return {"role": "system", "content": f"{SYSTEM}\n\n{how}"}


def request_tools(form: Form) -> list[dict[str, Any]] | None:
    """What goes into the request's ``tools``, None for nothing."""
    return None if form == "text" else TOOLS


def turn(form: Form, number: int, calls: Sequence[ToolCall], results: Sequence[str]) -> list[Message]:
    """The messages of one step: the calls, and what the tools answered."""
    if form == "text":
        called = "\n".join(f"<tool_call>\n{_call_json(call)}\n</tool_call>" for call in calls)
        answered = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
        return [{"role": "assistant", "content": called}, {"role": "user", "content": answered}]
    ids = [f"call_{number}_{position}" for position in range(len(calls))]
    tool_calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call_id, call in zip(ids, calls, strict=True)
    ]
    assistant: Message = {"role": "assistant", "content": None, "tool_calls": tool_calls}
    answers = zip(ids, results, strict=True)
    return [assistant, *({"role": "tool", "tool_call_id": i, "content": text} for i, text in answers)]


def _call_json(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments})
