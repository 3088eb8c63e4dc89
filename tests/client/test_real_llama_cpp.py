"""Against the real llama.cpp server: our count is its count, and its refusals are recognised and recovered."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from ctxguard import ChatTemplateCounter, ContextBudget, Guard
from ctxguard.client.guard import CountMismatchWarning
from ctxguard.events import Answered, Counted, Event, Refused
from tests.conversations import TOOLS
from tests.doubles import assistant, call, result, user
from tests.message_lists import LISTS

pytestmark = pytest.mark.llamacpp


@pytest.fixture(scope="module")
def counter(qwen3_folder):
    return ChatTemplateCounter.from_folder(qwen3_folder, dialect="llama.cpp")


@pytest.fixture
def client(llama_server):
    client = openai.OpenAI(base_url=llama_server.base_url, api_key="k", max_retries=0)
    yield client
    client.close()


def ask(client: Any, server: Any, messages: Any, tools: Any = None, **options: Any) -> Any:
    if tools:
        options["tools"] = tools
    options.setdefault("max_tokens", 1)
    return client.chat.completions.create(model=server.model, messages=messages, temperature=0, **options)


def history(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [user("Find the bug in the service.")]
    for number in range(turns):
        messages.append(assistant(call(f"c{number}", "read", f'{{"path": "src/module_{number}.py"}}')))
        body = "\n".join(f"{line}: value_{number}_{line} = compute({line})" for line in range(12))
        messages.append(result(f"c{number}", body))
    return messages


@pytest.mark.parametrize("name", LISTS)
def test_predicted_is_served(name, client, llama_server, counter):
    messages, tools, kwargs = LISTS[name]
    extra = {"chat_template_kwargs": kwargs} if kwargs else None
    answer = ask(client, llama_server, messages, tools, extra_body=extra)
    assert counter.count(messages, tools=tools, template_kwargs=kwargs) == answer.usage.prompt_tokens


def test_a_trailing_assistant_message_is_continued_as_a_prefill(client, llama_server, counter):
    messages = [user("hi"), assistant(content="Hel")]
    assert counter.count(messages) == ask(client, llama_server, messages).usage.prompt_tokens


def test_the_window_of_one_slot_is_discovered(client, llama_server, counter):
    events: list[Event] = []
    guard = Guard(counter=counter, on_event=events.append)
    ask(guard.wrap(client), llama_server, [user("hi")], max_tokens=16)
    counted = events[0]
    assert isinstance(counted, Counted)
    assert counted.prompt_limit == llama_server.window - 16


@pytest.mark.parametrize("factor", [1.1, 10])
def test_a_window_given_too_large_is_learnt_from_the_refusal(factor, client, llama_server, counter):
    events: list[Event] = []
    budget = ContextBudget(window=int(llama_server.window * factor), max_response_tokens=16)
    guard = Guard(budget, counter=counter, on_event=events.append)
    answer = ask(guard.wrap(client), llama_server, history(40), TOOLS, max_tokens=16)
    refused = [event for event in events if isinstance(event, Refused)]
    assert [(event.limit, event.learnt) for event in refused] == [(llama_server.window, True)]
    assert answer.usage.prompt_tokens <= llama_server.window - 16
    answered = events[-1]
    assert isinstance(answered, Answered)
    assert answered.predicted_tokens == answered.served_tokens


def test_every_call_of_a_long_rollout_is_predicted_and_none_is_refused(client, llama_server, counter):
    events: list[Event] = []
    guarded = Guard(counter=counter, on_event=events.append).wrap(client)
    whole = history(25)
    for end in range(3, len(whole) + 1, 2):
        ask(guarded, llama_server, whole[:end], TOOLS, max_tokens=2)
    answered = [event for event in events if isinstance(event, Answered)]
    assert len(answered) == 25
    assert all(event.predicted_tokens == event.served_tokens for event in answered)
    assert {event.kind for event in events} == {"counted", "compacted", "answered"}


def test_a_count_that_is_not_the_servers_is_told_once(client, llama_server, qwen3_folder):
    other = Guard(counter=ChatTemplateCounter.from_folder(qwen3_folder, dialect="vllm"))
    messages = [user("cafe\u0301 " * 20)]  # llama.cpp does not normalise; vLLM does
    with pytest.warns(CountMismatchWarning, match=r'dialect="llama\.cpp"'):
        ask(other.wrap(client), llama_server, messages)
    ask(other.wrap(client), llama_server, messages)  # a second warning would be an error
