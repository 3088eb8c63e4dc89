"""Each strategy by itself, on histories whose tokens can be counted by hand (a token is a word)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from ctxguard import (
    CapToolResults,
    ClearToolResults,
    CompactionStrategy,
    ConfigurationError,
    ContextBudget,
    DropOldestTurns,
    DropOldReasoning,
    HistoryManager,
    StrategyError,
    SummarizeOldTurns,
    TruncateMessages,
    Turn,
)
from ctxguard.compaction import CLEARED, CUT, CompactionContext
from ctxguard.compaction.base import shorten
from ctxguard.effects import ModelCall, ModelText
from ctxguard.messages import flatten_turns, group_turns, text_of
from tests.doubles import WordCounter, agent_history, assistant, call, result, system, user, words

COUNTER = WordCounter()


def context(need: int, limit: int = 1_000, refuses: Callable[[Sequence[Turn]], bool] = lambda turns: False):
    return CompactionContext(
        need=need,
        prompt_limit=limit,
        counter=COUNTER,
        count=lambda turns: COUNTER.count(flatten_turns(turns)),
        cost=lambda turn: COUNTER.count(turn.messages),
        is_refused=refuses,
    )


def turns_of(messages):
    return HistoryManager(COUNTER).pins.mark(group_turns(messages))


def compact(strategy, messages, need, **options):
    return flatten_turns(strategy.compact(turns_of(messages), context(need, **options)))


def lengths(messages):
    return [COUNTER.count_text(text_of(m)) for m in messages if m["role"] == "tool"]


class TestClearToolResults:
    marker = COUNTER.count_text(CLEARED)

    def test_clears_the_oldest_first_and_cuts_the_last_one(self):
        history = agent_history(4, result_words=100)
        after = compact(ClearToolResults(), history, need=120)
        assert text_of(after[3]) == CLEARED
        # 100 - marker freed by the first; the rest of the need by the second, which keeps the remainder.
        assert lengths(after) == [self.marker, 100 - (120 - (100 - self.marker)), 100, 100]
        assert CUT in text_of(after[5])

    def test_keeps_every_call_and_every_id(self):
        history = agent_history(4)
        after = compact(ClearToolResults(), history, need=10_000)
        assert [m.get("tool_calls") for m in after] == [m.get("tool_calls") for m in history]
        assert [m.get("tool_call_id") for m in after] == [m.get("tool_call_id") for m in history]

    def test_leaves_the_newest_turn_and_small_results_whole(self):
        history = [*agent_history(1, result_words=20), *agent_history(2, result_words=100)[2:]]
        after = compact(ClearToolResults(min_tokens=64), history, need=10_000)
        assert lengths(after) == [20, self.marker, 100]

    def test_excluded_tools_are_never_cleared(self):
        after = compact(ClearToolResults(exclude_tools=frozenset({"read"})), agent_history(4), need=10_000)
        assert lengths(after) == [100, 100, 100, 100]

    def test_clearing_twice_changes_nothing(self):
        once = compact(ClearToolResults(), agent_history(4), need=10_000)
        assert compact(ClearToolResults(), once, need=10_000) == once

    def test_results_in_text_form_keep_their_tags(self):
        said = 'x <tool_call>\n{"name": "read"}\n</tool_call>'
        got = f"<tool_response>\n{words(100)}\n</tool_response>"
        history = [user("u"), assistant(content=said), user(got), assistant(content=said), user(got)]
        after = compact(ClearToolResults(), history, need=10_000)
        assert after[2]["content"] == f"<tool_response>\n{CLEARED}\n</tool_response>"
        assert after[4]["content"] == got


class TestTruncateMessages:
    def test_cuts_the_largest_to_a_common_cap_and_no_more_than_needed(self):
        history = [user("u"), *(m for i, n in enumerate([300, 100, 200]) for m in _turn(i, n))]
        after = compact(TruncateMessages(keep_tokens=10), history, need=150)
        assert sum(lengths(after)) <= 600 - 150
        assert lengths(after) == [175, 100, 175]

    def test_never_goes_below_its_floor(self):
        history = [user("u"), *_turn(0, 300)]
        after = compact(TruncateMessages(keep_tokens=250), history, need=10_000)
        assert lengths(after) == [250]

    def test_the_share_is_of_the_prompt_limit(self):
        history = [user("u"), *_turn(0, 900), *_turn(1, 400)]
        after = compact(TruncateMessages(keep_share=0.5), history, need=10_000, limit=1_000)
        assert lengths(after) == [500, 400]

    def test_system_and_task_are_left_alone(self):
        history = [system(words(500)), user(words(500)), *_turn(0, 500)]
        after = compact(TruncateMessages(keep_tokens=10), history, need=10_000)
        assert after[:2] == history[:2]

    def test_a_question_that_is_the_newest_message_may_be_cut(self):
        history = [user("u"), assistant(content="a"), user(words(500))]
        after = compact(TruncateMessages(keep_tokens=50), history, need=10_000)
        assert COUNTER.count_text(after[2]["content"]) == 50

    def test_a_text_is_marked_once_however_often_it_is_cut(self):
        once = shorten(words(500), 100, COUNTER)
        twice = shorten(once, 50, COUNTER)
        assert once.count(CUT.strip()) == twice.count(CUT.strip()) == 1
        assert COUNTER.count_text(twice) == 50

    @pytest.mark.parametrize("options", [{"keep_tokens": 0}, {"keep_share": 0}, {"keep_share": 1.5}])
    def test_impossible_settings_are_refused(self, options):
        with pytest.raises(ConfigurationError, match="TruncateMessages"):
            TruncateMessages(**options)


class TestDropOldestTurns:
    def test_drops_as_few_turns_as_are_needed(self):
        history = agent_history(5, result_words=100)
        after = compact(DropOldestTurns(), history, need=150)
        assert after == history[:2] + history[6:]

    def test_keeps_system_task_and_newest_turn_when_all_else_must_go(self):
        history = agent_history(5)
        assert compact(DropOldestTurns(), history, need=10_000) == history[:2] + history[-2:]

    def test_keeps_user_and_assistant_alternating(self):
        history = [user("u")]
        for i in range(4):
            history += [assistant(content=words(50, f"a{i}")), user(words(50, f"q{i}"))]
        after = compact(DropOldestTurns(), history, need=60)
        assert [m["role"] for m in after] == [
            "user",
            "assistant",
            "user",
            "assistant",
            "user",
            "assistant",
            "user",
        ]

    def test_keeps_a_turn_between_two_questions_where_the_template_wants_one(self):
        history = [user("u"), assistant(content=words(50)), user("v")]

        def refuses(turns):
            roles = [m["role"] for m in flatten_turns(turns)]
            return ("user", "user") in itertools.pairwise(roles)

        assert compact(DropOldestTurns(), history * 1, need=10_000, refuses=refuses)[-1]["content"] == "v"
        longer = [*history, assistant(content=words(9)), user("w")]
        after = compact(DropOldestTurns(), longer, need=10_000, refuses=refuses)
        assert [m["role"] for m in after] == ["user", "assistant", "user"]

    def test_pinned_turns_stay(self):
        history = agent_history(4)
        history[4:6] = [assistant(call("c1", "plan")), result("c1", words(100))]
        manager = HistoryManager(COUNTER, pin_tools=["plan"])
        after = DropOldestTurns().compact(manager.pins.mark(group_turns(history)), context(10_000))
        assert flatten_turns(after) == history[:2] + history[4:6] + history[-2:]


class TestDropOldReasoning:
    def test_drops_it_from_all_but_the_newest_turn(self):
        history = agent_history(3)
        for message in history[2::2]:
            message["reasoning_content"] = words(30)
        after = compact(DropOldReasoning(), history, need=1)
        assert ["reasoning_content" in m for m in after[2::2]] == [False, False, True]

    def test_takes_think_blocks_out_of_the_text(self):
        history = [user("u"), assistant(content=f"<think>{words(30)}</think>\n\nyes"), user("v")]
        assert compact(DropOldReasoning(), history, need=1)[1]["content"] == "yes"

    def test_does_nothing_where_it_would_free_nothing(self):
        turns = turns_of(agent_history(3))
        assert DropOldReasoning().compact(turns, context(1)) is turns


class TestCapToolResults:
    def fit(self, strategy, messages):
        return HistoryManager(COUNTER, ContextBudget(window=100_000), strategies=[strategy]).fit(messages)

    def test_caps_on_first_sight_per_tool_name(self):
        history = [user("u"), assistant(call("a", "read"), call("b", "grep")), result("a", words(300))]
        history.append(result("b", words(300)))
        fit = self.fit(CapToolResults(max_tokens=100, per_tool={"grep": 50}), history)
        assert lengths(fit.messages) == [100, 50]
        assert fit.report.path == "known"

    def test_leaves_unnamed_tools_alone_when_only_some_are_named(self):
        fit = self.fit(CapToolResults(max_tokens=None, per_tool={"grep": 50}), agent_history(2))
        assert fit.report.path == "untouched"

    def test_the_sent_prefix_never_changes(self):
        strategy = CapToolResults(max_tokens=50)
        history = agent_history(6)
        manager = HistoryManager(COUNTER, ContextBudget(window=100_000), strategies=[strategy])
        sent: list[object] = []
        for end in range(4, len(history) + 1, 2):
            messages = list(manager.fit(history[:end]).messages)
            assert messages[: len(sent)] == sent
            sent = messages

    def test_a_limit_below_one_is_refused(self):
        with pytest.raises(ConfigurationError, match="at least 1 token, got 0"):
            CapToolResults(max_tokens=0)


class TestSummarizeOldTurns:
    def summarize(self, answer, history=None, need=300, **options):
        asked: list[ModelCall] = []

        def ask(request):
            asked.append(request)
            if isinstance(answer, Exception):
                raise answer
            return answer

        strategy = SummarizeOldTurns(max_summary_tokens=50, **options)
        manager = HistoryManager(
            COUNTER,
            ContextBudget(window=1_000, max_response_tokens=100),
            strategies=[strategy, DropOldestTurns()],
        )
        fit = manager.fit(history or agent_history(9), ask=ask)
        return fit, asked

    def test_puts_the_summary_behind_the_task(self):
        fit, asked = self.summarize(ModelText("read f0.py, found line 7"))
        assert len(asked) == 1
        assert fit.messages[1]["content"].startswith("please find the bug\n\n<summary_of_earlier_turns>\n")
        assert "found line 7" in fit.messages[1]["content"]
        assert [s.name for s in fit.report.steps] == ["SummarizeOldTurns"]

    def test_the_request_is_budgeted_and_holds_whole_turns(self):
        history = agent_history(30)
        fit, asked = self.summarize(ModelText("short"), history)
        request = asked[0]
        assert COUNTER.count(request.messages) + request.max_tokens <= 1_000
        transcript = request.messages[1]["content"]
        assert transcript.count("[assistant]") == transcript.count("[tool]")
        assert fit.report.tokens_after <= fit.report.limits.prompt

    @pytest.mark.parametrize(
        ("answer", "note"),
        [
            (ModelText(""), "summary refused: empty"),
            (ModelText("   \n"), "summary refused: empty"),
            (ModelText("so far", "length"), "summary refused: cut off at its output limit"),
            (ModelText(words(5_000)), "summary refused: longer than its source"),
            (RuntimeError("secret of the server"), "summary failed: RuntimeError"),
        ],
    )
    def test_a_bad_summary_is_refused_and_the_next_strategy_takes_over(self, answer, note):
        fit, _ = self.summarize(answer)
        assert note in [n for step in fit.report.steps for n in step.notes]
        assert fit.messages[1]["content"] == "please find the bug"
        assert "secret" not in repr(fit.messages)
        assert fit.report.steps[-1].name == "DropOldestTurns"

    def test_the_next_summary_takes_the_former_one_in_and_its_place(self):
        first, _ = self.summarize(ModelText("one"))
        longer = [*first.messages, *agent_history(12)[2:]]
        second, asked = self.summarize(ModelText("two"), longer)
        assert "[earlier summary]\none" in asked[0].messages[1]["content"]
        task = second.messages[1]["content"]
        assert task.count("<summary_of_earlier_turns>") == 1
        assert "\ntwo\n" in task

    def test_a_stored_summary_is_not_asked_for_again(self):
        asked = []
        strategy = SummarizeOldTurns(max_summary_tokens=50)
        manager = HistoryManager(
            COUNTER, ContextBudget(window=1_000, max_response_tokens=100), strategies=[strategy]
        )

        def ask(request):
            asked.append(request)
            return ModelText("short")

        history = agent_history(9)
        first = manager.fit(history, ask=ask)
        manager.ledger.forget()
        assert list(manager.fit(history, ask=ask).messages) == list(first.messages)
        assert len(asked) == 1


@dataclass(frozen=True)
class DropsTheTask(CompactionStrategy):
    def compact(self, turns, context):
        return [turn for turn in turns if turn.kind != "user"]


@dataclass(frozen=True)
class InsertsANote(CompactionStrategy):
    def compact(self, turns, context):
        note = Turn("user", (user("earlier turns were left out"),), (None,))
        return [*(t for t in turns if t.pinned), note, *(t for t in turns if t.newest and not t.pinned)]


def manager_with(strategy):
    return HistoryManager(
        COUNTER, ContextBudget(window=1_000, max_response_tokens=100), strategies=[strategy]
    )


def test_a_custom_strategy_that_drops_what_must_stay_is_named():
    with pytest.raises(StrategyError, match="DropsTheTask left out a turn that must stay"):
        manager_with(DropsTheTask()).fit(agent_history(12))


def test_a_custom_strategy_may_insert_messages_and_they_survive_the_ledger():
    manager = manager_with(InsertsANote())
    history = agent_history(12)
    first = manager.fit(history)
    assert [text_of(m)[:12] for m in first.messages[:3]] == ["s0 s1 s2 s3 ", "please find ", "earlier turn"]
    later = [*history, *agent_history(13)[-2:]]
    fit = manager.fit(later)
    assert fit.report.path == "known"
    assert list(fit.messages[: len(first.messages)]) == list(first.messages)


def test_something_that_is_no_strategy_is_refused():
    with pytest.raises(ConfigurationError, match="CompactionStrategy objects, got <class"):
        HistoryManager(COUNTER, strategies=[DropOldestTurns])


def _turn(number, result_words):
    return [assistant(call(f"c{number}")), result(f"c{number}", words(result_words, f"r{number}_"))]
