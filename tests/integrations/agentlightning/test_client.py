"""From resources to a guarded client, on a server that knows its window."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ctxguard import ConfigurationError, ContextBudget, Guard
from ctxguard.integrations.agentlightning import (
    client as module,
)
from ctxguard.integrations.agentlightning import (
    default_guard,
    guarded_async_client,
    guarded_client,
    mark_failures,
    request_defaults,
    use_guard,
)
from ctxguard.testing import WindowedServer
from tests.doubles import WordCounter, words
from tests.integrations.agentlightning.fakes import LLM, ProxyLLM, attempted

PROMPT = [{"role": "user", "content": "hello there"}]


@pytest.fixture
def server():
    with WindowedServer(WordCounter(), window=200, tells_window=False) as server:
        yield server


@pytest.fixture(autouse=True)
def guard(monkeypatch):
    """A guard of the process that no other test sees."""
    monkeypatch.setattr(module, "_guard", None)
    return use_guard(Guard(ContextBudget(window=200, max_response_tokens=20), counter=WordCounter()))


def resources(server, kind=ProxyLLM):
    return {
        "prompt": object(),
        "main_llm": kind(server.base_url, sampling_parameters={"temperature": 0.5}),
        "other": kind("http://127.0.0.1:1/v1", model="other"),
    }


def test_the_url_of_a_proxy_names_rollout_and_attempt(server):
    source = resources(server)
    with guarded_client(source, attempted()) as client:
        client.chat.completions.create(**request_defaults(source), messages=PROMPT)
    assert server.completions[0].path == "/rollout/ro-1/attempt/at-1/v1/chat/completions"
    assert server.requests[0]["model"] == "m"
    assert server.requests[0]["temperature"] == 0.5


def test_the_url_of_a_plain_llm_stays(server):
    """0.1, v0 mode, and the ``llm`` that ``@agl.rollout`` hands over in v1 mode."""
    ready = LLM(f"{server.url}/rollout/ro-2/attempt/at-2")
    for source in (LLM(server.base_url), ready, {"llm": ready}):
        with guarded_client(source) as client:
            client.chat.completions.create(**request_defaults(source), messages=PROMPT)
    assert [record.path for record in server.completions] == [
        "/v1/chat/completions",
        *["/rollout/ro-2/attempt/at-2/chat/completions"] * 2,
    ]


def test_the_async_client_does_the_same(server):
    async def main():
        source = resources(server)
        async with guarded_async_client(source, attempted(), timeout=5.0) as client:
            assert client.timeout == 5.0
            await client.chat.completions.create(**request_defaults(source), messages=PROMPT)

    asyncio.run(main())
    assert server.paths == ["/rollout/ro-1/attempt/at-1/v1/chat/completions"]


def test_within_a_marked_rollout_the_ids_are_known(server):
    @mark_failures
    def agent(task, resources, rollout):
        client = guarded_client(resources)
        client.chat.completions.create(**request_defaults(resources), messages=PROMPT)
        return 1.0

    assert agent("t", resources(server), attempted("ro-5", "at-5")) == 1.0
    assert server.paths == ["/rollout/ro-5/attempt/at-5/v1/chat/completions"]


def test_the_client_belongs_to_its_rollout_in_other_threads_too(server):
    @mark_failures
    def agent(task, resources, rollout):
        client = guarded_client(resources)

        def call():
            client.chat.completions.create(**request_defaults(resources), messages=PROMPT)

        thread = threading.Thread(target=call)  # no contextvar gets here
        thread.start()
        thread.join()
        return 1.0

    assert agent("t", resources(server), attempted()) == 1.0  # its one call was counted


def test_a_proxy_without_a_rollout_is_refused_before_its_spans_are_lost(server):
    with pytest.raises(ConfigurationError, match="pass the rollout that the rollout function was given"):
        guarded_client(resources(server))


def test_without_an_llm_the_names_that_are_there_are_told():
    with pytest.raises(ConfigurationError, match="no LLM in prompt, x"):
        guarded_client({"prompt": object(), "x": None})
    with pytest.raises(ConfigurationError, match="no LLM in empty resources"):
        guarded_client({})
    with pytest.raises(ConfigurationError, match="no LLM in str"):
        request_defaults("http://127.0.0.1")


def test_the_key_is_the_llms_and_never_the_environments(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with guarded_client(LLM(server.base_url)) as client:
        assert client.api_key == "none"
    with guarded_client(LLM(server.base_url, api_key="theirs")) as client:
        assert client.api_key == "theirs"
    with guarded_client(LLM(server.base_url), api_key="mine") as client:
        assert client.api_key == "mine"


def test_rollouts_share_what_the_guard_learns(server):
    """One server behind each rollout's URL: what the first one learnt the next one knows."""
    guard = Guard(ContextBudget(window=5_000, max_response_tokens=20), counter=WordCounter())
    history = [{"role": "user", "content": "task"}]
    for number in range(6):
        history += [
            {"role": "assistant", "content": words(30, f"a{number}")},
            {"role": "user", "content": words(10, f"u{number}")},
        ]
    for number in range(2):
        with guarded_client(resources(server), attempted(f"ro-{number}"), guard=guard) as client:
            client.chat.completions.create(model="m", messages=history, max_tokens=20)
    assert [record.status for record in server.completions] == [400, 200, 200]


def test_without_use_guard_there_is_one_plain_guard_for_all(monkeypatch):
    monkeypatch.setattr(module, "_guard", None)
    assert default_guard() is default_guard()
    assert default_guard().budget is None
