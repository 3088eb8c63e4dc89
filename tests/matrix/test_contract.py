"""Every way of calling, in every client class: each goes through the guard.

Runs on the oldest and newest supported openai versions (`make test-matrix`), and in `make test` on one.
Each case first *touches* ``client.chat`` (a cached resource bound to the unwrapped client is how a wrapper
loses calls), then wraps, then sends a history that is too long for the server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from ctxguard import ContextBudget, Guard
from ctxguard.client.openai import OpenAIContextOverflowError
from ctxguard.testing import ScriptedModel, WindowedServer
from tests.doubles import WordCounter, agent_history, user, words

WINDOW = 1_000
REPLY = '{"answer": 1}'
MODEL = "m"
LONG = agent_history(20)


class Answer(BaseModel):
    answer: int


class MyOpenAI(openai.OpenAI):
    """A user's subclass."""


class MyAsyncOpenAI(openai.AsyncOpenAI):
    """A user's subclass."""


def _openai(cls: type[Any], server: WindowedServer) -> Any:
    return cls(base_url=server.base_url, api_key="k", max_retries=0)


def _azure(cls: type[Any], server: WindowedServer) -> Any:
    return cls(azure_endpoint=server.url, api_key="k", api_version="2024-10-21", max_retries=0)


def _azure_deployment(cls: type[Any], server: WindowedServer) -> Any:
    return cls(
        azure_endpoint=server.url,
        azure_deployment=MODEL,
        azure_ad_token="t",
        api_version="2024-10-21",
        max_retries=0,
    )


CLIENTS: dict[str, tuple[type[Any], Callable[[type[Any], WindowedServer], Any]]] = {
    "OpenAI": (openai.OpenAI, _openai),
    "AsyncOpenAI": (openai.AsyncOpenAI, _openai),
    "AzureOpenAI": (openai.AzureOpenAI, _azure),
    "AsyncAzureOpenAI": (openai.AsyncAzureOpenAI, _azure_deployment),
    "subclass": (MyOpenAI, _openai),
    "async subclass": (MyAsyncOpenAI, _openai),
}

# Each way is written once for each form; both return the text of the answer.


def _create(client: Any, messages: Any, **kw: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **kw)


def _text(completion: Any) -> Any:
    return completion.choices[0].message.content


def _delta(chunk: Any) -> str:
    return (chunk.choices[0].delta.content or "") if chunk.choices else ""


def stream_helper(client: Any, messages: Any) -> Any:
    with client.chat.completions.stream(model=MODEL, messages=messages) as stream:
        return _text(stream.get_final_completion())


async def astream_helper(client: Any, messages: Any) -> Any:
    async with client.chat.completions.stream(model=MODEL, messages=messages) as stream:
        return _text(await stream.get_final_completion())


def streaming_response(client: Any, messages: Any) -> Any:
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=messages) as response:
        return json.loads(response.read())["choices"][0]["message"]["content"]


async def astreaming_response(client: Any, messages: Any) -> Any:
    raw = client.chat.completions.with_streaming_response
    async with raw.create(model=MODEL, messages=messages) as response:
        return json.loads(await response.read())["choices"][0]["message"]["content"]


async def _acreate(client: Any, messages: Any, **kw: Any) -> Any:
    return await client.chat.completions.create(model=MODEL, messages=messages, **kw)


async def astream(client: Any, messages: Any) -> Any:
    return "".join([_delta(chunk) async for chunk in await _acreate(client, messages, stream=True)])


async def aparse(client: Any, messages: Any) -> Any:
    parsed = await client.chat.completions.parse(model=MODEL, messages=messages, response_format=Answer)
    return parsed.choices[0].message.parsed.model_dump_json().replace(":", ": ")


def parse(client: Any, messages: Any) -> Any:
    parsed = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Answer)
    return parsed.choices[0].message.parsed.model_dump_json().replace(":", ": ")


async def araw(client: Any, messages: Any) -> Any:
    return _text(
        (await client.chat.completions.with_raw_response.create(model=MODEL, messages=messages)).parse()
    )


async def aclient_raw(client: Any, messages: Any) -> Any:
    return _text(
        (await client.with_raw_response.chat.completions.create(model=MODEL, messages=messages)).parse()
    )


async def acreate(client: Any, messages: Any) -> Any:
    return _text(await _acreate(client, messages))


async def awith_options(client: Any, messages: Any) -> Any:
    return _text(await _acreate(client.with_options(timeout=20), messages))


async def acopy(client: Any, messages: Any) -> Any:
    return _text(await _acreate(client.copy().copy(), messages))


async def aextra_body(client: Any, messages: Any) -> Any:
    return _text(await _acreate(client, [user("short")], extra_body={"messages": messages}))


async def apost(client: Any, messages: Any) -> Any:
    body = {"model": MODEL, "messages": messages}
    return (await client.post("/chat/completions", cast_to=object, body=body))["choices"][0]["message"][
        "content"
    ]


def post(client: Any, messages: Any) -> Any:
    body = {"model": MODEL, "messages": messages}
    return client.post("/chat/completions", cast_to=object, body=body)["choices"][0]["message"]["content"]


def raw(client: Any, messages: Any) -> Any:
    return _text(client.chat.completions.with_raw_response.create(model=MODEL, messages=messages).parse())


def client_raw(client: Any, messages: Any) -> Any:
    return _text(client.with_raw_response.chat.completions.create(model=MODEL, messages=messages).parse())


Way = tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Awaitable[Any]]]
WAYS: dict[str, Way] = {
    "create": (lambda c, m: _text(_create(c, m)), acreate),
    "create(stream=True)": (lambda c, m: "".join(map(_delta, _create(c, m, stream=True))), astream),
    "stream()": (stream_helper, astream_helper),
    "parse()": (parse, aparse),
    "resource.with_raw_response": (raw, araw),
    "client.with_raw_response": (client_raw, aclient_raw),
    "with_streaming_response": (streaming_response, astreaming_response),
    "with_options()": (lambda c, m: _text(_create(c.with_options(timeout=20), m)), awith_options),
    "copy().copy()": (lambda c, m: _text(_create(c.copy().copy(), m)), acopy),
    "extra_body": (lambda c, m: _text(_create(c, [user("short")], extra_body={"messages": m})), aextra_body),
    "client.post()": (post, apost),
}


@pytest.fixture
def server():
    with WindowedServer(
        WordCounter(), window=WINDOW, model=ScriptedModel(lambda messages, tools: REPLY)
    ) as server:
        yield server


def make(name: str, server: WindowedServer) -> Any:
    cls, build = CLIENTS[name]
    client = build(cls, server)
    assert client.chat.completions is not None  # touched before it is wrapped
    return client


def run(client: Any, way: str, messages: Any) -> Any:
    sync, coroutine = WAYS[way]
    if isinstance(client, openai.AsyncOpenAI):
        return asyncio.run(_then_close(coroutine(client, messages), client))
    return sync(client, messages)


async def _then_close(answer: Awaitable[Any], client: Any) -> Any:
    try:
        return await answer
    finally:
        await client.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CLIENTS)
def test_every_way_of_calling_goes_through_the_guard(name, way, server):
    guard = Guard(ContextBudget(window=WINDOW, max_response_tokens=100), counter=WordCounter())
    client = make(name, server)
    wrapped = guard.wrap(client)
    assert isinstance(wrapped, type(client))
    assert type(wrapped).__name__ == type(client).__name__
    assert run(wrapped, way, LONG) == REPLY
    assert len(server.requests) == 1
    assert WordCounter().count(server.requests[0]["messages"]) <= 900


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CLIENTS)
def test_every_way_of_calling_recovers_from_a_window_that_was_given_too_large(name, way, server):
    guard = Guard(ContextBudget(window=10 * WINDOW, max_response_tokens=100), counter=WordCounter())
    assert run(guard.wrap(make(name, server)), way, LONG) == REPLY
    sizes = [WordCounter().count(request["messages"]) for request in server.requests]
    assert 2 <= len(sizes) <= 3
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CLIENTS)
def test_what_cannot_fit_raises_the_error_that_the_stack_above_understands(name, way, server):
    guard = Guard(ContextBudget(window=WINDOW, max_response_tokens=100), counter=WordCounter())
    with pytest.raises(OpenAIContextOverflowError) as caught:
        run(guard.wrap(make(name, server)), way, [user(words(2_000))])
    error = caught.value
    assert isinstance(error, openai.BadRequestError)
    assert (error.status_code, error.code) == (400, "context_length_exceeded")
    assert "maximum context length" in str(error)
    assert error.limit == 900
    assert server.requests == []


@pytest.mark.parametrize("name", CLIENTS)
def test_the_original_client_stays_unguarded_and_shares_its_connections(name, server):
    client = make(name, server)
    wrapped = Guard(ContextBudget(window=WINDOW), counter=WordCounter()).wrap(client)
    assert wrapped._client is client._client
    with pytest.raises(openai.BadRequestError) as caught:
        run(client, "create", LONG)
    assert not isinstance(caught.value, OpenAIContextOverflowError)


@pytest.mark.parametrize("name", CLIENTS)
def test_wrapping_twice_replaces_the_guard(name, server):
    seen: list[str] = []
    inner = Guard(
        ContextBudget(window=WINDOW), counter=WordCounter(), on_event=lambda e: seen.append("inner")
    )
    outer = Guard(
        ContextBudget(window=WINDOW), counter=WordCounter(), on_event=lambda e: seen.append("outer")
    )
    run(outer.wrap(inner.wrap(make(name, server))), "create", [user("hi")])
    assert set(seen) == {"outer"}


@pytest.mark.parametrize("name", CLIENTS)
def test_settings_of_the_client_are_kept(name, server):
    cls, build = CLIENTS[name]
    client = build(cls, server).with_options(timeout=7, max_retries=4, default_headers={"x-mine": "1"})
    wrapped = Guard(ContextBudget(window=WINDOW), counter=WordCounter()).wrap(client)
    assert (wrapped.timeout, wrapped.max_retries) == (7, 4)
    assert wrapped.default_headers["x-mine"] == "1"
    assert str(wrapped.base_url) == str(client.base_url)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_short_request_goes_out_as_it_came(name, server):
    client = make(name, server)
    messages = [user("hi"), {"role": "assistant", "content": None, "refusal": None}, user("there")]
    run(Guard(ContextBudget(window=WINDOW), counter=WordCounter()).wrap(client), "create", messages)
    run(make(name, server), "create", messages)
    guarded, plain = server.requests
    assert guarded == plain
