"""The flow without a network: what is sent, what is learnt, and that it ends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxguard import (
    ContextBudget,
    ContextOverflowError,
    CtxguardError,
    Guard,
    ServerUnavailableError,
    SummarizeOldTurns,
    WindowUnknownError,
)
from ctxguard.client.flow import Call, guarded_call
from ctxguard.effects import Answer, Load, Probe, Send, run_flow
from ctxguard.events import Answered, Compacted, Counted, Event, Failed, OutputLimited, Refused
from ctxguard.scope import RolloutScope
from tests.doubles import WordCounter, agent_history, user, words

COUNTER = WordCounter()


class Refusal(Exception):
    """A provider's error, as `facts_of` reads it."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(f"Error code: {status} - {message}")
        self.status_code = status
        self.body = {"message": message, "type": "BadRequestError", "code": status}


def too_long(limit: int, prompt: int) -> Refusal:
    return Refusal(
        f"This model's maximum context length is {limit} tokens. However, your request has {prompt} input "
        "tokens. Please reduce the length of the input messages."
    )


def at_least(limit: int) -> Refusal:
    """vLLM >= 0.15: the number is a lower bound, whatever was sent."""
    return Refusal(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains at least "
        f"{limit + 1} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
        f"length of the input prompt. (parameter=input_tokens, value={limit + 1})"
    )


class Server:
    """Answers the flow's effects: each `Send` by the next of its replies, the last one again and again."""

    def __init__(self, *replies: Any, models: Any = None) -> None:
        self.replies = list(replies) or [Answer("ok")]
        self.sent: list[Send] = []
        self.probed: list[str] = []
        self.models = models

    def perform(self, effect: Any) -> Any:
        if isinstance(effect, Probe):
            self.probed.append(effect.path)
            if isinstance(self.models, Exception):
                raise self.models
            return self.models if effect.path == "/models" else None
        if isinstance(effect, Load):
            return None
        assert isinstance(effect, Send)
        self.sent.append(effect)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if callable(reply):
            reply = reply(effect)
        if isinstance(reply, Exception):
            raise reply
        return reply


def call(messages: Any, **options: Any) -> Call:
    return Call(messages=messages, model="m", server="http://s/v1", base_url="http://s/v1", **options)


def guard_with(**options: Any) -> tuple[Guard, list[Event]]:
    events: list[Event] = []
    options.setdefault("budget", ContextBudget(window=1_000, max_response_tokens=100))
    return Guard(counter=COUNTER, on_event=events.append, **options), events


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def test_a_short_request_is_sent_as_it_came():
    guard, events = guard_with()
    server = Server(Answer("ok", prompt_tokens=3))
    assert run_flow(guarded_call(guard, call([user("u")])), server.perform) == "ok"
    assert server.sent == [Send(None)]
    assert kinds(events) == ["counted", "answered"]
    assert events[-1].served_tokens == events[-1].predicted_tokens == 3


def test_a_long_history_is_compacted_before_it_is_sent():
    guard, events = guard_with()
    server = Server()
    run_flow(guarded_call(guard, call(agent_history(30))), server.perform)
    assert COUNTER.count(server.sent[0].messages) <= 900
    assert kinds(events) == ["compacted", "counted", "answered"]


def test_an_error_that_is_not_about_length_passes_through_untouched():
    guard, events = guard_with()
    error = Refusal("Invalid API key", 401)
    with pytest.raises(Refusal) as caught:
        run_flow(guarded_call(guard, call([user("u")])), Server(error).perform)
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert kinds(events) == ["counted"]


def test_a_refusal_of_our_own_roles_is_never_compacted_again():
    guard, _ = guard_with()
    server = Server(Refusal("Conversation roles must alternate user/assistant/user/assistant/..."))
    with pytest.raises(Refusal):
        run_flow(guarded_call(guard, call(agent_history(30))), server.perform)
    assert len(server.sent) == 1


def test_a_smaller_window_is_learnt_from_the_refusal_and_kept_for_the_next_call():
    guard, events = guard_with(budget=ContextBudget(window=10_000, max_response_tokens=100))
    server = Server(too_long(1_000, 3_200), Answer("ok"))
    run_flow(guarded_call(guard, call(agent_history(30))), server.perform)
    assert COUNTER.count(server.sent[1].messages) <= 900
    assert kinds(events) == ["counted", "refused", "compacted", "counted", "answered"]
    refused = next(event for event in events if isinstance(event, Refused))
    assert (refused.limit, refused.learnt) == (1_000, True)
    later = Server()
    run_flow(guarded_call(guard, call(agent_history(31))), later.perform)
    assert COUNTER.count(later.sent[0].messages) <= 900
    assert guard.learnt_prompt_limit("http://s/v1", "m") is None  # the window says it all


def test_a_lower_bound_teaches_the_limit_and_is_not_believed_as_a_size():
    guard, _ = guard_with(budget=ContextBudget(window=10_000, max_response_tokens=100))
    server = Server(at_least(1_000), Answer("ok"))
    run_flow(guarded_call(guard, call(agent_history(30))), server.perform)
    assert COUNTER.count(server.sent[1].messages) <= 900


def test_a_server_that_counts_more_than_we_do_is_met_by_its_own_count():
    guard, _ = guard_with()
    real = Server(lambda send: too_long(1_000, 1_500), Answer("ok"))
    history = agent_history(7)  # we count under 900; the server counts 1500
    run_flow(guarded_call(guard, call(history)), real.perform)
    ours = COUNTER.count(history)
    assert COUNTER.count(real.sent[1].messages) <= 900 * ours / 1_500
    later = Server()
    run_flow(guarded_call(guard, call(history)), later.perform)
    assert COUNTER.count(later.sent[0].messages) <= 900 * ours / 1_500


def test_a_refusal_with_status_200_is_one_too():
    guard, _ = guard_with(budget=ContextBudget(window=10_000, max_response_tokens=100))
    body = {"error": too_long(1_000, 3_200).body}
    server = Server(Answer(None, error_body=body), Answer("ok"))
    assert run_flow(guarded_call(guard, call(agent_history(30))), server.perform) == "ok"


def test_a_200_with_another_error_is_handed_to_the_caller():
    guard, _ = guard_with()
    odd = Answer("odd", error_body={"error": {"message": "Provider returned error", "code": 502}})
    assert run_flow(guarded_call(guard, call([user("u")])), Server(odd).perform) == "odd"


def test_it_gives_up_after_its_permitted_tries_with_true_numbers_and_the_cause():
    guard, events = guard_with(max_attempts=3)
    scope = RolloutScope("r")
    server = Server(too_long(1_000, 1_001))
    with pytest.raises(ContextOverflowError) as caught:
        run_flow(guarded_call(guard, call(agent_history(30), scope=scope)), server.perform)
    error = caught.value
    assert (error.reason, error.attempts, error.window) == ("refused", 3, 1_000)
    assert isinstance(error.__cause__, Refusal)
    assert scope.failure is error
    assert kinds(events)[-1] == "failed"
    sizes = [COUNTER.count(send.messages) for send in server.sent]
    assert sizes == sorted(set(sizes), reverse=True)


def test_what_cannot_fit_fails_before_anything_is_sent():
    guard, events = guard_with()
    scope = RolloutScope("r")
    server = Server()
    with pytest.raises(ContextOverflowError) as caught:
        run_flow(guarded_call(guard, call([user(words(2_000))], scope=scope)), server.perform)
    assert server.sent == []
    assert caught.value.attempts == 0
    assert scope.failure is caught.value
    assert isinstance(events[-1], Failed)


@pytest.mark.parametrize("limit", [1_000, 5_000, 0, -3])
def test_an_output_limit_that_leaves_no_room_is_an_error_of_its_own(limit):
    guard, _ = guard_with()
    scope = RolloutScope("r")
    server = Server()
    with pytest.raises(ContextOverflowError, match=f"max_tokens={limit} leaves no room") as caught:
        run_flow(
            guarded_call(guard, call([user("u")], output_limit=("max_tokens", limit), scope=scope)),
            server.perform,
        )
    assert caught.value.reason == "output_budget"
    assert scope.failure is caught.value
    assert server.sent == []


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        (None, ("max_tokens", 100)),  # an absent limit is set to the reserve
        (5_000, ("max_tokens", 100)),  # a limit over the budget is lowered to it
        (50, None),  # a lower one is the caller's business
    ],
)
def test_the_output_limit_is_set_or_lowered_only_when_asked_and_reported(asked, sent):
    limit = None if asked is None else ("max_tokens", asked)
    for response, expected in (("keep", None), ("enforce", sent)):
        if response == "keep" and asked == 5_000:
            continue  # an error: see above
        guard, events = guard_with(response=response)
        server = Server()
        run_flow(guarded_call(guard, call([user("u")], output_limit=limit)), server.perform)
        assert server.sent[0].output_limit == expected
        limited = [event for event in events if isinstance(event, OutputLimited)]
        assert [(event.before, event.after) for event in limited] == ([(asked, 100)] if expected else [])


def test_observe_counts_and_reports_and_sends_the_request_as_it_came():
    reports: list[Any] = []
    guard, events = guard_with(mode="observe", on_report=reports.append)
    server = Server()
    run_flow(guarded_call(guard, call(agent_history(30))), server.perform)
    assert server.sent == [Send(None)]
    assert kinds(events) == ["counted", "answered"]
    assert reports[0].path == "observed"
    assert reports[0].dropped + reports[0].altered > 0
    assert events[0].prompt_tokens == COUNTER.count(agent_history(30))


def test_observe_lets_what_cannot_fit_and_what_is_refused_pass_but_latches_it():
    guard, events = guard_with(mode="observe")
    scope = RolloutScope("r")
    error = too_long(1_000, 2_000)
    with pytest.raises(Refusal) as caught:
        run_flow(guarded_call(guard, call([user(words(2_000))], scope=scope)), Server(error).perform)
    assert caught.value is error
    assert scope.failure is not None
    assert "refused" in kinds(events)


def test_observe_never_asks_a_model_for_a_summary():
    guard, events = guard_with(mode="observe", strategies=[SummarizeOldTurns(max_summary_tokens=50)])
    server = Server()
    run_flow(guarded_call(guard, call(agent_history(30))), server.perform)
    assert server.sent == [Send(None)]
    assert kinds(events) == ["counted", "answered"]


def test_off_does_nothing_but_count_the_call():
    guard, events = guard_with(mode="off")
    server = Server()
    scope = RolloutScope("r")
    run_flow(guarded_call(guard, call([user(words(2_000))], scope=scope)), server.perform)
    assert server.sent == [Send(None)]
    assert events == []
    assert (scope.calls.tried, scope.calls.ok) == (1, 1)


def test_a_mode_can_be_set_for_some_calls_only():
    guard, _ = guard_with()
    with guard.using("off"):
        assert guard.effective_mode == "off"
    assert guard.effective_mode == "enforce"


MODELS: list[tuple[dict[str, Any], int]] = [
    ({"data": [{"id": "other"}, {"id": "m", "max_model_len": 1_000}]}, 1_000),  # vLLM, SGLang
    ({"data": [{"id": "m", "meta": {"n_ctx": 1_000, "n_ctx_train": 40_960}}]}, 1_000),  # llama.cpp, per slot
    ({"data": [{"id": "alias", "max_model_len": 1_000}]}, 1_000),  # the only model there is
    ({"data": [{"id": "m", "context_length": 1_000}]}, 1_000),  # hosted gateways
]


@pytest.mark.parametrize(("models", "window"), MODELS)
def test_the_window_is_found_at_the_server(models, window):
    guard, events = guard_with(budget=None)
    server = Server(models=models)
    run_flow(guarded_call(guard, call(agent_history(30))), server.perform)
    counted = next(event for event in events if isinstance(event, Counted))
    assert counted.prompt_limit == window - window // 4
    run_flow(guarded_call(guard, call(agent_history(30))), server.perform)
    assert server.probed == ["/models"]  # asked once


@pytest.mark.parametrize(
    "models",
    [None, {}, {"data": []}, {"data": [{"id": "a"}, {"id": "b", "max_model_len": 5}]}, {"data": "x"}],
)
def test_a_window_that_nobody_tells_is_an_error_that_names_three_ways(models):
    guard, _ = guard_with(budget=None)
    server = Server(models=models)
    with pytest.raises(WindowUnknownError, match="from_verl") as caught:
        run_flow(guarded_call(guard, call([user("u")])), server.perform)
    assert "ContextBudget(window=" in str(caught.value)
    assert server.probed == ["/models", "//props", "//get_server_info"]


def test_a_server_that_is_down_is_named():
    guard, _ = guard_with(budget=None)
    down = ConnectionError("refused")
    with pytest.raises(ServerUnavailableError, match="http://s/v1 did not answer") as caught:
        run_flow(guarded_call(guard, call([user("u")])), Server(models=down).perform)
    assert caught.value.__cause__ is down


def test_cancellation_reaches_the_flow_and_leaves_it():
    guard, _ = guard_with()

    def cancelled(effect: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_flow(guarded_call(guard, call([user("u")])), cancelled)


numbers = st.integers(-5, 20_000)
replies = st.one_of(
    st.builds(too_long, numbers, numbers),
    st.builds(at_least, numbers),
    st.builds(lambda n: Refusal(f"max_tokens must be at least 1, got {n}."), st.integers(-20, 1)),
    st.just(Refusal("prompt is too long")),
    st.just(Answer(None, error_body={"error": too_long(700, 900).body})),
    st.just(Refusal("Rate limit reached", 429)),
    st.just(Refusal("boom", 500)),
    st.just(Answer("ok")),
)


@settings(max_examples=120, deadline=None)
@given(st.lists(replies, min_size=1, max_size=6), st.integers(1, 40), st.integers(200, 20_000))
def test_whatever_the_server_says_the_flow_ends_and_no_bytes_are_sent_twice(answers, turns, window):
    guard, events = guard_with(budget=ContextBudget(window=window, max_response_tokens=window // 8))
    server = Server(*answers)
    history = agent_history(turns)
    result: Any = None
    try:
        result = run_flow(guarded_call(guard, call(history)), server.perform)
    except (Refusal, CtxguardError) as error:
        result = error
    assert len(server.sent) <= guard.max_attempts
    sizes = [COUNTER.count(history if send.messages is None else send.messages) for send in server.sent]
    assert all(after < before for before, after in pairwise(sizes))
    assert sum(isinstance(event, Answered) for event in events) == (result in ("ok", None))
    assert all(event.tokens_after < event.tokens_before for event in events if isinstance(event, Compacted))
