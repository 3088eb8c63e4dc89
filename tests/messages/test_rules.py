"""The checker names the first broken rule; mending repairs it and says so."""

from __future__ import annotations

import copy

import pytest

from ctxguard.messages import check_messages, mend_messages
from tests.doubles import assistant, call, result, system, user

BROKEN = [
    ("empty_list", None, []),
    ("orphan_result", 1, [user("u"), result("a", "1")]),
    ("orphan_result", 3, [user("u"), assistant(call("a")), result("a", "1"), result("a", "2")]),
    ("unanswered_call", 1, [user("u"), assistant(call("a")), user("v")]),
    (
        "unanswered_call",
        1,
        [user("u"), assistant(call("a"), call("b")), result("a", "1"), assistant(content="x")],
    ),
    ("unanswered_call", 1, [user("u"), assistant(call("a"), call("b")), result("a", "1")]),
    (
        "reused_tool_call_id",
        3,
        [user("u"), assistant(call("a")), result("a", "1"), assistant(call("a")), result("a", "2")],
    ),
    ("no_user_message", None, [system("s"), assistant(content="x")]),
    ("no_user_message", None, [assistant(content="x"), user("<tool_response>\n1\n</tool_response>")]),
    ("bad_role_order", 1, [user("u"), system("late")]),
    ("bad_role_order", 0, [{"role": "robot", "content": "x"}]),
]


@pytest.mark.parametrize(("rule", "index", "messages"), BROKEN)
def test_names_the_first_broken_rule(rule, index, messages):
    broken = check_messages(messages)
    assert broken is not None
    assert (broken.rule, broken.index) == (rule, index)


@pytest.mark.parametrize(
    "messages",
    [
        [user("u")],
        [system("s"), {"role": "developer", "content": "d"}, user("u")],
        [user("u"), assistant(call("a"), call("b")), result("b", "2"), result("a", "1"), user("v")],
        [user("u"), assistant(call("a"))],
        [assistant(content="Hello, how can I help?"), user("u")],
        [
            user("u"),
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "1"},
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "2"},
        ],
    ],
)
def test_finds_nothing_wrong_with_a_sound_history(messages):
    assert check_messages(messages) is None
    assert mend_messages(messages) == (messages, [])


@pytest.mark.parametrize(
    ("rule", "index", "messages"),
    [case for case in BROKEN if case[0] not in ("empty_list", "no_user_message") and case[1] != 0],
)
def test_mending_leaves_a_sound_history_and_says_what_it_did(rule, index, messages):
    before = copy.deepcopy(messages)
    mended, changes = mend_messages(messages)
    assert check_messages(mended) is None
    assert rule in {change.rule for change in changes}
    assert messages == before


def test_a_renamed_id_is_renamed_on_both_sides():
    messages = [user("u"), assistant(call("a")), result("a", "1"), assistant(call("a")), result("a", "2")]
    mended, _ = mend_messages(messages)
    assert mended[3]["tool_calls"][0]["id"] == mended[4]["tool_call_id"] == "a-2"
