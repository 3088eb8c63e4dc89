from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from ctxguard.errors import ConfigurationError, TemplateRefusedError
from ctxguard.testing import ScriptedModel, WindowedServer, tool_call
from tests.doubles import WordCounter, user, words

TOOLS = [{"type": "function", "function": {"name": "read", "description": "d", "parameters": {}}}]
HI = [user("hi")]


@pytest.fixture
def connect():
    """Makes clients and closes them."""
    clients = []

    def make(server, cls=openai.OpenAI, **options):
        options = options or {"base_url": server.base_url}
        clients.append(cls(api_key="k", max_retries=0, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def ask(client, messages=HI, **options):
    return client.chat.completions.create(model="m", messages=messages, **options)


def get(url):
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def post(url, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_usage_is_true_and_requests_are_recorded(connect):
    with WindowedServer(WordCounter(), window=100, model=["three little words"]) as server:
        answer = ask(connect(server), [user("one two")], tools=TOOLS, extra_headers={"X-Mine": "1"})
        expected = WordCounter().count([user("one two")], tools=TOOLS)
        assert answer.choices[0].message.content == "three little words"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": expected,
            "completion_tokens": 3,
            "total_tokens": expected + 3,
        }
        assert server.requests == [{"model": "m", "messages": [user("one two")], "tools": TOOLS}]
        assert server.paths == ["/v1/chat/completions"]
        assert server.headers[0]["x-mine"] == "1"
        [record] = server.completions
        assert (record.status, record.prompt_tokens) == (200, expected)
        assert json.loads(record.raw) == server.requests[0]
        assert server.bytes == [len(record.raw)]
        server.forget()
        assert server.records == []


def test_tool_calls_come_back_and_their_results_are_seen(connect):
    script = [
        [tool_call("read", {"path": "a"}), tool_call("read", {"path": "b"})],
        lambda messages, tools: messages[-1]["content"] + tools[0]["function"]["name"],
    ]
    with WindowedServer(WordCounter(), window=100, model=script) as server:
        client = connect(server)
        first = ask(client, HI, tools=TOOLS).choices[0]
        assert first.finish_reason == "tool_calls"
        assert [call.function.arguments for call in first.message.tool_calls] == [
            '{"path": "a"}',
            '{"path": "b"}',
        ]
        history = [
            *HI,
            first.message,
            *({"role": "tool", "tool_call_id": f"call_{n}", "content": "r"} for n in (1, 2)),
        ]
        assert ask(client, history, tools=TOOLS).choices[0].message.content == "rread"


@pytest.mark.parametrize("style", ["vllm", "llama.cpp", "azure"])
def test_streams_text_calls_and_usage(connect, style):
    reply = {"content": "a longer text", "tool_calls": [tool_call("read", {"path": "a.py"}, id="c")]}
    with WindowedServer(
        WordCounter(), window=100, model=ScriptedModel([reply, reply]), style=style
    ) as server:
        client = connect(server)
        chunks = list(ask(client, HI, stream=True, stream_options={"include_usage": True}))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "a longer text"
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert (calls[0].id, calls[0].function.name) == ("c", "read")
        assert "".join(call.function.arguments for call in calls) == '{"path": "a.py"}'
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
        assert chunks[-1].usage.prompt_tokens == WordCounter().count(HI)
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert bool(chunks[0].choices) == (style != "azure")
        assert all(chunk.usage is None for chunk in ask(client, HI, stream=True))


def test_the_stream_helper_puts_it_together(connect):
    with WindowedServer(WordCounter(), window=100, model=["a b c"]) as server:
        with connect(server).chat.completions.stream(model="m", messages=HI) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.content == "a b c"


def test_refuses_and_serves_around_its_window(connect):
    with WindowedServer(WordCounter(), window=100) as server:
        client = connect(server)
        assert ask(client, [user(words(97))]).usage.prompt_tokens == 99
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1, got 0"):
                ask(client, [user(words(98))], max_tokens=5, stream=stream)
            with pytest.raises(openai.BadRequestError, match="at least 101 input tokens"):
                ask(client, [user(words(500))], stream=stream)
        assert [record.status for record in server.completions] == [200, 400, 400, 400, 400]
        assert server.completions[-1].prompt_tokens == 502


def test_an_answer_ends_at_its_limit_or_at_the_window(connect):
    with WindowedServer(WordCounter(), window=100, model=lambda m, t: words(50)) as server:
        client = connect(server)
        for prompt, limit, left in [(10, 7, 7), (10, None, 50), (70, None, 28), (70, 90, 28)]:
            options = {} if limit is None else {"max_tokens": limit}
            answer = ask(client, [user(words(prompt))], **options)
            assert answer.usage.completion_tokens == left
            assert len(answer.choices[0].message.content.split()) == left
            assert answer.choices[0].finish_reason == ("stop" if left == 50 else "length")


def test_openai_tells_messages_and_functions_apart(connect):
    with WindowedServer(WordCounter(), window=50, style="openai") as server:
        client = connect(server)
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, [user(words(60))], tools=TOOLS)
        total = WordCounter().count([user(words(60))], tools=TOOLS)
        assert f"resulted in {total} tokens (62 in the messages, {total - 62} in the functions)" in str(
            caught.value
        )
        assert caught.value.code == "context_length_exceeded"


def test_azure_and_rollout_paths_are_served(connect):
    with WindowedServer(WordCounter(), window=50, style="azure") as server:
        options = {"azure_endpoint": server.url, "api_version": "2024-10-21"}
        assert ask(connect(server, openai.AzureOpenAI, **options)).choices[0].message.content == "ok"
        assert (
            ask(connect(server, base_url=f"{server.url}/rollout/r/attempt/a/v1")).choices[0].message.content
            == "ok"
        )
        assert server.paths == [
            "/openai/deployments/m/chat/completions?api-version=2024-10-21",
            "/rollout/r/attempt/a/v1/chat/completions",
        ]


async def test_the_async_client_is_served():
    with WindowedServer(WordCounter(), window=50) as server:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:
            assert (await ask(client)).choices[0].message.content == "ok"
            chunks = [chunk async for chunk in await ask(client, stream=True)]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ok"


def test_template_kwargs_and_tools_reach_the_counter(connect):
    class Spy(WordCounter):
        seen = None

        def count(self, messages, *, tools=None, template_kwargs=None):
            self.seen = (tools, template_kwargs)
            return super().count(messages, tools=tools)

    spy = Spy()
    with WindowedServer(spy, window=100) as server:
        ask(connect(server), tools=TOOLS, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert spy.seen == (TOOLS, {"enable_thinking": False})


def test_what_the_template_refuses_is_a_400(connect):
    class Strict(WordCounter):
        def count(self, messages, *, tools=None, template_kwargs=None):
            raise TemplateRefusedError("refused", template_message="No user query found in messages.")

    with WindowedServer(Strict(), window=100) as server:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(connect(server))
        assert caught.value.body["message"] == "No user query found in messages."


def test_a_counter_without_count_text_is_enough(connect):
    class Bare:
        def count(self, messages, *, tools=None, template_kwargs=None):
            return sum(2 + len(message["content"].split()) for message in messages)

    with WindowedServer(Bare(), window=100, model=["one two"]) as server:
        assert ask(connect(server)).usage.completion_tokens == 2


# --- faults -------------------------------------------------------------------------------------------------


def test_fails_as_often_as_told_and_then_answers(connect):
    with WindowedServer(WordCounter(), window=100) as server:
        client = connect(server)
        server.fail_next(503, {"error": {"message": "busy"}}, times=2, headers={"Retry-After": "0"})
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as caught:
                ask(client)
            assert caught.value.response.headers["retry-after"] == "0"
        assert ask(client).choices[0].message.content == "ok"
        assert [record.status for record in server.completions] == [503, 503, 200]


def test_an_error_body_in_a_200(connect):
    with WindowedServer(WordCounter(), window=100) as server:
        server.fail_next(200, {"error": {"message": "too long", "code": 400}})
        assert ask(connect(server)).choices is None


def test_an_error_event_inside_a_200(connect):
    with WindowedServer(WordCounter(), window=100) as server:
        client = connect(server)
        server.fail_next(200, {"error": {"message": "too long", "code": 400}}, in_stream=True)
        stream = ask(client, stream=True)
        with pytest.raises(openai.APIError, match="too long"):
            list(stream)
        assert len(list(ask(client, stream=True))) > 1


def test_a_body_that_is_no_json(connect):
    with WindowedServer(WordCounter(), window=100) as server:
        server.fail_next(413, "<html>Payload Too Large</html>")
        with pytest.raises(openai.APIStatusError) as caught:
            ask(connect(server))
        assert (caught.value.status_code, "Payload" in caught.value.response.text) == (413, True)


def test_a_dropped_connection(connect):
    with WindowedServer(WordCounter(), window=100) as server:
        client = connect(server)
        server.fail_next(0, None)
        with pytest.raises(openai.APIConnectionError):
            ask(client)
        assert ask(client).choices[0].message.content == "ok"


def test_a_silent_cut_drops_the_front_and_its_usage_tells(connect):
    seen = []
    model = ScriptedModel(lambda messages, tools: seen.append(messages) or "ok")
    history = [{"role": "system", "content": words(20)}, user(words(20)), user(words(60)), user("newest")]
    with WindowedServer(WordCounter(), window=70, model=model, silent_cut=True) as server:
        answer = ask(connect(server), history)
        assert seen == [history[2:]]
        assert answer.usage.prompt_tokens == WordCounter().count(history[2:]) == 65
        assert ask(connect(server), [user(words(500))]).usage.prompt_tokens == 69


def test_delays(connect):
    with WindowedServer(WordCounter(), window=100, delay_seconds=0.2) as server:
        start = time.monotonic()
        ask(connect(server))
        assert time.monotonic() - start >= 0.2
        server.delay_seconds = 0
        server.fail_next(500, {}, delay_seconds=0.2)
        with pytest.raises(openai.APITimeoutError):
            ask(connect(server), timeout=0.05)


def test_a_script_that_ends_is_a_500_that_says_so(connect):
    with WindowedServer(WordCounter(), window=100, model=["one"]) as server:
        client = connect(server)
        ask(client)
        with pytest.raises(openai.InternalServerError, match="the script has 1 replies"):
            ask(client)


# --- what it tells ------------------------------------------------------------------------------------------


def test_tells_its_window_as_each_server_does():
    def model_entry(style, **options):
        with WindowedServer(WordCounter(), window=640, style=style, model_name="m", **options) as server:
            [entry] = get(f"{server.base_url}/models")["data"]
            assert entry["id"] == "m"
            return entry

    for style in ("vllm", "vllm-0.10", "sglang"):
        assert model_entry(style)["max_model_len"] == 640
        assert "max_model_len" not in model_entry(style, tells_window=False)
    assert model_entry("llama.cpp")["meta"]["n_ctx"] == 640
    assert "640" not in json.dumps(model_entry("openai"))

    with WindowedServer(WordCounter(), window=640, style="llama.cpp") as server:
        assert get(f"{server.url}/props")["default_generation_settings"]["n_ctx"] == 640
        assert get(f"{server.url}/health") == {"status": "ok"}
        counted = post(f"{server.base_url}/chat/completions/input_tokens", {"messages": [user(words(900))]})
        assert counted == (200, {"input_tokens": 902, "object": "response.input_tokens"})
    with WindowedServer(WordCounter(), window=640, style="vllm") as server:
        with pytest.raises(urllib.error.HTTPError, match="404") as caught:
            get(f"{server.url}/props")
        caught.value.close()
        assert post(f"{server.url}/tokenize", {"messages": [user(words(900))]})[1]["count"] == 902
        assert server.requests == []  # look-ups are in records only
        assert [record.path for record in server.records] == ["/props", "/tokenize"]


@pytest.mark.parametrize(
    "body", [b"not json", {"messages": "hi"}, {"messages": ["hi"]}, {"messages": []}, [1]]
)
def test_a_request_that_is_wrong_is_a_400(body):
    with WindowedServer(WordCounter(), window=100) as server:
        status, answer = post(f"{server.base_url}/chat/completions", body)
        assert status == 400
        assert answer["error"]["message"]
        assert len(server.completions) == 1


# --- life ---------------------------------------------------------------------------------------------------


def test_many_at_once(connect):
    with WindowedServer(WordCounter(), window=1000, model=lambda m, t: m[-1]["content"]) as server:
        client = connect(server)
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda n: ask(client, [user(f"n{n}")]), range(200)))
        assert [answer.choices[0].message.content for answer in answers] == [f"n{n}" for n in range(200)]
        assert len(server.requests) == 200


def test_two_servers_at_once_and_both_gone_afterwards(connect):
    before = threading.active_count()
    with WindowedServer(WordCounter(), window=10) as one, WindowedServer(WordCounter(), window=20) as two:
        assert one.url != two.url
        first, second = connect(one), connect(two)
        ask(first)
        ask(second)
        url = one.url
    # The clients still hold their connections open; they are dead none the less.
    for client in (first, second):
        with pytest.raises(openai.APIConnectionError):
            ask(client)
    with pytest.raises(urllib.error.URLError):
        get(f"{url}/health")
    assert threading.active_count() == before
    with pytest.raises(ConfigurationError, match="does not run"):
        _ = one.url


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigurationError, match="style='vlm' is none of vllm, "):
        WindowedServer(WordCounter(), window=10, style="vlm")
    with pytest.raises(ConfigurationError, match="window=0"):
        WindowedServer(WordCounter(), window=0)
