"""Grouping: a call and its results are one turn, native and in text form, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

from ctxguard.messages import Turn, flatten_turns, group_turns, newest_turn
from tests.doubles import assistant, call, result, system, user

HERMES_CALL = 'I look.\n<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>'
HERMES_RESULT = "<tool_response>\nfound it\n</tool_response>"


def kinds(messages: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(turn.kind, len(turn.messages)) for turn in group_turns(messages)]


def test_keeps_parallel_results_with_their_call():
    messages = [system("s"), user("u"), assistant(call("a"), call("b")), result("a", "1"), result("b", "2")]
    assert kinds(messages) == [("system", 1), ("user", 1), ("assistant", 3)]


def test_flattening_gives_the_very_same_objects():
    messages = [system("s"), user("u"), assistant(call("a")), result("a", "1"), user("v"), result("zz", "?")]
    assert all(a is b for a, b in zip(flatten_turns(group_turns(messages)), messages, strict=True))


def test_a_late_result_pulls_what_stands_between_into_its_turn():
    messages = [user("u"), assistant(call("a"), call("b")), result("a", "1"), user("hurry"), result("b", "2")]
    assert kinds(messages) == [("user", 1), ("assistant", 4)]


def test_a_result_without_a_call_is_a_turn_of_its_own():
    assert kinds([user("u"), result("nobody", "1")]) == [("user", 1), ("result", 1)]


def test_a_reused_id_belongs_to_the_newest_open_call():
    messages = [user("u"), assistant(call("a")), result("a", "1"), assistant(call("a")), result("a", "2")]
    assert kinds(messages) == [("user", 1), ("assistant", 2), ("assistant", 2)]


def test_legacy_function_results_follow_their_call_by_name():
    legacy = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    messages = [user("u"), legacy, {"role": "function", "name": "f", "content": "1"}]
    assert kinds(messages) == [("user", 1), ("assistant", 2)]


@pytest.mark.parametrize(
    ("said", "answered", "tool", "body"),
    [
        (HERMES_CALL, HERMES_RESULT, "search", "found it"),
        ("Thought: hm\nAction: search\nAction Input: x", "Observation: found it", "search", "found it"),
        (HERMES_CALL, [{"type": "text", "text": HERMES_RESULT}], "search", "found it"),
    ],
)
def test_tools_in_text_form_are_tools(said, answered, tool, body):
    turns = group_turns([user("u"), assistant(content=said), user(answered), user("and now?")])
    assert [turn.kind for turn in turns] == ["user", "assistant", "user"]
    results = [span for span in turns[1].spans if span.kind == "result"]
    assert [(span.tool, span.text) for span in results] == [(tool, body)]


def test_replacing_a_text_result_keeps_its_tags_and_the_call():
    turn = group_turns([user("u"), assistant(content=HERMES_CALL), user(HERMES_RESULT)])[1]
    span = next(span for span in turn.spans if span.kind == "result")
    replaced = turn.with_texts({span: "gone"})
    assert [m["content"] for m in replaced.messages] == [
        HERMES_CALL,
        "<tool_response>\ngone\n</tool_response>",
    ]


def test_two_text_results_in_one_message_belong_to_two_calls():
    said = '<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    got = "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    turn = group_turns([user("u"), assistant(content=said), user(got)])[1]
    assert [(s.tool, s.text) for s in turn.spans if s.kind == "result"] == [("a", "1"), ("b", "2")]


def test_a_user_message_that_merely_quotes_the_tag_is_not_a_result():
    messages = [user("u"), assistant(content="ok"), user("what does <tool_response> mean?")]
    assert kinds(messages) == [("user", 1), ("assistant", 1), ("user", 1)]


def test_prose_before_a_text_call_may_be_cut_but_not_the_call():
    turn = group_turns([user("u"), assistant(content=HERMES_CALL)])[1]
    assert [span.text for span in turn.spans] == ["I look.\n"]


def test_spans_of_native_results_know_their_tool():
    messages = [
        user("u"),
        assistant(call("a", "read"), call("b", "grep")),
        result("b", "2"),
        result("a", [{"type": "text", "text": "1"}, {"type": "image_url", "image_url": {"url": "data:"}}]),
    ]
    turn = group_turns(messages)[1]
    assert [(s.tool, s.text) for s in turn.spans] == [("grep", "2"), ("read", "1")]


@pytest.mark.parametrize("content", [None, "", [], [{"type": "refusal", "refusal": "no"}]])
def test_contents_of_every_shape_are_grouped(content):
    turns = group_turns([user("u"), {"role": "assistant", "content": content}])
    assert [turn.kind for turn in turns] == ["user", "assistant"]


def test_a_reminder_behind_tool_results_belongs_to_the_newest_turn():
    turns = group_turns([user("u"), assistant(call("a")), result("a", "1"), user("3 steps left")])
    assert newest_turn(turns) == 1


def test_a_question_behind_an_answer_is_the_newest_turn():
    turns = group_turns([user("u"), assistant(content="a"), user("v")])
    assert newest_turn(turns) == 2


def test_with_message_keeps_origins():
    turn = group_turns([user("u"), assistant(call("a")), result("a", "1")])[1]
    changed = turn.with_message(1, result("a", "short"))
    assert isinstance(changed, Turn)
    assert changed.origins == (1, 2)
    assert changed.messages[1]["content"] == "short"
