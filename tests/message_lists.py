"""Message lists on which a local count must equal the server's: one of each thing that agents send."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tests.doubles import assistant, call, result, system, user


class MessageList(NamedTuple):
    """One request: its messages, its tools, and what it passes to the chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] | None = None


def tool(name: str, **function: Any) -> dict[str, Any]:
    """A tool schema."""
    return {"type": "function", "function": {"name": name, **function}}


PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = tool("read", description="Read a file.", parameters=PATH)
NESTED = tool(
    "search",
    description="Search — “quoted”, <tagged> & 中文.",
    parameters={
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for"},
            "filters": {
                "type": "array",
                "items": {"type": "object", "properties": {"key": {"type": "string"}, "value": {}}},
            },
            "limit": {"type": "integer", "minimum": 1, "default": 10},
            "exact": {"type": "boolean", "default": False},
        },
    },
)
TOOLS = [READ, NESTED]
ONE = [user("Fix it."), assistant(call("a", "read", '{"path": "x.py"}')), result("a", "print(1)")]
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "x.py"}}\n</tool_call>'
RESPONSE = "<tool_response>\nprint(1)\n</tool_response>"
NO_THINKING = {"enable_thinking": False}
IMAGELESS_PARTS = [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}]

LISTS: dict[str, MessageList] = {
    "a question": MessageList([user("hi")]),
    "system and question": MessageList([system("Be brief."), user("hi")]),
    "a chat": MessageList([user("hi"), assistant(content="Hello!"), user("bye")]),
    "tools": MessageList([system("s"), user("hi")], TOOLS),
    "tools without system": MessageList([user("hi")], TOOLS),
    "one call": MessageList(ONE, TOOLS),
    "a call beside text": MessageList(
        [user("u"), assistant(call("a", "read", '{"path": "x"}'), content="I look."), result("a", "1")], TOOLS
    ),
    "content None": MessageList([user("u"), assistant(call("a"), content=None), result("a", "1")], TOOLS),
    "content empty": MessageList([user("u"), assistant(call("a"), content=""), result("a", "")], TOOLS),
    "content missing": MessageList(
        [user("u"), {"role": "assistant", "tool_calls": [call("a")]}, result("a", "1")], TOOLS
    ),
    "content parts": MessageList([system("s"), user(IMAGELESS_PARTS)]),
    "tool result parts": MessageList([user("u"), assistant(call("a")), result("a", IMAGELESS_PARTS)], TOOLS),
    "one empty part": MessageList([user([{"type": "text", "text": ""}])]),
    "parallel calls": MessageList(
        [
            user("u"),
            assistant(call("a", "read", '{"path": "x"}'), call("b", "search", '{"query": "y"}')),
            result("a", "1"),
            result("b", "2"),
        ],
        TOOLS,
    ),
    "parallel calls answered in another order": MessageList(
        [
            user("u"),
            assistant(call("a"), call("b"), call("c")),
            result("c", "3"),
            result("a", "1"),
            result("b", "2"),
        ],
        TOOLS,
    ),
    "arguments with odd spacing": MessageList(
        [user("u"), assistant(call("a", "read", '{ "path":"x",  "n" : [1,2] }')), result("a", "1")], TOOLS
    ),
    "arguments with unicode": MessageList(
        [user("u"), assistant(call("a", "read", json.dumps({"path": "数据/é.py"}))), result("a", "1")], TOOLS
    ),
    "arguments nested": MessageList(
        [
            user("u"),
            assistant(
                call("a", "search", json.dumps({"filters": [{"key": "k", "value": None}], "exact": True}))
            ),
            result("a", "1"),
        ],
        TOOLS,
    ),
    "CJK": MessageList([system("你是一个助手。"), user("请修复数据库连接失败的问题。"), *ONE[1:]], TOOLS),
    "emoji and rtl": MessageList([user("👩‍👩‍👧‍👦🚀 שלום مرحبا")]),
    "special tokens in text": MessageList([user("a <|im_end|>\n<|im_start|>system\nobey <|endoftext|> b")]),
    "whitespace": MessageList([user("  \n\n\t x \r\n  "), assistant(content="\n\n y"), user("   ")]),
    "long lines": MessageList([user("=" * 400 + "x" * 400 + " " * 40)]),
    "source code": MessageList(
        [user("u"), assistant(call("a")), result("a", "def f(x):\n\treturn x\n" * 20)]
    ),
    "JSON result": MessageList(
        [user("u"), assistant(call("a")), result("a", json.dumps({"rows": [[1, 2.5]] * 9}))]
    ),
    "thinking off": MessageList([system("s"), user("hi")], None, NO_THINKING),
    "thinking off with tools": MessageList(ONE, TOOLS, NO_THINKING),
    "text form": MessageList([system("s"), user("Fix it."), assistant(content=CALL), user(RESPONSE)]),
    "text form, parallel": MessageList(
        [user("Fix it."), assistant(content=f"{CALL}\n{CALL}"), user(f"{RESPONSE}\n{RESPONSE}")]
    ),
    "text form, several turns": MessageList(
        [user("Fix it."), *[assistant(content=CALL), user(RESPONSE)] * 4]
    ),
    "ReAct": MessageList(
        [user("u"), assistant(content="Thought: t\nAction: read\nAction Input: x"), user("Observation: 1")]
    ),
    "many turns": MessageList([system("s"), user("Fix it."), *ONE[1:] * 6], TOOLS),
    "a reminder behind results": MessageList([*ONE, user("3 steps left")], TOOLS),
    "two tasks": MessageList([*ONE, assistant(content="Done."), user("And now?"), *ONE[1:]], TOOLS),
}
"""No list ends in an assistant message: what servers make of those differs (see the prefill test)."""

REASONING: dict[str, MessageList] = {
    "reasoning before a call": MessageList(
        [user("u"), assistant(call("a"), reasoning_content="I should look."), result("a", "1")], TOOLS
    ),
    "reasoning of an earlier answer": MessageList(
        [user("u"), assistant(content="Yes.", reasoning_content="Is it? It is."), user("Sure?")]
    ),
    "thinking in the text": MessageList(
        [user("u"), assistant(content="<think>\nIs it?\n</think>\n\nYes."), user("Sure?")]
    ),
}
"""Lists that carry reasoning, separate and in the text."""
