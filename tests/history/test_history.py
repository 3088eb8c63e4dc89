"""Digests say what a template renders; recipes apply to the caller's own messages; the ledger is bounded."""

from __future__ import annotations

import json

import pytest

from ctxguard.history import UNTOUCHED, Digester, Edit, Known, Ledger, Recipe
from ctxguard.messages import group_turns
from tests.doubles import agent_history, assistant, call, result, user, words

ARGUMENTS = {"path": "a.py", "lines": [1, 2], "deep": {"b": 1.5, "a": None}}
LONG = "x" * 500


def base():
    return assistant(call("c1", "read", json.dumps(ARGUMENTS)), content="look")


SAME = {
    "None fields": {**base(), "refusal": None, "function_call": None, "name": None},
    "other ids": assistant(call("other", "read", json.dumps(ARGUMENTS)), content="look"),
    "key order": dict(reversed(base().items())),
    "arguments re-dumped": assistant(
        call("c1", "read", json.dumps(ARGUMENTS, indent=2, sort_keys=True)), content="look"
    ),
    "a single text part": {**base(), "content": [{"type": "text", "text": "look"}]},
    "a cache mark": {
        **base(),
        "content": [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}],
    },
}
DIFFERENT = {
    "text": {**base(), "content": "look!"},
    "role": {**base(), "role": "user"},
    "call name": assistant(call("c1", "write", json.dumps(ARGUMENTS)), content="look"),
    "arguments": assistant(call("c1", "read", json.dumps({**ARGUMENTS, "path": "b.py"})), content="look"),
    "reasoning": {**base(), "reasoning_content": "hm"},
    "two parts": {**base(), "content": [{"type": "text", "text": "lo"}, {"type": "text", "text": "ok"}]},
}


@pytest.mark.parametrize("name", SAME)
def test_what_does_not_change_the_prompt_does_not_change_the_digest(name):
    assert Digester().message(SAME[name]) == Digester().message(base())


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_changes_the_prompt_changes_the_digest(name):
    assert Digester().message(DIFFERENT[name]) != Digester().message(base())


def test_none_and_empty_content_are_the_same():
    digester = Digester()
    assert digester.message(assistant(content=None)) == digester.message(assistant(content=""))


def test_an_edit_in_place_is_seen():
    digester = Digester()
    message = user(LONG)
    before = digester.message(message)
    message["content"] = LONG[:-1] + "y"
    assert digester.message(message) != before


def test_text_that_json_can_carry_but_utf8_cannot_is_digested():
    assert Digester().message(user("\ud800" * 300)) != Digester().message(user("\ud801" * 300))


def test_a_moved_border_between_messages_changes_the_chain():
    digester = Digester()
    one = digester.chain([user("ab"), user("c")], b"seed")
    other = digester.chain([user("a"), user("bc")], b"seed")
    assert one[0] == other[0]
    assert one[2] != other[2]


def recipe_of(history, change):
    turns = change(group_turns(history))
    return Recipe.of(turns, history)


def test_a_recipe_covers_only_up_to_the_last_altered_message():
    history = agent_history(4)

    def shorten_first(turns):
        span = turns[2].spans[0]
        return [*turns[:2], turns[2].with_texts({span: "short"}), *turns[3:]]

    recipe = recipe_of(history, shorten_first)
    assert (recipe.covers, recipe.altered, recipe.dropped) == (4, 1, 0)
    longer = [*history, *agent_history(5)[-2:]]
    view, origins = recipe.apply(longer)
    assert view[3]["content"] == "short"
    assert all(view[i] is longer[i] for i in range(len(longer)) if i != 3)
    assert origins == list(range(len(longer)))


def test_dropped_messages_are_left_out_and_origins_say_so():
    history = agent_history(3)
    recipe = recipe_of(history, lambda turns: [*turns[:2], *turns[3:]])
    view, origins = recipe.apply(history)
    assert view == history[:2] + history[4:]
    assert origins == [0, 1, 4, 5, 6, 7]
    assert recipe.dropped == 2


def test_a_recipe_takes_ids_and_cache_marks_from_the_call_it_is_applied_to():
    history = agent_history(2)
    recipe = recipe_of(
        history, lambda turns: [*turns[:2], turns[2].with_texts({turns[2].spans[0]: "short"}), turns[3]]
    )
    other = agent_history(2)
    other[2] = assistant(call("new-id", arguments='{"path": "f0.py"}'))
    mark = {"cache_control": {"type": "ephemeral"}}
    other[3] = result("new-id", [{"type": "text", "text": other[3]["content"], **mark}])
    view, _ = recipe.apply(other)
    assert view[3] == result("new-id", [{"type": "text", "text": "short", **mark}])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (user("a b"), user("a")),
        ({**base(), "reasoning_content": "hm"}, base()),
        (base(), assistant(call("c1", "read", '{"path": "…"}'), content="look")),
        (user([{"type": "text", "text": "a"}, {"type": "file", "file": {}}]), user("flattened")),
        (user("a"), {**user("a"), "name": "n"}),
        (user(None), user("now text")),
    ],
)
def test_an_edit_between_two_messages_leads_from_one_to_the_other(before, after):
    edit = Edit.between(before, after)
    assert edit is not None
    assert edit.apply(before) == after


def test_equal_messages_need_no_edit():
    assert Edit.between(base(), base()) is None


def test_the_untouched_recipe_gives_back_the_same_objects():
    history = agent_history(2)
    view, _ = UNTOUCHED.apply(history)
    assert all(a is b for a, b in zip(view, history, strict=True))


def test_the_ledger_finds_the_longest_known_prefix():
    ledger = Ledger()
    chain = [bytes([i]) for i in range(6)]
    ledger.put(chain[2], Known(UNTOUCHED, 3))
    ledger.put(chain[4], Known(Recipe(1, ()), 5))
    assert ledger.longest(chain, [2, 4, 5]) == (1, Known(Recipe(1, ()), 5))
    assert ledger.longest(chain, [3, 5]) is None


def test_the_ledger_is_bounded_and_forgets_what_was_not_used():
    ledger = Ledger(max_entries=2, max_summaries=1)
    for key in (b"a", b"b"):
        ledger.put(key, Known(UNTOUCHED, 0))
    ledger.longest([b"a"], [0])
    ledger.put(b"c", Known(UNTOUCHED, 0))
    assert len(ledger) == 2
    assert ledger.longest([b"b"], [0]) is None
    ledger.put_summary(b"1", "x")
    ledger.put_summary(b"2", "y")
    assert (ledger.summary(b"1"), ledger.summary(b"2")) == (None, "y")


def test_the_memo_of_texts_is_bounded():
    digester = Digester()
    digester._memo._max_characters = 10_000
    digests = [digester.message(user(words(300, f"t{i}"))) for i in range(50)]
    assert len(set(digests)) == 50
    assert digester._memo._characters <= 10_000
