"""The manager by itself: limits, errors, reports, and that a compaction does not depend on notes and clocks."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from ctxguard import (
    BudgetError,
    ConfigurationError,
    ContextBudget,
    ContextOverflowError,
    HistoryManager,
    TemplateRefusedError,
)
from ctxguard.manager import call_points
from tests.doubles import WordCounter, agent_history, assistant, call, result, system, user, words

BUDGET = ContextBudget(window=1_000, max_response_tokens=100)


def manager(**options):
    return HistoryManager(WordCounter(), BUDGET, **options)


def test_the_limit_is_the_window_less_the_reserve():
    limits = manager().limits(BUDGET, None)
    assert (limits.prompt, limits.high, limits.low, limits.output) == (900, 873, 540, 100)


def test_the_requests_own_output_limit_takes_the_place_of_the_reserve():
    assert manager().limits(BUDGET, 300).prompt == 700


def test_an_approximate_counter_lowers_the_limit_by_its_margin():
    counter = WordCounter()
    counter.margin, counter.exact = 0.25, False
    assert HistoryManager(counter).limits(BUDGET, None).prompt == 720


def test_without_a_budget_it_says_what_to_pass():
    with pytest.raises(ConfigurationError, match="ContextBudget"):
        HistoryManager(WordCounter()).fit([user("u")])


def test_an_output_limit_that_fills_the_window_is_a_contradiction():
    with pytest.raises(BudgetError) as caught:
        manager().fit([user("u")], output_tokens=1_000)
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("output_tokens", 1_000, 999)


def test_compaction_goes_down_to_the_low_mark():
    fit = manager().fit(agent_history(8))
    assert fit.report.path == "compacted"
    assert fit.report.tokens_before == 880 > 873
    assert 540 - 200 <= fit.report.tokens_after <= 540


def test_the_report_holds_counts_and_digests_but_no_text():
    fit = manager().fit(agent_history(9))
    plain = json.dumps(fit.report.to_dict())
    assert "r0_1" not in plain
    assert "please find" not in plain
    assert fit.report.sent is fit.messages
    assert fit.report.sent_digest


def test_the_report_names_what_the_caller_broke_and_passes_it_through():
    messages = [user("u"), result("nobody", "1")]
    fit = manager().fit(messages)
    assert fit.report.broken_rule is not None
    assert fit.report.broken_rule.rule == "orphan_result"
    assert fit.messages is messages


def test_mending_is_done_when_asked_and_reported():
    fit = manager(mend=True).fit([user("u"), result("nobody", "1")])
    assert list(fit.messages) == [user("u")]
    assert [m.action for m in fit.report.mendings] == ["dropped"]


def test_what_cannot_fit_names_parts_and_the_largest_tools():
    tools = [
        {"type": "function", "function": {"name": name, "description": words(size)}}
        for name, size in (("small", 10), ("huge", 700))
    ]
    with pytest.raises(ContextOverflowError) as caught:
        manager().fit([system(words(200)), user("u")], tools)
    error = caught.value
    assert error.reason == "cannot_fit"
    assert error.prompt_tokens > error.limit == 900
    assert error.window == 1_000
    assert error.largest_tools[0][0] == "huge"
    assert "largest tool schemas: huge" in str(error)
    assert "maximum context length" in str(error)
    assert error.parts["system"] >= 200


def test_a_newest_result_many_times_the_window_is_cut_and_the_call_kept():
    history = [*agent_history(2), assistant(call("big")), result("big", words(20_000))]
    fit = manager().fit(history)
    assert fit.report.tokens_after <= 900
    assert fit.messages[-2] is history[-2]
    assert fit.messages[-1]["tool_call_id"] == "big"


def test_a_task_that_alone_is_too_long_fails():
    with pytest.raises(ContextOverflowError):
        manager().fit([user(words(1_000))])


class RefusingCounter(WordCounter):
    """A template that refuses everything, as one does with messages that it cannot render."""

    def count(self, messages, *, tools=None, template_kwargs=None):
        raise TemplateRefusedError("no", template_message="no")


def test_messages_that_the_template_refuses_are_estimated_and_not_called_exact():
    fit = HistoryManager(RefusingCounter(), BUDGET).fit([user(words(10))])
    assert fit.report.path == "untouched"
    assert not fit.report.exact
    assert fit.report.tokens_after >= 10


def test_a_count_of_images_is_not_called_exact():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    report = manager().fit([user([image])]).report
    assert not report.exact


def test_call_points_are_where_an_agent_called_the_model():
    history = [*agent_history(2), user("2 steps left")]
    # before each assistant message; at the end, without the reminder behind the results
    assert call_points(history) == [2, 4, 6]


def test_a_question_behind_an_answer_is_part_of_its_call_point():
    assert call_points([user("u"), assistant(content="a"), user("v")]) == [1, 3]


def run(turns, decorate, **options):
    """Drive an agent through the manager call by call; returns the views."""
    guard = manager(**options)
    history = agent_history(turns, result_words=60)
    views = []
    for end in range(4, len(history) + 1, 2):
        views.append(list(guard.fit(decorate(history[:end], end)).messages))
    return views


def breaks(views, skip=0):
    cut = [view[skip:] for view in views]
    return sum(after[: len(before)] != before for before, after in pairwise(cut))


def test_a_clock_in_the_system_prompt_does_not_move_compactions():
    plain = run(40, lambda h, end: h)
    clock = run(40, lambda h, end: [system(f"it is {end} {'o clock ' * (end % 5)}"), *h[1:]])
    assert breaks(clock, skip=1) <= breaks(plain) * 1.25


def test_a_reminder_that_is_gone_next_time_does_not_move_compactions():
    plain = run(40, lambda h, end: h)
    reminded = run(40, lambda h, end: [*h, user(f"{80 - end} steps left")])
    assert breaks([view[:-1] for view in reminded]) <= breaks(plain) * 1.25


def test_two_guards_that_share_a_ledger_share_only_what_is_equal():
    one = manager()
    other = HistoryManager(WordCounter(), BUDGET, ledger=one.ledger)
    history = agent_history(9)
    assert one.fit(history).report.path == "compacted"
    assert other.fit(history).report.path == "known"
    changed = [history[0], user("another task"), *history[2:]]
    assert other.fit(changed).report.path == "compacted"
