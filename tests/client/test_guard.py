"""The guard around real clients and a server that knows its window: scopes, bad input, settings."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from ctxguard import (
    CapToolResults,
    ConfigurationError,
    ContextBudget,
    ContextOverflowError,
    FailureReason,
    Guard,
    InvalidMessagesError,
    ServerUnavailableError,
    SummarizeOldTurns,
    UnsupportedClientError,
    WindowUnknownError,
    current_scope,
    guarded_rollout,
    wrap_openai,
)
from ctxguard.client.openai import OpenAIContextOverflowError, UnguardedEndpointWarning
from ctxguard.testing import ScriptedModel, WindowedServer
from tests.doubles import WordCounter, agent_history, user, words

WINDOW = 1_000
BUDGET = ContextBudget(window=WINDOW, max_response_tokens=100)


@pytest.fixture
def server():
    with WindowedServer(
        WordCounter(), window=WINDOW, model=ScriptedModel(lambda messages, tools: "ok")
    ) as server:
        yield server


@pytest.fixture
def client(server):
    client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
    yield client
    client.close()


def guard(**options: Any) -> Guard:
    options.setdefault("budget", BUDGET)
    return Guard(counter=WordCounter(), **options)


def ask(client: Any, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=messages, **options)


def test_one_line_wraps_a_client(client, server):
    guarded = wrap_openai(client, WINDOW, counter=WordCounter())
    assert ask(guarded, agent_history(30)).choices[0].message.content == "ok"
    assert len(server.requests) == 1


def test_the_window_is_asked_of_the_server_when_none_is_given(client, server):
    ask(guard(budget=None).wrap(client), agent_history(30))
    assert WordCounter().count(server.requests[-1]["messages"]) <= WINDOW


# Scopes


def rollout_with(guarded: Any, calls: int = 1, history: Any = None) -> Any:
    @guarded_rollout
    def rollout() -> float:
        for _ in range(calls):
            ask(guarded, history or [user("hi")])
        return 1.0

    return rollout()


def test_calls_are_counted_in_the_rollouts_scope(client):
    guarded = guard().wrap(client)
    outcome = rollout_with(guarded, calls=3, history=agent_history(30))
    assert outcome.status == "succeeded"
    assert (outcome.calls.tried, outcome.calls.ok) == (3, 3)
    assert outcome.calls.compacted == 1
    assert 0 < outcome.calls.peak_prompt_tokens <= 900
    assert outcome.config_fingerprint


def test_a_swallowed_overflow_ends_as_a_failed_rollout(client):
    guarded = guard().wrap(client)

    @guarded_rollout
    def rollout() -> float:
        ask(guarded, [user("hi")])
        with contextlib.suppress(Exception):  # an agent that catches everything
            ask(guarded, [user(words(2_000))])
        return 1.0

    outcome = rollout()
    assert outcome.failure.reason is FailureReason.SWALLOWED_OVERFLOW
    assert outcome.reward is None
    assert outcome.failure.numbers["limit"] == 900


def test_threads_share_the_scope_of_the_rollout_in_which_the_client_was_wrapped(client):
    one_guard = guard()

    @guarded_rollout
    def rollout() -> float:
        guarded = one_guard.wrap(client)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: ask(guarded, [user("hi")]), range(8)))
        return 1.0

    assert rollout().calls.ok == 8


def test_parallel_rollouts_of_one_client_never_share_a_scope(client):
    guarded = guard().wrap(client)
    outcomes: dict[int, Any] = {}

    def run(number: int) -> None:
        outcomes[number] = rollout_with(guarded, calls=number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: outcome.calls.ok for number, outcome in outcomes.items()} == {n: n for n in range(1, 6)}


async def test_asyncio_tasks_share_their_rollouts_scope_and_no_other(server):
    client = openai.AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0)
    guarded = guard().wrap(client)

    @guarded_rollout
    async def rollout(calls: int) -> float:
        tasks = [guarded.chat.completions.create(model="m", messages=[user("hi")]) for _ in range(calls)]
        await asyncio.gather(*(asyncio.create_task(task) for task in tasks))
        return 1.0

    outcomes = await asyncio.gather(*(rollout(n) for n in (1, 2, 3)))
    await client.close()
    assert [outcome.calls.ok for outcome in outcomes] == [1, 2, 3]


def test_without_a_scope_the_url_names_the_rollout_and_limits_are_shared(server):
    events: list[Any] = []
    shared = guard(budget=ContextBudget(window=50_000, max_response_tokens=100), on_event=events.append)
    for rollout in ("r-1", "r-2"):
        url = server.base_url.replace("/v1", f"/rollout/{rollout}/attempt/a-1/v1")
        client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
        ask(shared.wrap(client), agent_history(30))
        client.close()
    assert {(e.rollout_id, e.attempt_id) for e in events} == {("r-1", "a-1"), ("r-2", "a-1")}
    assert [e.rollout_id for e in events if e.kind == "refused"] == ["r-1"]  # learnt once, for both
    assert current_scope() is None


# Bad input


@pytest.mark.parametrize("messages", ["hello", [], [{"content": "no role"}], [7]])
def test_messages_that_are_no_messages_are_named_or_left_to_the_server(client, messages):
    guarded = guard().wrap(client)
    if messages == []:
        with pytest.raises(openai.BadRequestError):
            ask(guarded, messages)
    else:
        with pytest.raises(InvalidMessagesError, match="messages"):
            guarded.post("/chat/completions", cast_to=object, body={"model": "m", "messages": messages})


class NeedsMore(openai.OpenAI):
    """A subclass whose copy() cannot work."""

    def __init__(self, tenant: str, **options: Any) -> None:
        super().__init__(**options)
        self.tenant = tenant


class Frozen(openai.OpenAI):
    """A subclass whose copy() gives back the old client."""

    def copy(self, **options: Any) -> Any:
        return self


def test_a_client_that_cannot_be_wrapped_is_refused_with_the_remedy(server):
    options = {"base_url": server.base_url, "api_key": "k"}
    for client in (NeedsMore("t", **options), Frozen(**options)):
        assert client.chat is not None  # a resource bound to the unwrapped client
        with pytest.raises(UnsupportedClientError, match=r"override\s+copy\(\)"):
            guard().wrap(client)
        client.close()


def test_something_else_than_an_openai_client_is_refused():
    with pytest.raises(UnsupportedClientError, match=r"cannot wrap a builtins\.dict"):
        guard().wrap({})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "on"}, "mode must be one of enforce, observe, off; got 'on'"),
        ({"response": "clamp"}, "response must be one of keep, enforce"),
        ({"max_attempts": 0}, "max_attempts must be at least 1, got 0"),
        ({"tokenizer": "x"}, "either counter=… or tokenizer=…"),
    ],
)
def test_impossible_settings_are_refused(options, says):
    with pytest.raises(ConfigurationError, match=says):
        guard(**options)


def test_a_model_without_a_counter_is_named(client):
    guarded = Guard(BUDGET, counter={"other": WordCounter()}).wrap(client)
    with pytest.raises(ConfigurationError, match="no counter for model 'm'; counters were given for: other"):
        ask(guarded, [user("hi")])


def test_a_server_that_is_down_is_an_error_of_ours_when_it_is_asked_for_its_window():
    client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="k", max_retries=0)
    with pytest.raises(ServerUnavailableError, match=r"127\.0\.0\.1:9"):
        ask(guard(budget=None).wrap(client), [user("hi")])
    with pytest.raises(openai.APIConnectionError):
        ask(guard().wrap(client), [user("hi")])
    client.close()


def test_a_server_that_hides_its_window_is_an_error_that_names_three_ways():
    with WindowedServer(WordCounter(), window=WINDOW, style="openai") as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
        with pytest.raises(WindowUnknownError, match="one of three ways"):
            ask(guard(budget=None).wrap(client), [user("hi")])
        client.close()


@pytest.mark.parametrize("status", [401, 404, 429, 500])
def test_other_errors_of_the_provider_pass_through_unchanged(client, server, status):
    body = {"error": {"message": "something else is wrong", "type": "x", "code": "y"}}
    server.fail_next(status, body)
    with pytest.raises(openai.APIStatusError) as caught:
        ask(guard().wrap(client), agent_history(30))
    assert not isinstance(caught.value, ContextOverflowError)
    assert caught.value.status_code == status
    assert caught.value.body == body["error"]
    assert len(server.requests) == 1


# What the stack above sees


def overflow_of(client: Any) -> OpenAIContextOverflowError:
    with pytest.raises(OpenAIContextOverflowError) as caught:
        ask(guard().wrap(client), [user(words(2_000))])
    return caught.value


def test_our_error_is_a_bad_request_with_the_known_code(client):
    error = overflow_of(client)
    assert (error.status_code, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert error.response.status_code == 400
    assert error.limit == 900


def test_our_error_survives_pickling_and_copying(client):
    error = overflow_of(client)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(twin, openai.BadRequestError)
        assert (twin.code, twin.limit, twin.prompt_tokens, str(twin)) == (
            error.code,
            error.limit,
            error.prompt_tokens,
            str(error),
        )


def test_a_refusal_keeps_the_servers_answer_on_the_cause(client, server):
    body = {"error": {"message": "prompt is too long", "type": "x", "code": 400}}
    server.fail_next(400, body, times=5)
    with pytest.raises(OpenAIContextOverflowError) as caught:
        ask(guard(max_attempts=2).wrap(client), agent_history(30))
    assert isinstance(caught.value.__cause__, openai.BadRequestError)
    assert caught.value.__cause__.body == body["error"]
    assert caught.value.attempts == 2


# Requests


def test_a_streamed_refusal_before_the_first_byte_is_recovered(client, server):
    guarded = guard(budget=ContextBudget(window=50_000, max_response_tokens=100)).wrap(client)
    chunks = list(ask(guarded, agent_history(30), stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "ok"
    assert len(server.requests) == 2


def test_an_idempotency_key_is_not_sent_with_another_body(client, server):
    guarded = guard().wrap(client)
    for history in ([user("hi")], agent_history(30)):
        ask(guarded, history, extra_headers={"Idempotency-Key": "mine"})
    assert [h.get("idempotency-key") for h in server.headers] == ["mine", None]


def test_the_output_limit_is_left_alone_or_set_as_asked(client, server):
    ask(guard().wrap(client), [user("hi")])
    ask(guard().wrap(client), [user("hi")], max_completion_tokens=50)
    ask(guard(response="enforce").wrap(client), [user("hi")])
    ask(guard(response="enforce").wrap(client), [user("hi")], max_completion_tokens=500)
    limits = [(r.get("max_tokens"), r.get("max_completion_tokens")) for r in server.requests]
    assert limits == [(None, None), (None, 50), (100, None), (None, 100)]


def test_an_endpoint_that_is_not_guarded_is_named_once(client):
    guarded = guard().wrap(client)
    with pytest.warns(UnguardedEndpointWarning, match="/completions"), pytest.raises(openai.APIStatusError):
        guarded.completions.create(model="m", prompt="x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(openai.APIStatusError):
            guarded.completions.create(model="m", prompt="x")


def test_tool_results_are_capped_on_first_sight_when_asked(client, server):
    ask(guard(strategies=[CapToolResults(max_tokens=20)]).wrap(client), agent_history(2))
    results = [m["content"] for m in server.requests[0]["messages"] if m["role"] == "tool"]
    assert [WordCounter().count_text(text) for text in results] == [20, 20]


def test_a_summary_is_asked_for_through_the_unguarded_client_off_the_rollouts_path(server):
    url = server.base_url.replace("/v1", "/rollout/r-1/attempt/a-1/v1")
    client = openai.OpenAI(base_url=url, api_key="k", max_retries=0)
    seen: list[Any] = []
    summarizing = guard(strategies=[SummarizeOldTurns(max_summary_tokens=50)], on_event=seen.append)
    ask(summarizing.wrap(client), agent_history(9))
    client.close()
    summary, request = server.requests
    assert server.paths == ["/v1/chat/completions", "/rollout/r-1/attempt/a-1/v1/chat/completions"]
    assert summary["max_tokens"] == 50
    assert "<summary_of_earlier_turns>\nok\n" in request["messages"][1]["content"]
    assert [e.kind for e in seen] == ["compacted", "counted", "answered"]
