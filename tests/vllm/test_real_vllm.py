"""Against the real vLLM on the CPU: our count is its count, and its refusals are recognised and recovered.

Run by `make test-vllm`, inside the vLLM virtualenv.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest

from ctxguard import (
    ChatTemplateCounter,
    ContextBudget,
    ContextOverflowError,
    Guard,
    HistoryManager,
    SummarizeOldTurns,
)
from ctxguard.events import Answered, Event, Refused
from tests.conversations import TOOLS as AGENT_TOOLS
from tests.doubles import assistant, call, result, user
from tests.message_lists import LISTS, REASONING

pytestmark = pytest.mark.vllm
ALL = LISTS | REASONING


@pytest.fixture(scope="session")
def counter(vllm_server):
    return ChatTemplateCounter.from_folder(vllm_server.model_folder)


@pytest.fixture
def client(vllm_server):
    client = openai.OpenAI(base_url=vllm_server.base_url, api_key="k", max_retries=0)
    yield client
    client.close()


def ask(client: Any, server: Any, messages: Any, tools: Any = None, **options: Any) -> Any:
    if tools:
        options["tools"] = tools
    return client.chat.completions.create(model=server.model, messages=messages, temperature=0, **options)


def history(turns: int, lines: int = 12) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [user("Find the bug in the service.")]
    for number in range(turns):
        messages.append(assistant(call(f"c{number}", "read", f'{{"path": "src/module_{number}.py"}}')))
        body = "\n".join(f"{line}: value_{number}_{line} = compute({line})" for line in range(lines))
        messages.append(result(f"c{number}", body))
    return messages


def text_of_size(counter: ChatTemplateCounter, tokens: int) -> list[dict[str, Any]]:
    """A prompt of exactly this many tokens."""
    base = counter.count([user("x")])
    messages = [user("x" + " word" * (tokens - base))]
    assert counter.count(messages) == tokens
    return messages


@pytest.mark.parametrize("name", ALL)
def test_predicted_is_served(name, client, vllm_server, counter):
    messages, tools, kwargs = ALL[name]
    extra = {"chat_template_kwargs": kwargs} if kwargs else None
    answer = ask(client, vllm_server, messages, tools, max_tokens=1, extra_body=extra)
    assert counter.count(messages, tools=tools, template_kwargs=kwargs) == answer.usage.prompt_tokens


def test_at_least_thirty_lists_are_compared():
    assert len(ALL) >= 30


def test_a_prefilled_answer_is_counted_as_vllm_counts_it(client, vllm_server, counter):
    messages = [user("hi"), assistant(content="Hel")]
    prefill = {"add_generation_prompt": False, "continue_final_message": True}
    for options in ({}, prefill):
        answer = ask(client, vllm_server, messages, max_tokens=1, extra_body=options)
        assert counter.count(messages, template_kwargs=options) == answer.usage.prompt_tokens


def test_the_window_is_discovered(client, vllm_server, counter):
    guard = Guard(counter=counter)
    ask(guard.wrap(client), vllm_server, [user("hi")], max_tokens=1)
    assert guard._budgets[next(iter(guard._budgets))].window == vllm_server.window


def test_window_minus_one_is_served_and_the_window_itself_is_refused(client, vllm_server, counter):
    window = vllm_server.window
    served = ask(client, vllm_server, text_of_size(counter, window - 1), max_tokens=1)
    assert served.usage.prompt_tokens == window - 1
    for size in (window, window + 1, 3 * window):
        with pytest.raises(openai.BadRequestError):
            ask(client, vllm_server, text_of_size(counter, size), max_tokens=1)


def test_prompts_around_the_window_are_fitted_before_they_are_sent(client, vllm_server, counter):
    window = vllm_server.window
    budget = ContextBudget(window=window, max_response_tokens=1)
    for size in (window - 1, window, window + 1, 3 * window):
        events: list[Event] = []
        guard = Guard(budget, counter=counter, on_event=events.append)
        messages = [user("hi"), assistant(content="yes?"), *text_of_size(counter, size)]
        answer = ask(guard.wrap(client), vllm_server, messages, max_tokens=1)
        assert answer.usage.prompt_tokens <= window - 1
        assert not any(isinstance(event, Refused) for event in events)
        answered = events[-1]
        assert isinstance(answered, Answered)
        assert answered.predicted_tokens == answered.served_tokens


@pytest.mark.parametrize("factor", [1.1, 10])
def test_a_window_given_too_large_is_learnt_and_at_least_is_not_believed(
    factor, client, vllm_server, counter
):
    events: list[Event] = []
    budget = ContextBudget(window=int(vllm_server.window * factor), max_response_tokens=16)
    guard = Guard(budget, counter=counter, on_event=events.append)
    long = history(60)
    answer = ask(guard.wrap(client), vllm_server, long, AGENT_TOOLS, max_tokens=16)
    refused = [event for event in events if isinstance(event, Refused)]
    assert [event.limit for event in refused] == [vllm_server.window]
    assert answer.usage.prompt_tokens <= vllm_server.window - 16
    answered = events[-1]
    assert isinstance(answered, Answered)
    assert (answered.attempts, answered.predicted_tokens) == (2, answered.served_tokens)
    events.clear()
    ask(guard.wrap(client), vllm_server, [*long, user("go on")], AGENT_TOOLS, max_tokens=16)
    assert not any(isinstance(event, Refused) for event in events)


def test_the_disguised_overflow_is_recovered(client, vllm_server, counter):
    """A prompt that fills the window: vLLM blames max_tokens, although we sent none."""
    events: list[Event] = []
    window = vllm_server.window
    budget = ContextBudget(window=window + 200, max_prompt_tokens=window, high_mark=1.0)
    guard = Guard(budget, counter=counter, on_event=events.append)
    messages = [user("hi"), assistant(content="yes?"), *text_of_size(counter, vllm_server.window - 40)]
    exact = vllm_server.window - counter.count(messages)
    messages[-1] = user(messages[-1]["content"] + " word" * exact)
    assert counter.count(messages) == vllm_server.window
    ask(guard.wrap(client), vllm_server, messages, max_tokens=8)
    refused = [event for event in events if isinstance(event, Refused)]
    assert [event.refusal for event in refused] == ["prompt_too_long"]


def test_what_cannot_fit_is_refused_by_both(client, vllm_server, counter):
    guard = Guard(ContextBudget(window=vllm_server.window), counter=counter)
    messages = text_of_size(counter, 3 * vllm_server.window)
    with pytest.raises(ContextOverflowError):
        ask(guard.wrap(client), vllm_server, messages)
    with pytest.raises(openai.BadRequestError):
        ask(client, vllm_server, messages)


def test_every_call_of_a_long_rollout_is_predicted(client, vllm_server, counter):
    events: list[Event] = []
    guard = Guard(counter=counter, on_event=events.append)
    guarded = guard.wrap(client)
    whole = history(25)
    for end in range(3, len(whole) + 1, 2):
        ask(guarded, vllm_server, whole[:end], AGENT_TOOLS, max_tokens=2)
    answered = [event for event in events if isinstance(event, Answered)]
    assert len(answered) == 25
    assert all(event.predicted_tokens == event.served_tokens for event in answered)
    assert any(event.kind == "compacted" for event in events)


def test_a_summary_by_the_served_model_is_kept_or_refused_and_the_call_goes_through(
    client, vllm_server, counter
):
    events: list[Event] = []
    guard = Guard(
        counter=counter,
        strategies=[SummarizeOldTurns(max_summary_tokens=64), *HistoryManager(counter).strategies],
        on_event=events.append,
    )
    answer = ask(guard.wrap(client), vllm_server, history(30), AGENT_TOOLS, max_tokens=4)
    assert answer.usage.prompt_tokens <= vllm_server.window
    assert events[-1].kind == "answered"
