from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from ctxguard.testing import ScriptedModel, tool_call

HI = [{"role": "user", "content": "hi"}]


def test_answers_in_order_with_text_calls_and_whole_messages():
    whole = {"role": "assistant", "content": "see", "tool_calls": [tool_call("f", {}, id="mine")]}
    parallel = [tool_call("read", {"path": "a"}), tool_call("read", {"path": "b"})]
    model = ScriptedModel([tool_call("read", {"path": "é"}), parallel, whole, "done"])

    one, two, three, four = (model.reply(HI) for _ in range(4))
    assert one["role"] == "assistant"
    assert one["content"] is None
    assert one["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "é"}'}}
    ]
    assert [call["id"] for call in two["tool_calls"]] == ["call_2", "call_3"]
    assert three == whole
    assert four == {"role": "assistant", "content": "done"}
    assert model.replies == 4


def test_a_function_sees_messages_and_tools():
    seen = []
    model = ScriptedModel(lambda messages, tools: seen.append((messages, tools)) or "ok")
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert model.reply(HI, tools)["content"] == "ok"
    assert model.reply(HI)["content"] == "ok"
    assert seen == [(HI, tools), (HI, [])]


def test_a_list_may_hold_functions_and_says_what_comes_then():
    model = ScriptedModel([lambda messages, tools: f"{len(messages)}"], then="over")
    assert [model.reply(HI)["content"] for _ in range(3)] == ["1", "over", "over"]


def test_the_end_of_the_list_raises_and_says_so():
    model = ScriptedModel(["one"])
    model.reply(HI)
    with pytest.raises(LookupError, match=r"has 1 replies and was asked for reply 2.*then="):
        model.reply(HI)


def test_replies_share_nothing_with_the_script():
    message = {"role": "assistant", "content": "x", "tool_calls": [tool_call("f", {}, id="c")]}
    model = ScriptedModel(lambda messages, tools: message)
    model.reply(HI)["tool_calls"][0]["function"]["name"] = "changed"
    assert model.reply(HI)["tool_calls"][0]["function"]["name"] == "f"


def test_tool_call_takes_json_text_as_it_is():
    text = '{ "a" :1}'
    assert tool_call("f", text)["function"]["arguments"] == text
    assert json.loads(tool_call("f", {"a": 1})["function"]["arguments"]) == {"a": 1}
    assert "id" not in tool_call("f")


def test_ids_stay_unique_when_many_threads_ask():
    model = ScriptedModel(lambda messages, tools: tool_call("f"))
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: model.reply(HI)["tool_calls"][0]["id"], range(200)))
    assert len(set(ids)) == 200
    assert model.replies == 200
