"""Public reports of people who met context limits, each as a small run of the same fault.

The numbers C01, C07, … are those under which the reports were collected.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from ctxguard import ChatTemplateCounter, ContextBudget, FailureReason, Guard, guarded_rollout
from ctxguard.events import Answered
from ctxguard.testing import ScriptedModel, WindowedServer
from tests.doubles import WordCounter, agent_history, assistant, call, result, user, words

REPORTED_WINDOW = 20_480


@pytest.fixture(scope="module")
def qwen3(qwen3_folder):
    return ChatTemplateCounter.from_folder(qwen3_folder)


def reported_history(turns: int) -> list[dict[str, Any]]:
    """A multi-turn tool agent of the reported size: about 1,500 tokens a turn."""
    history: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent with tools."}]
    history.append(user("Find out why the nightly job fails."))
    for turn in range(turns):
        history.append(assistant(call(f"c{turn}", arguments=f'{{"path": "log_{turn}.txt"}}')))
        body = "\n".join(f"2026-12-01 03:{n % 60:02} worker-{turn} processed row {n}" for n in range(55))
        history.append(result(f"c{turn}", body))
    return history


def rollout(client: Any, turns: int) -> Any:
    @guarded_rollout(require_calls=False)
    def run() -> float:
        for turn in range(2, turns + 1):
            client.chat.completions.create(model="m", messages=reported_history(turn), max_tokens=1_024)
        return 1.0

    return run()


def test_c01_the_reported_run_ends_every_rollout_once_and_sends_nothing_too_long(qwen3):
    """Window 20480, requests of 22k-61k tokens: refused and lost without the guard, carried through with it."""
    sizes = [qwen3.count(reported_history(turns)) for turns in (12, 34)]
    assert sizes[0] > 15_000
    assert 45_000 < sizes[1] < 61_000
    with WindowedServer(qwen3, window=REPORTED_WINDOW, model=ScriptedModel(lambda m, t: "ok")) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
        unguarded = rollout(client, 34)
        assert unguarded.failure.reason is FailureReason.CONTEXT_OVERFLOW
        refused_at = len(server.requests)

        events: list[Any] = []
        guard = Guard(
            ContextBudget(window=REPORTED_WINDOW, max_prompt_tokens=12_288, max_response_tokens=8_192),
            counter=qwen3,
            on_event=events.append,
        )
        guarded = guard.wrap(client)
        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(lambda _: rollout(guarded, 34), range(4)))
        client.close()
    assert [outcome.reward for outcome in outcomes] == [1.0] * 4
    assert len({outcome.rollout_id for outcome in outcomes}) == 4
    assert len(server.requests) - refused_at == 4 * 33  # one request a call: not one was refused
    answered = [event for event in events if isinstance(event, Answered)]
    assert all(event.predicted_tokens == event.served_tokens <= 12_288 for event in answered)


def test_c03_no_call_made_and_no_call_answered_are_told_apart():
    with WindowedServer(WordCounter(), window=1_000) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
        guarded = Guard(1_000, counter=WordCounter()).wrap(client)

        @guarded_rollout
        def tries() -> float:
            for _ in range(3):
                try:
                    guarded.chat.completions.create(model="m", messages=[user(words(2_000))])
                except openai.BadRequestError:
                    continue
            return 1.0

        failed, idle = tries(), guarded_rollout(lambda: 1.0)()
        client.close()
    assert (failed.calls.tried, failed.calls.ok, failed.calls.overflow) == (3, 0, 3)
    assert failed.failure.reason is FailureReason.SWALLOWED_OVERFLOW
    assert idle.failure.reason is FailureReason.NO_CALLS


@pytest.mark.parametrize("style", ["vllm", "llama.cpp"])
def test_c07_an_output_budget_below_one_is_a_prompt_overflow_and_is_caught_before_sending(style):
    """Window 256, prompt 272, no max_tokens: the server would say "max_tokens must be at least 1, got -16"."""
    history = agent_history(2, result_words=118)
    assert WordCounter().count(history) > 256
    with WindowedServer(WordCounter(), window=256, style=style) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
        guard = Guard(ContextBudget(window=256, max_response_tokens=16), counter=WordCounter())
        guard.wrap(client).chat.completions.create(model="m", messages=history)
        assert len(server.requests) == 1
        assert "max_tokens" not in server.requests[0]
        assert WordCounter().count(server.requests[0]["messages"]) <= 240
        client.close()


def test_c07_the_disguised_refusal_is_recognised_when_the_guard_was_given_too_large_a_window():
    """The prompt fills the window exactly: vLLM blames a max_tokens that was never sent."""
    history = agent_history(2, result_words=100)
    window = WordCounter().count(history)
    with WindowedServer(WordCounter(), window=window, style="vllm") as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1, got 0"):
            client.chat.completions.create(model="m", messages=history)
        guard = Guard(ContextBudget(window=2 * window, max_response_tokens=16), counter=WordCounter())
        guard.wrap(client).chat.completions.create(model="m", messages=history)
        assert len(server.requests) == 3
        client.close()


def test_c16_what_is_kept_is_sent_back_byte_for_byte():
    """Odd spacing in arguments and trailing newlines in text survive; tidying them breaks prefix caches."""
    odd = assistant(call("a", arguments='{ "a" :1}'), content="x\n\n")
    with WindowedServer(WordCounter(), window=1_000) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
        history = [user("u"), *agent_history(12)[2:], odd, result("a", "1\n")]
        Guard(1_000, counter=WordCounter()).wrap(client).chat.completions.create(model="m", messages=history)
        assert server.requests[0]["messages"][-2:] == [odd, result("a", "1\n")]
        client.close()


def test_c63_one_tool_result_larger_than_the_window_is_cut_and_keeps_its_call(qwen3):
    big = "\n".join(f"row {n}: value {n * n}" for n in range(9_000))
    assert qwen3.count_text(big) > 60_000
    history = [*reported_history(2), assistant(call("big")), result("big", big)]
    with WindowedServer(qwen3, window=REPORTED_WINDOW) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
        guard = Guard(ContextBudget(window=REPORTED_WINDOW, max_response_tokens=1_024), counter=qwen3)
        guard.wrap(client).chat.completions.create(model="m", messages=history)
        sent = server.requests[0]["messages"]
        client.close()
    assert sent[-2] == history[-2]
    assert sent[-1]["tool_call_id"] == "big"
    assert sent[-1]["content"].startswith("row 0: value 0\n")
    assert sent[-1]["content"].endswith(f"row 8999: value {8999 * 8999}")


def test_c70_a_prompt_that_fits_only_without_its_output_limit_is_compacted():
    history = agent_history(3, result_words=150)
    tokens = WordCounter().count(history)
    window = tokens + 50
    with WindowedServer(WordCounter(), window=window, style="vllm-0.10") as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
        guard = Guard(ContextBudget(window=window, max_response_tokens=200), counter=WordCounter())
        guard.wrap(client).chat.completions.create(model="m", messages=history, max_tokens=200)
        assert [request["max_tokens"] for request in server.requests] == [200]
        assert WordCounter().count(server.requests[0]["messages"]) + 200 <= window
        client.close()
