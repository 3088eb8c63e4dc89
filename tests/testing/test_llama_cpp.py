"""The real llama.cpp server; and what `WindowedServer` says, held against it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from ctxguard import ChatTemplateCounter
from ctxguard.errors import ConfigurationError, ServerUnavailableError
from ctxguard.testing import WindowedServer
from ctxguard.testing.llama_cpp import LlamaCppServer, _request
from ctxguard.testing.tiny_model import cache_folder, write_gguf
from tests.doubles import user

pytestmark = pytest.mark.llamacpp


@pytest.fixture(scope="module")
def model_path():
    return write_gguf(cache_folder())


@pytest.fixture(scope="module")
def counter(qwen3_folder):
    return ChatTemplateCounter.from_folder(qwen3_folder)


@pytest.fixture
def ask():
    """Sends one request to a server with a client that is closed afterwards."""
    clients = []

    def send(server, messages, **options):
        client = openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
        clients.append(client)
        return client.chat.completions.create(model="tiny-qwen3", messages=messages, temperature=0, **options)

    yield send
    for client in clients:
        client.close()


def prompt_of(counter, tokens):
    messages = [user("x" + " word" * (tokens - counter.count([user("x")])))]
    assert counter.count(messages) == tokens
    return messages


def is_alive(pid):
    """A zombie counts as dead: it is only waiting for its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- the fake says what the real one says -------------------------------------------------------------------


@pytest.fixture(scope="module")
def fake(counter, llama_server):
    with WindowedServer(
        counter, window=llama_server.window, style="llama.cpp", model_name="tiny-qwen3"
    ) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("over", [0, 1, 5000])
@pytest.mark.parametrize("limit", [None, 1, 100, 10_000])
def test_the_fake_refuses_in_the_real_ones_words(ask, llama_server, fake, counter, over, limit, stream):
    messages = prompt_of(counter, llama_server.window + over)
    options = {} if limit is None else {"max_tokens": limit}
    bodies = []
    for server in (llama_server, fake):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(server, messages, stream=stream, **options)
        bodies.append((caught.value.status_code, caught.value.response.json()))
    assert bodies[0] == bodies[1]
    assert bodies[0][1]["error"]["n_prompt_tokens"] == llama_server.window + over


@pytest.mark.parametrize("limit", [1, 100, None])
def test_both_serve_window_minus_one_and_end_at_the_window(ask, llama_server, fake, counter, limit):
    messages = prompt_of(counter, llama_server.window - 1)
    for server in (llama_server, fake):
        answer = ask(server, messages, **({} if limit is None else {"max_tokens": limit}))
        assert answer.usage.prompt_tokens == llama_server.window - 1
        assert answer.usage.total_tokens == llama_server.window


def test_both_tell_their_window_at_the_same_places(llama_server, fake):
    for server in (llama_server, fake):
        assert _request(f"{server.url}/props")["default_generation_settings"]["n_ctx"] == llama_server.window
        [entry] = _request(f"{server.base_url}/models")["data"]
        assert (entry["id"], entry["owned_by"]) == ("tiny-qwen3", "llamacpp")
        assert entry["meta"]["n_ctx"] == llama_server.window
        assert entry["meta"]["n_ctx_train"] > llama_server.window
        assert _request(f"{server.url}/health") == {"status": "ok"}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            _request(f"{server.url}/get_server_info")


def test_both_count_a_prompt_that_is_over_long(llama_server, fake, counter):
    body = {"messages": prompt_of(counter, 3 * llama_server.window)}
    answers = [
        _request(f"{server.base_url}/chat/completions/input_tokens", body) for server in (llama_server, fake)
    ]
    assert (
        answers[0]
        == answers[1]
        == {"input_tokens": 3 * llama_server.window, "object": "response.input_tokens"}
    )


def test_both_stream_alike(ask, llama_server, fake):
    for server in (llama_server, fake):
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}
        chunks = list(ask(server, [user("hi")], **options))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.prompt_tokens == 9
        assert all(chunk.usage is None for chunk in chunks[:-1])


# --- the server's life --------------------------------------------------------------------------------------


def test_slots_work_at_once_and_each_has_the_whole_window(ask, llama_server, counter):
    messages = prompt_of(counter, llama_server.window - 8)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(llama_server, messages, max_tokens=2), range(8)))
    assert {answer.usage.prompt_tokens for answer in answers} == {llama_server.window - 8}


def test_two_servers_at_once_and_both_gone_afterwards(model_path):
    with (
        LlamaCppServer(model_path, window=512) as one,
        LlamaCppServer(model_path, window=1024, slots=2, model="other") as two,
    ):
        assert one.url != two.url
        for server, window in ((one, 512), (two, 1024)):
            assert _request(f"{server.url}/props")["default_generation_settings"]["n_ctx"] == window
        assert _request(f"{two.base_url}/models")["data"][0]["id"] == "other"
        assert "listening on" in one.log()
        pids, url = (one.pid, two.pid), one.url
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(OSError, match="refused"):
        _request(f"{url}/health")
    assert one.pid is None
    assert one.log() == ""
    one.stop()  # harmless


def test_gone_when_the_block_fails(model_path):
    def interrupted(server):
        with server:
            pids.append(server.pid)
            raise KeyboardInterrupt

    pids = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(LlamaCppServer(model_path, window=512))
    assert not is_alive(pids[0])


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_gone_when_its_parent_is(model_path, end):
    script = textwrap.dedent(
        f"""
        import time
        from ctxguard.testing.llama_cpp import LlamaCppServer
        with LlamaCppServer({str(model_path)!r}, window=512) as server:
            print(server.pid, flush=True)
            time.sleep(60)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        os.kill(parent.pid, end)
        wait_until(lambda: not is_alive(pid))


def test_a_model_that_cannot_be_loaded_is_an_error_with_the_servers_last_lines(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"x" * 100)
    server = LlamaCppServer(broken, window=512)
    with pytest.raises(ServerUnavailableError, match="ended with exit status") as caught:
        server.start()
    assert "invalid magic characters" in str(caught.value)
    assert server.pid is None


def test_settings_that_make_no_sense_are_refused(model_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="window=1000 is no multiple of 256"):
        LlamaCppServer(model_path, window=1000)
    with pytest.raises(ConfigurationError, match="slots=0"):
        LlamaCppServer(model_path, window=512, slots=0)
    with pytest.raises(ConfigurationError, match="no model file at"):
        LlamaCppServer(model_path.with_name("absent.gguf"), window=512)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r'xllamacpp: pip install "ctxguard-sdk\[demo\]"'):
        LlamaCppServer(model_path, window=512)
