"""Messages and tools reach the template as in vLLM 0.32, whose own results are recorded in ``data``."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from ctxguard.tokens import ChatTemplateCounter, normalize_messages, normalize_tools, request_template_kwargs

from .conftest import recorded


def test_messages_come_out_as_vllm_makes_them() -> None:
    for row in recorded("vllm_0_32_conversations.jsonl"):
        got = normalize_messages(row["messages"], content_format=row["format"], knows_developer=True)
        assert got == row["conversation"], row["messages"]
        calls = [[m.get("tool_calls") for m in some] for some in (got, row["conversation"])]
        assert json.dumps(calls[0]) == json.dumps(calls[1]), "templates may print keys in their order"


def test_developer_messages_become_one_system_message_as_in_vllm() -> None:
    rows = [row for row in recorded("vllm_0_32_conversations.jsonl") if "without_developer" in row]
    assert rows
    for row in rows:
        assert normalize_messages(row["messages"], content_format=row["format"]) == row["without_developer"]


def test_tools_come_out_as_vllm_makes_them() -> None:
    rows = [row for row in recorded("vllm_0_32_conversations.jsonl") if "tools" in row]
    assert rows
    for row in rows:
        assert json.dumps(normalize_tools(row["tools"])) == json.dumps(row["normalized_tools"])


def test_prompts_have_the_tokens_that_vllm_counts(qwen: ChatTemplateCounter) -> None:
    rows = recorded("vllm_0_32_prompts.jsonl")
    assert len(rows) > 200
    for row in rows:
        body = row["body"]
        kwargs = request_template_kwargs(body)
        got = qwen.count(body["messages"], tools=body.get("tools"), template_kwargs=kwargs)
        assert got == row["tokens"], body


def test_never_changes_what_the_caller_passed() -> None:
    for row in recorded("vllm_0_32_conversations.jsonl"):
        before = copy.deepcopy(row)
        normalize_messages(row["messages"], content_format=row["format"])
        normalize_tools(row.get("tools"))
        assert json.dumps(row) == json.dumps(before)


@pytest.mark.parametrize("tools", [None, [], ()])
def test_no_tools_are_none(tools: Any) -> None:
    assert normalize_tools(tools) is None


@pytest.mark.parametrize(
    ("body", "kwargs"),
    [
        ({}, {}),
        ({"chat_template_kwargs": None}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
    ],
)
def test_fields_of_a_request_reach_the_template_as_in_vllm(
    body: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    assert request_template_kwargs(body) == kwargs
