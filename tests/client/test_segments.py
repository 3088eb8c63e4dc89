"""Level "trajectory": what the trainer merges into one row is neither cut nor dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard import BudgetError, ConfigurationError, ContextBudget, ContextOverflowError, Guard
from ctxguard.client.flow import Call, guarded_call
from ctxguard.effects import Answer, Effect, Probe, Send, TokenIds, run_flow
from ctxguard.events import Compacted, FieldAdded, OutputLimited, Placed
from ctxguard.scope import RolloutScope
from ctxguard.segments import (
    CALL_UNSEEN,
    CALLS_OVERLAP,
    COUNT_DIFFERS,
    NO_IDS_FROM_COUNTER,
    NO_IDS_FROM_SERVER,
)
from tests.doubles import WordCounter, agent_history, assistant, call, result, system, user, words
from tests.token_ids import WordIdCounter, row_lengths

FIRST, BEHIND, WINDOW = 200, 400, 1_000
BUDGET = ContextBudget(window=WINDOW, max_prompt_tokens=FIRST, max_response_tokens=BEHIND, level="trajectory")


@dataclass
class Rollout:
    """One rollout: its scope, the server that answers it, and the calls as the trainer gets them."""

    guard: Guard
    counter: WordIdCounter = field(default_factory=WordIdCounter)
    scope: RolloutScope = field(default_factory=lambda: RolloutScope("r1"))
    gives_ids: bool = True
    owner: str = "vllm"
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    probes: int = 0

    def call(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int | None = 20,
        says: str | Mapping[str, Any] = "ok",
        during: Any = None,
        **options: Any,
    ) -> None:
        """One call; ``says`` is the answer, ``during`` is called while the server works on it."""

        def perform(effect: Effect) -> Any:
            if isinstance(effect, Probe):
                self.probes += 1
                return {"data": [{"id": "m", "owned_by": self.owner}]}
            assert isinstance(effect, Send)
            self.sends.append(effect)
            if during is not None:
                during()
            sent = messages if effect.messages is None else effect.messages
            limit = max_tokens if effect.output_limit is None else effect.output_limit[1]
            prompt = self.counter.ids(sent)
            answer = {"content": says} if isinstance(says, str) else says
            generated = self.counter.generated(answer, limit or 10**6)
            assert len(prompt) + len(generated) <= WINDOW, "the server would have refused this"
            self.turns.append((prompt, generated))
            ids = TokenIds()
            if self.gives_ids:
                ids.read(prompt, generated)
            ids.complete()
            return Answer(says, prompt_tokens=len(prompt), token_ids=ids)

        request = Call(
            messages=messages,
            model="m",
            output_limit=None if max_tokens is None else ("max_tokens", max_tokens),
            scope=self.scope,
            **options,
        )
        run_flow(guarded_call(self.guard, request), perform)

    @property
    def rows(self) -> list[tuple[int, int]]:
        return row_lengths(self.turns)

    def check_rows(self, first: int = FIRST, behind: int = BEHIND) -> None:
        """No row is cut or dropped, and we knew which rows there are."""
        assert all(size <= first and rest <= behind for size, rest in self.rows), self.rows
        if not self.scope.segments.conditional:
            assert self.scope.segments.rows == len(self.rows)

    def placed(self) -> list[Placed]:
        return [event for event in self.scope.events if isinstance(event, Placed)]


def rollout(counter: Any = None, *, budget: ContextBudget = BUDGET, **options: Any) -> Rollout:
    counter = counter or WordIdCounter()
    server = counter if isinstance(counter, WordIdCounter) else WordIdCounter()
    return Rollout(Guard(budget, counter=counter, **options), server)


def converse(
    agent: Rollout, sizes: Sequence[int], *, says: str = "I look", max_tokens: int = 20
) -> list[Any]:
    """An agent that reads something of each size, keeping its whole history."""
    messages: list[Any] = [system(words(10, "s")), user("find the bug please")]
    for number, size in enumerate(sizes):
        answer = assistant(call(f"c{number}"), content=says)
        agent.call(messages, max_tokens, answer)
        messages.append(answer)
        messages.append(result(f"c{number}", words(size, f"r{number}_")))
    agent.call(messages, max_tokens, "done")
    return messages


# The rule


def test_calls_that_go_on_share_a_row_far_beyond_the_limit_of_its_first_prompt():
    agent = rollout()
    agent.call([user("go")], says="ok")
    history = [user("go"), assistant(content="ok"), user(words(300))]
    agent.call(history)
    assert len(agent.rows) == 1
    assert len(agent.turns[1][0]) > FIRST
    assert agent.sends[1].messages is None, "sent as it came"
    agent.check_rows()


def test_an_unguarded_agent_has_its_rows_cut():
    agent = rollout(mode="off")
    converse(agent, [60] * 12)
    assert any(rest > BEHIND for _, rest in agent.rows)


def test_a_compaction_starts_a_row_before_the_old_one_overflows():
    agent = rollout()
    converse(agent, [60] * 12)
    agent.check_rows()
    assert len(agent.rows) > 1
    compactions = [event for event in agent.scope.events if isinstance(event, Compacted)]
    assert len(compactions) == len(agent.rows) - 1, "only a compaction starts a row"
    assert agent.scope.segments.conditional == ""
    # Rows are used: the old one had no room left for what came.
    assert all(rest > BEHIND / 2 for _, rest in agent.rows[:-1])


def test_the_events_say_where_each_call_stands():
    agent = rollout()
    converse(agent, [60] * 12)
    placed = agent.placed()
    assert [event.prompt_tokens for event in placed] == [len(prompt) for prompt, _ in agent.turns]
    assert [event.starts for event in placed].count(True) == len(agent.rows)
    assert [event.row for event in placed][-1] == len(agent.rows)
    firsts = {event.row: event.first_prompt_tokens for event in placed}
    assert list(firsts.values()) == [size for size, _ in agent.rows]
    assert all(event.prompt_tokens <= event.row_limit for event in placed)


def test_the_report_says_it_before_the_call_is_sent():
    reports: list[Any] = []
    agent = rollout(on_report=reports.append)
    converse(agent, [60] * 12)
    assert [report.segment.starts for report in reports] == [event.starts for event in agent.placed()]
    assert reports[0].to_dict()["segment"] == {
        "starts": True,
        "first_prompt_tokens": len(agent.turns[0][0]),
        "conditional": "",
    }


def test_at_level_call_there_is_no_segment():
    reports: list[Any] = []
    agent = rollout(budget=ContextBudget(window=WINDOW, max_response_tokens=100), on_report=reports.append)
    converse(agent, [60] * 12)
    assert {report.segment for report in reports} == {None}
    assert agent.placed() == []
    assert agent.sends[0].token_ids is None


def test_a_template_that_strips_thinking_makes_a_row_of_each_turn():
    agent = rollout(WordIdCounter(strips_thinking=True))
    messages: list[Any] = [user("go")]
    for number in range(8):
        says = f"<think> {words(10, f't{number}_')} </think> so"
        agent.call(messages, 20, says)
        messages += [assistant(content=says), user(words(40, f"u{number}_"))]
    agent.check_rows()
    assert len(agent.rows) == 8
    assert agent.scope.segments.conditional == ""


def test_generated_ids_that_are_not_those_of_the_text_start_a_row():
    """The text of an answer need not be tokenized as the model wrote it."""
    agent = rollout()
    messages: list[Any] = [user("go")]
    agent.call(messages, says="I  look")
    agent.turns[-1] = (agent.turns[-1][0], [999_999])
    agent.scope.segments._last[0].ids = [*agent.turns[-1][0], 999_999]
    messages += [assistant(content="I look"), user(words(300))]
    agent.call(messages)
    agent.check_rows()
    assert len(agent.rows) == 2


def test_the_call_before_counts_not_the_conversation():
    """A second conversation in between: the first one's next prompt starts a row, however it goes on."""
    agent = rollout()
    first: list[Any] = [user("go")]
    agent.call(first)
    first += [assistant(content="ok"), user(words(250))]
    agent.call(first)
    assert len(agent.turns[-1][0]) > FIRST
    agent.call([user("another matter")])
    first += [assistant(content="ok"), user("and now?")]
    agent.call(first)
    assert len(agent.turns[-1][0]) <= FIRST
    agent.check_rows()
    assert len(agent.rows) == 3


def test_the_same_prompt_again_starts_a_row():
    agent = rollout()
    messages = [user("go"), assistant(content="ok"), user(words(100))]
    agent.call(messages, says="the same answer")
    agent.call(messages, says="the same answer")
    agent.check_rows()
    assert len(agent.rows) == 2


def test_a_long_prompt_that_comes_again_is_held_to_the_limit_of_a_first_prompt():
    agent = rollout()
    agent.call([user("go")])
    messages = [user("go"), assistant(content="ok"), user(words(300))]
    agent.call(messages, says="the same answer")
    agent.call(messages, says="the same answer")
    assert [len(prompt) > FIRST for prompt, _ in agent.turns] == [False, True, False]
    agent.check_rows()


def test_a_compaction_that_still_goes_on_gives_up_what_comes_before():
    """Here the newest message is what is too long, and shortening it alone would leave the row as it is."""
    budget = BUDGET.model_copy(update={"max_prompt_tokens": 800, "max_response_tokens": 100})
    agent = rollout(budget=budget)
    messages: list[Any] = [user("go")]
    agent.call(messages, 30)
    messages += [assistant(content="ok"), user(words(40, "a"))]
    agent.call(messages, 30)
    messages += [assistant(content="ok"), user(words(60, "b"))]
    agent.call(messages, 30)
    agent.check_rows(800, 100)
    assert len(agent.rows) == 2


def test_a_compaction_under_a_short_row_is_known_to_the_next_call():
    """What starts a row for want of room behind the first prompt, not in it, must last, too."""
    budget = BUDGET.model_copy(update={"max_prompt_tokens": 800, "max_response_tokens": 300})
    agent = rollout(budget=budget)
    converse(agent, [40] * 14)
    agent.check_rows(800, 300)
    compactions = [event for event in agent.scope.events if isinstance(event, Compacted)]
    assert len(agent.rows) - 1 == len(compactions) <= 4


def test_a_head_that_is_too_long_fails_before_the_first_call():
    agent = rollout()
    with pytest.raises(ContextOverflowError, match=f"first prompt may have {FIRST} tokens") as caught:
        agent.call([system(words(FIRST)), user("go")])
    assert (agent.turns, caught.value.limit) == ([], FIRST)
    assert agent.scope.failure is caught.value


# The output limit


def test_a_request_without_an_output_limit_is_refused():
    with pytest.raises(BudgetError, match="needs an output limit on every request") as caught:
        rollout().call([user("go")], None)
    assert (caught.value.field, caught.value.limit) == ("max_tokens", BEHIND)


def test_an_output_limit_that_no_row_has_room_for_is_refused():
    agent = rollout()
    with pytest.raises(ContextOverflowError, match=f"is more than the {BEHIND} tokens") as caught:
        agent.call([user("go")], BEHIND + 1)
    assert (caught.value.reason, caught.value.limit, agent.turns) == ("output_budget", BEHIND, [])
    agent.call([user("go")], BEHIND)
    agent.check_rows()


def test_enforced_an_absent_limit_is_set_and_a_larger_one_lowered():
    agent = rollout(response="enforce")
    agent.call([user("go")], None, words(500))
    agent.call([user("go on")], BEHIND + 1, words(500))
    limits = [event.after for event in agent.scope.events if isinstance(event, OutputLimited)]
    assert limits == [BEHIND // 4, BEHIND]
    agent.check_rows()


def test_an_output_limit_that_the_row_has_no_room_for_starts_a_row_instead_of_being_lowered():
    agent = rollout()
    messages: list[Any] = [user("go"), *agent_history(1, 40)[2:], user(words(20))]
    agent.call(messages, 200, words(190))
    messages += [assistant(content=words(190)), user("more")]
    agent.call(messages, 300, words(10))
    agent.check_rows()
    assert len(agent.rows) == 2
    assert agent.sends[-1].output_limit is None


# Where the ids come from


def test_ids_are_asked_of_a_server_that_takes_the_field_and_this_is_told():
    agent = rollout()
    agent.call([user("go")])
    agent.call([user("go on")])
    assert [send.token_ids for send in agent.sends] == ["ask", "ask"]
    added = [event for event in agent.scope.events if isinstance(event, FieldAdded)]
    assert [(event.field, event.value) for event in added] == [("return_token_ids", True)] * 2
    assert agent.probes == 1


@pytest.mark.parametrize("asked", [True, False])
def test_a_request_that_says_itself_whether_it_wants_ids_is_left_alone(asked):
    agent = rollout()
    agent.call([user("go")], return_token_ids=asked)
    assert [send.token_ids for send in agent.sends] == ["read"]
    assert agent.probes == 0


def test_another_server_is_not_sent_a_field_that_it_may_refuse():
    agent = rollout()
    agent.owner = "openai"
    agent.call([user("go")])
    assert [send.token_ids for send in agent.sends] == ["read"]
    assert not any(isinstance(event, FieldAdded) for event in agent.scope.events)


def test_without_ids_of_the_server_the_promise_is_conditional_and_says_so():
    agent = rollout()
    agent.gives_ids = False
    converse(agent, [60] * 12)
    agent.check_rows()
    assert agent.scope.segments.conditional == NO_IDS_FROM_SERVER
    assert {event.conditional for event in agent.placed() if not event.starts} == {NO_IDS_FROM_SERVER}


def test_without_ids_of_the_server_thinking_that_vanishes_from_the_prompt_is_seen():
    """Kept while the agent reads, stripped when the user speaks: the prompt before is no prefix any more."""
    agent = rollout(WordIdCounter(strips_thinking=True))
    agent.gives_ids = False
    messages: list[Any] = [user("go")]
    for number in range(6):
        answer = assistant(call(f"c{number}"), content=f"<think> {words(10)} </think> so")
        agent.call(messages, 20, answer)
        messages += [answer, result(f"c{number}", words(40))]
    agent.call(messages)
    assert (len(agent.turns[-1][0]) > FIRST, agent.placed()[-1].starts) == (True, False)
    agent.call([*messages, assistant(content="done"), user("and now?")])
    assert (len(agent.turns[-1][0]) <= FIRST, agent.placed()[-1].starts) == (True, True)
    agent.check_rows()


def test_without_ids_of_the_counter_the_messages_are_compared():
    class Words(WordCounter):
        exact = False

    agent = rollout(Words())
    converse(agent, [60] * 12)
    agent.check_rows(FIRST + 30, BEHIND + 30)  # the two count alike to within a few words
    assert len(agent.rows) > 1
    assert agent.scope.segments.conditional == NO_IDS_FROM_COUNTER


def test_ids_that_are_not_the_counters_make_the_promise_conditional():
    class Other(WordIdCounter):
        def ids(self, messages, **options):
            return [*super().ids(messages)[:-1], -1]

    agent = rollout(Other())
    agent.counter = WordIdCounter()
    agent.call([user("go")])
    assert agent.scope.segments.conditional == COUNT_DIFFERS


def test_calls_that_overlap_make_the_promise_conditional():
    agent = rollout()
    agent.call([user("go")])
    agent.call([user("one")], during=lambda: agent.call([user("other")]))
    assert agent.scope.segments.conditional == CALLS_OVERLAP


def test_after_calls_that_overlapped_both_limits_hold():
    """Either may be the one before the next, so a prompt that goes on from one may start a row as well."""
    agent = rollout()
    agent.call([user("one")], during=lambda: agent.call([user("other")]))
    agent.call([user("one"), assistant(content="ok"), user(words(300))])
    assert len(agent.turns[-1][0]) <= FIRST


def test_a_call_past_the_guard_makes_the_promise_conditional():
    agent = rollout()
    agent.call([user("go")])
    with agent.guard.using("off"):
        agent.call([user("go"), assistant(content="ok"), user("more")])
    agent.call([user("go"), assistant(content="ok"), user(words(300))])
    assert agent.scope.segments.conditional == CALL_UNSEEN
    assert len(agent.turns[-1][0]) <= FIRST


def test_a_call_that_failed_is_no_call():
    agent = rollout()
    agent.call([user("go")])

    def fail() -> None:
        raise RuntimeError("the server is down")

    with pytest.raises(RuntimeError, match="down"):
        agent.call([user("another matter")], during=fail)
    agent.call([user("go"), assistant(content="ok"), user(words(300))])
    assert len(agent.turns[-1][0]) > FIRST
    assert agent.scope.segments.conditional == ""
    agent.check_rows()


def test_outside_of_a_rollout_the_level_has_no_meaning():
    agent = rollout()
    agent.scope = None
    with pytest.raises(ConfigurationError, match="belongs to no rollout"):
        agent.call([user("go")])


def test_observed_calls_go_out_as_they_came_and_keep_their_place():
    agent = rollout(mode="observe")
    converse(agent, [60] * 12)
    assert all(send.messages is None and send.token_ids == "read" for send in agent.sends)
    assert [event.first_prompt_tokens for event in agent.placed()] == [len(agent.turns[0][0])] * 13
    assert any(event.prompt_tokens > event.row_limit for event in agent.placed())


# Any agent

steps = st.lists(
    st.tuples(
        st.sampled_from(["read", "read", "read", "ask", "again", "aside", "forget"]),
        st.integers(1, 250),
        st.integers(1, 90),
        st.booleans(),
    ),
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    steps,
    st.integers(120, 500),
    st.integers(100, 600),
    st.booleans(),
)
def test_no_row_is_ever_cut_or_dropped(steps, first, behind, strips_thinking):
    budget = ContextBudget(
        window=WINDOW, max_prompt_tokens=first, max_response_tokens=behind, level="trajectory"
    )
    agent = rollout(WordIdCounter(strips_thinking=strips_thinking), budget=budget)
    messages: list[Any] = [system(words(8, "s")), user("find the bug please")]
    for number, (what, size, limit, thinks) in enumerate(steps):
        says = (
            f"<think> {words(5, f't{number}_')} </think> on"
            if thinks
            else words(size // 10 + 1, f"a{number}_")
        )
        sent = [user("another matter"), user(words(size))] if what == "aside" else messages
        reads = what in ("read", "forget")
        answer = assistant(*[call(f"c{number}")] * reads, content=says)
        failed = None
        try:
            agent.call(sent, limit, answer)
        except ContextOverflowError as error:
            failed = error.reason
        # Nothing can be done where a row cannot hold one answer, a shortened result and the next answer.
        assert failed is None or (failed == "cannot_fit" and limit + 90 + 50 > behind)
        if what == "aside" or what == "again":
            continue
        if what == "forget":
            messages = [*messages[:2], *messages[-2:]] if len(messages) > 4 else messages
        body = words(size, f"r{number}_")
        messages = [*messages, answer, result(f"c{number}", body) if reads else user(body)]
    agent.check_rows(first, behind)
    assert agent.scope.segments.conditional == ""
